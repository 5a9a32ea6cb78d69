"""Static steering: which rows a vector selects, what it does to a row, and how several vectors share one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .results import VectorTrace
from .sources import HIDDEN_HOOKS, Json, Numbers, Registered, Site, fields, require, resolve


def selects(where: Json, row: int, tokens: Sequence[int], prompt_length: int) -> bool:
    """wire.md, Where: "union of includes minus union of excludes. A selector belongs to its phase alone."

    Args:
        where: The Where object.
        row: Absolute row: the forward pass whose input is ``tokens[row]``.
        tokens: Prompt and generated tokens, at least up to `row`.
        prompt_length: P; "phase is row >= P".
    """
    clause = fields(where, **WHERE_DEFAULTS)
    whole_phase = clause["generation" if row >= prompt_length else "prompt"] == "all"
    answer = clause["answer"] == "all" and row >= prompt_length - 1
    included = whole_phase or answer or _matches(clause, "", row, tokens, prompt_length)
    return included and not _matches(clause, "exclude_", row, tokens, prompt_length)


_SELECTORS = (
    "prompt_tokens",
    "prompt_positions",
    "prompt_window",
    "generation_tokens",
    "generation_positions",
    "generation_window",
)
GENERATION_PARTS = ("generation", "answer", "generation_tokens", "generation_positions", "generation_window")
WHERE_DEFAULTS: dict[str, Any] = dict.fromkeys(
    ("prompt", "generation", "answer", *_SELECTORS, *(f"exclude_{name}" for name in _SELECTORS))
)


def _matches(clause: Json, prefix: str, row: int, tokens: Sequence[int], prompt_length: int) -> bool:
    """Whether one of the six selectors of the row's phase (or their exclude twins, by `prefix`) names this row."""
    generated = row >= prompt_length
    phase = prefix + ("generation" if generated else "prompt")
    token_ids, positions, window = (clause[f"{phase}_{what}"] for what in ("tokens", "positions", "window"))
    # "generated position j is row P + j"; prompt positions are absolute.
    position = row - prompt_length if generated else row
    if token_ids is not None and tokens[row] in token_ids:
        return True
    if positions is not None:
        # "negative ones count from the end of the whole prompt"
        from_end = {prompt_length + at for at in positions if at < 0} if not generated else set()
        if position in positions or position in from_end:
            return True
    if window is not None:
        start, stop = window
        if not generated:
            start, stop, _ = slice(start, stop).indices(prompt_length)
        return start <= position and (stop is None or position < stop)
    return False


PAYLOAD_KIND = {
    "direct": "direction",
    "attention_add": "direction",
    "erase": "direction",
    "replace": "direction",
    "clamp": "direction",
    "concept_replace": "concept_pair",
    "linear": "linear",
    "lm_steer": "lowrank",
    "loreft": "reft",
}
NORMALIZE = frozenset({"direct", "erase", "replace", "concept_replace"})
"""algorithms.md, table: the algorithms that permit `normalize`."""


DIVIDES_BY = {"erase": "v", "clamp": "v", "concept_replace": "h1"}
ZERO = torch.zeros(())
"""An absent bias."""


def transform(algorithm: str, x: torch.Tensor, numbers: Numbers, scale: float, params: Json) -> torch.Tensor:
    """algorithms.md, "Table and mathematics": T(x) for one float32 row x, with s the scale."""
    s = scale
    match algorithm:
        case "direct" | "attention_add":
            return x + s * numbers["v"]
        case "erase":
            u = _unit(numbers["v"])
            return x - s * torch.dot(x, u) * u
        case "replace":
            return s * numbers["v"]
        case "clamp":
            u = _unit(numbers["v"])
            low, high = bounds(params)
            p = torch.dot(x, u)
            return x + s * (torch.clamp(p, low, high) - p) * u
        case "concept_replace":
            h1, h2 = numbers["h1"], numbers["h2"]
            c = torch.dot(x, h1) / torch.dot(h1, h1)
            return x + s * c * (h2 - h1)
        case "linear":
            mapped: torch.Tensor = numbers["weight"] @ x + numbers.get("bias", ZERO)
            return s * mapped
        case "lm_steer":
            change: torch.Tensor = (x @ numbers["projector1"]) @ numbers["projector2"].T
            return x + s * change
        case "loreft":
            rotate = numbers["rotate_layer"]
            source = numbers["learned_source_weight"] @ x + numbers.get("learned_source_bias", ZERO)
            return x + s * (rotate @ (source - rotate.T @ x))
    raise NotImplementedError(algorithm)


