"""Random payloads of every algorithm beside what they mean, for all tests that run algorithms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch

from unit.algorithms import oracle
from unit.algorithms.oracle import Array, norms

AFFINE = ("direct", "attention_add", "erase", "replace", "concept_replace", "lm_steer", "loreft")
"""The algorithms that lower to an affine map of the row."""

HIDDEN = (*AFFINE, "linear", "clamp")
"""All that work on rows of a stream or of heads."""

NORMALIZING = ("direct", "erase", "replace", "concept_replace")

SOFT_MODES = ("soft", "soft_topk", "soft_random")

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Case(NamedTuple):
    """One payload and one scale. `change`: T on float64 rows; `reach`: how large what is summed gets, by row."""

    name: str
    payload: Any
    scale: float
    change: Callable[[Array], Array]
    reach: Callable[[Array], Array]
    rank: int = 0
    params: Mapping[str, Any] = MappingProxyType({})


def tensor(values: Array) -> torch.Tensor:
    """Numbers as the server keeps payloads: float32."""
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))


def float32(values: Array) -> Array:
    """Numbers rounded to float32, as float64."""
    return values.astype(np.float32).astype(np.float64)


def length(v: Array) -> float:
    """Euclidean (or Frobenius) norm."""
    largest = np.abs(v).max(initial=0)
    return 0.0 if largest == 0 else float(largest * np.sqrt(((v / largest) ** 2).sum()))


def make(name: str, rng: np.random.Generator, width: int, scale: float, size: float = 1.0, rank: int = 2) -> Case:
    """A case of a hidden-states algorithm. size: magnitude of a direction's elements."""

    def numbers(*shape: int) -> Array:
        return float32(rng.normal(size=shape) * size)

    s = abs(scale)
    if name in ("direct", "attention_add"):
        v = numbers(width)
        return Case(name, tensor(v), scale, lambda x: oracle.direct(x, scale, v), lambda x: norms(x) + s * length(v))
    if name == "replace":
        v = numbers(width)
        return Case(name, tensor(v), scale, lambda x: oracle.replace(x, scale, v), lambda x: norms(x) + s * length(v))
    if name == "erase":
        v = numbers(width)
        return Case(
            name,
            {"direction": tensor(v)},
            scale,
            lambda x: oracle.erase(x, scale, v),
            lambda x: norms(x) * (1 + s),
        )
    if name == "concept_replace":
        h1, h2 = numbers(width), numbers(width)
        ratio = length(h2 - h1) / length(h1)
        return Case(
            name,
            {"h1": tensor(h1), "h2": tensor(h2)},
            scale,
            lambda x: oracle.concept_replace(x, scale, h1, h2),
            lambda x: norms(x) * (1 + s * ratio),
        )
    if name == "clamp":
        v = numbers(width)
        kind = int(rng.integers(4))
        low, high = sorted(float(number) for number in rng.normal(size=2).astype(np.float32))
        params = ({"min": low}, {"max": high}, {"min": low, "max": high}, {"value": low})[kind]
        share = min(1.0, s) or 1.0
        arguments = (params.get("min"), params.get("max"), params.get("value"))
        return Case(
            name,
            {"direction": tensor(v), **params},
            share,
            lambda x: oracle.clamp(x, share, v, *arguments),
            lambda x: 2 * norms(x) + 10,
            params=params,
        )
    if name == "linear":
        weight, bias = numbers(width, width) / np.sqrt(width), numbers(width) if rng.random() < 0.7 else None
        weight = float32(weight)
        payload = {"weight": tensor(weight)} | ({} if bias is None else {"bias": tensor(bias)})
        b = 0.0 if bias is None else length(bias)
        return Case(
            name,
            payload,
            scale,
            lambda x: oracle.linear(x, scale, weight, bias),
            lambda x: norms(x) * (1 + s * length(weight)) + s * b,
        )
    if name == "lm_steer":
        p1, p2 = float32(numbers(width, rank) / np.sqrt(width)), numbers(width, rank)
        return Case(
            name,
            {"projector1": tensor(p1), "projector2": tensor(p2)},
            scale,
            lambda x: oracle.lm_steer(x, scale, p1, p2),
            lambda x: norms(x) * (1 + s * length(p1) * length(p2)),
            rank=rank,
        )
    if name == "loreft":
        rotate, weight = (float32(numbers(*shape) / np.sqrt(width)) for shape in ((width, rank), (rank, width)))
        bias = numbers(rank) if rng.random() < 0.7 else None
        payload = {"rotate_layer": tensor(rotate), "learned_source_weight": tensor(weight)}
        payload |= {} if bias is None else {"learned_source_bias": tensor(bias)}
        r, w, b = length(rotate), length(weight), 0.0 if bias is None else length(bias)
        return Case(
            name,
            payload,
            scale,
            lambda x: oracle.loreft(x, scale, rotate, weight, bias),
            lambda x: norms(x) + s * (norms(x) * (w + r) + b) * r,
            rank=rank,
        )
    raise NotImplementedError(name)