def renormalize(original: torch.Tensor, transformed: torch.Tensor) -> torch.Tensor:
    """algorithms.md, `_renormalize`: "rescale rows to the original norms; zero rows untouched"."""
    largest = transformed.abs().max()
    if largest == 0:
        return transformed  # a zero row has no direction to rescale
    direction = transformed / largest
    original_largest = original.abs().max()
    if original_largest == 0:
        return original  # norm 0 stays norm 0
    norm = original_largest * _norm(original / original_largest)
    return direction * (norm / _norm(direction))


def _unit(v: torch.Tensor) -> torch.Tensor:
    return v / _norm(v)


def _norm(v: torch.Tensor) -> torch.Tensor:
    length: torch.Tensor = torch.linalg.vector_norm(v)
    return length


def bounds(params: Json) -> tuple[float, float]:
    """Clamp's min and max: "`value` pins both and excludes them; at least one bound; min <= max"."""
    if "value" in params:
        value = fields(params, required=("value",))["value"]
        return value, value
    require(bool(params), "missing_field", "clamp needs at least one bound")
    given = fields(params, min=-math.inf, max=math.inf)
    require(given["min"] <= given["max"], "out_of_range", f"{given}")
    return given["min"], given["max"]


@dataclass
class StaticVector:
    """One VectorSpec, decoded."""

    where: Json
    algorithm: str
    scale: float
    normalize: bool
    params: Json
    sites: dict[Site, Numbers]
    trace: VectorTrace

    @classmethod
    def decode(cls, spec: Json, registered: Registered) -> StaticVector:
        """Resolve the source and check that the algorithm, payload, hook and options fit together."""
        spec = fields(
            spec,
            required=("where",),
            steer=None,
            algorithm="direct",
            scale=1.0,
            layers=None,
            hook=None,
            normalize=False,
            params={},
            label=None,
        )
        algorithm = spec["algorithm"]
        if algorithm not in PAYLOAD_KIND or spec["steer"] is None:
            raise NotImplementedError(f"{algorithm} is not interpreted")
        kind, sites = resolve(spec["steer"], "steer", registered, layers=spec["layers"], hook=spec["hook"])
        require(kind == PAYLOAD_KIND[algorithm], "payload_kind", f"{algorithm} takes no {kind}")
        require(algorithm in NORMALIZE or not spec["normalize"], "normalize_not_supported", algorithm)
        if algorithm == "clamp":
            bounds(spec["params"])
            require(0 <= spec["scale"] <= 1, "out_of_range", f"clamp's scale {spec['scale']}")
        else:
            require(not spec["params"], "unknown_param", f"{algorithm} takes none")
        for site, numbers in sites.items():
            divisor = DIVIDES_BY.get(algorithm)
            require(divisor is None or bool(numbers[divisor].any()), "zero_vector", f"{divisor} at {site}")
            fits = site.hook == "attn_heads" if algorithm == "attention_add" else site.hook in HIDDEN_HOOKS
            require(fits, "hook_not_allowed", f"{algorithm} at {site}")
        trace = VectorTrace(spec["label"])
        return cls(spec["where"], algorithm, spec["scale"], spec["normalize"], spec["params"], sites, trace)

    def apply(self, site: Site, x: torch.Tensor) -> torch.Tensor:
        """The row after this vector; "`normalize` runs after the transform"."""
        y = transform(self.algorithm, x, self.sites[site], self.scale, self.params)
        return renormalize(x, y) if self.normalize else y


@dataclass
class Group:
    """The static vectors of the request, or of the server default, with their `conflict` rule."""

    vectors: list[StaticVector]
    conflict: str
    selected: list[StaticVector] = field(default_factory=list)

    def start_row(self, row: int, tokens: Sequence[int], prompt_length: int) -> None:
        """Decide once per row which vectors select it; "`scale` 0 drops the vector at admission"."""
        self.selected = [v for v in self.vectors if v.scale != 0 and selects(v.where, row, tokens, prompt_length)]
        for vector in self.selected:
            vector.trace.selected.append(row)

    def apply(self, row: int, site: Site, x: torch.Tensor) -> torch.Tensor:
        """wire.md, "Several vectors on one row (per site, within one group)"."""
        here = [vector for vector in self.selected if site in vector.sites]
        if self.conflict == "priority":
            here = here[:1]  # "the earlier vector owns an overlapping row"
        elif self.conflict == "error":
            require(len(here) <= 1, "vector_conflict", f"at {site}, row {row}")
        else:
            require(self.conflict == "sequential", "out_of_range", self.conflict)
        for vector in here:  # "in list order, each seeing the previous result"
            x = vector.apply(site, x)
            vector.trace.applied.setdefault(site, []).append(row)
        return x