def router(rng: np.random.Generator, experts: int, mode: str, **more: Any) -> dict[str, Any]:
    """One layer's router settings, as an algorithm gets them."""

    def some(most: int) -> list[int]:
        return [int(e) for e in rng.choice(experts, size=int(rng.integers(1, most + 1)), replace=False)]

    toggles = mode in ("activate", "deactivate")
    return {
        "mode": mode,
        "expert_ids": some(max(1, experts // 2)),
        "activate_ids": some(max(1, experts // 4)) if toggles and rng.random() < 0.5 else [],
        "deactivate_ids": some(max(1, experts // 4)) if toggles and rng.random() < 0.5 else [],
        "epsilon": float(np.float32(rng.choice([0.01, 0.0, 2.0]))),
        "lambda": float(np.float32(rng.normal() * 2)),
        "topk": int(rng.integers(1, experts + 2)),
        "seed": int(rng.integers(2**31)),
        "experts": experts,
        "layer": int(rng.integers(64)),
        **more,
    }


def routed(settings: dict[str, Any], logits: Array) -> Array:
    """What the settings mean on float64 logits; the random mode is not among them."""
    mode, experts = settings["mode"], settings["expert_ids"]
    if mode == "soft":
        return oracle.soft(logits, experts, settings["lambda"])
    if mode == "soft_topk":
        return oracle.soft_topk(logits, experts, settings["lambda"], settings["topk"])
    up, down = list(settings["activate_ids"]), list(settings["deactivate_ids"])
    (up if mode == "activate" else down).extend(experts)
    return oracle.toggled(logits, up, down, settings["epsilon"])


def rows_of(rng: np.random.Generator, count: int, width: int, dtype: torch.dtype, kind: str) -> torch.Tensor:
    """Rows `[count, width]`: of norm about sqrt(width), of norm 1e4, tiny, or with zero rows between."""
    rows = rng.normal(size=(count, width))
    if kind == "large":
        rows *= 1e4 / norms(rows)[:, None]
    elif kind == "tiny":
        rows *= 1e-6
    elif kind == "zeros":
        rows[rng.random(count) < 0.5] = 0
    return torch.from_numpy(rows).to(dtype)


def exact(rows: torch.Tensor) -> Array:
    """A tensor's numbers in float64."""
    numbers: Array = rows.double().numpy()
    return numbers


def assert_close(found: torch.Tensor, wanted: Array, slack: Array, *, ulps: float = 1.0) -> None:
    """Rows equal within the rounding of their dtype and `slack` [n], where what is wanted fits that dtype at all.

    slack: absolute error by row that the arithmetic before the last rounding may bring.
    """
    kind = torch.finfo(found.dtype)
    numbers = exact(found)
    fits = np.abs(wanted).max(axis=1) + slack < kind.max * (1 - kind.eps)
    assert np.isfinite(numbers[fits]).all(), "not finite"
    allowed = ulps * kind.eps * np.abs(wanted) + kind.smallest_normal * kind.eps + slack[:, None]
    excess = (np.abs(numbers - wanted) - allowed)[fits]
    assert excess.max(initial=0) <= 0, f"off by {np.abs(numbers - wanted)[fits].max()}, {excess.max()} too much"
