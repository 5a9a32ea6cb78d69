"""Decoding and algorithms of the oracle against float64 formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from .checks import (
    HIDDEN,
    LAST,
    assert_differ,
    assert_same,
    run,
)
from .models import pack, random_direction
from .sources import NotAdmissibleError, Site, decode_packed
from .static import renormalize, transform
from .wire import EVERYWHERE, Json, static


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_packed_rows_survive_every_dtype(dtype: str) -> None:
    exact = {3: np.array([1.5, -0.0078125, 96.0]), 1: np.array([0.0, -3.25, 2.0**-9])}
    rows = decode_packed(pack("mlp_in", exact, dtype, scales=[0.1, -4.0]))
    assert list(rows) == [Site(3, "mlp_in"), Site(1, "mlp_in")]
    np.testing.assert_array_equal(rows[Site(3, "mlp_in")].numpy(), (exact[3] * 0.1).astype(np.float32))
    np.testing.assert_array_equal(rows[Site(1, "mlp_in")].numpy(), (exact[1] * -4.0).astype(np.float32))


def test_a_scaled_row_is_rounded_once() -> None:
    row = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    once, twice = (row.astype(np.float64) * 0.1).astype(np.float32), row * np.float32(0.1)
    assert (once != twice).any()
    ours = decode_packed(pack("post_block", {0: row}, scales=[0.1]))[Site(0, "post_block")]
    np.testing.assert_array_equal(ours.numpy(), once)


def test_bfloat16_agrees_with_torch() -> None:
    row = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    ours = decode_packed(pack("post_block", {0: row}, "bfloat16"))[Site(0, "post_block")]
    assert torch.equal(ours, torch.from_numpy(row).bfloat16().float())


def test_algorithms_against_float64_formulas() -> None:
    rng = np.random.default_rng(1)
    x, v, h1, h2, b = rng.standard_normal((5, 8))
    W = rng.standard_normal((8, 8))
    P1, P2, R = rng.standard_normal((3, 8, 3))
    A, c = rng.standard_normal((3, 8)), rng.standard_normal(3)
    s, u = 0.7, v / np.sqrt(v @ v)
    along = float(x @ u)
    cases: list[tuple[str, Json, Json, np.ndarray]] = [
        ("direct", {"v": v}, {}, x + s * v),
        ("attention_add", {"v": v}, {}, x + s * v),
        ("erase", {"v": v}, {}, x - s * along * u),
        ("replace", {"v": v}, {}, s * v),
        ("clamp", {"v": v}, {"min": along + 1}, x + s * u),
        ("clamp", {"v": v}, {"max": along - 2}, x - 2 * s * u),
        ("clamp", {"v": v}, {"min": along - 1, "max": along + 1}, x),
        ("clamp", {"v": v}, {"value": 0.25}, x + s * (0.25 - along) * u),
        ("concept_replace", {"h1": h1, "h2": h2}, {}, x + s * (x @ h1) / (h1 @ h1) * (h2 - h1)),
        ("linear", {"weight": W, "bias": b}, {}, s * (W @ x + b)),
        ("lm_steer", {"projector1": P1, "projector2": P2}, {}, x + s * P2 @ (P1.T @ x)),
        (
            "loreft",
            {"rotate_layer": R, "learned_source_weight": A, "learned_source_bias": c},
            {},
            x + s * R @ (A @ x + c - R.T @ x),
        ),
    ]
    for algorithm, numbers, params, expected in cases:
        tensors = {key: torch.tensor(value, dtype=torch.float32) for key, value in numbers.items()}
        got = transform(algorithm, torch.tensor(x, dtype=torch.float32), tensors, s, params)
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-4, atol=1e-5, err_msg=f"{algorithm} {params}")


def test_concept_pairs_and_linear_maps_reach_their_sites(model: LlamaForCausalLM) -> None:
    h1, h2 = random_direction(11, HIDDEN, [1]), random_direction(12, HIDDEN, [1], norm=5.0)
    pair = {"kind": "payload", "payload": {"kind": "concept_pair", "h1": h1, "h2": h2}}
    result = run(model, {"vectors": [{"steer": pair, "algorithm": "concept_replace", "where": EVERYWHERE}]})
    assert list(result.vectors[0].applied) == [Site(1, "post_block")]
    assert_differ(result, run(model))

    doubled = pack("post_block", {0: 2 * np.eye(HIDDEN).reshape(-1)})["post_block"]
    weight = {"dtype": "float32", "shape": [HIDDEN, HIDDEN], "data": doubled["data"]}
    linear = {
        "steer": {"kind": "payload", "payload": {"kind": "linear", "weight": weight}},
        "algorithm": "linear",
        "scale": 0.5,
        "where": EVERYWHERE,
    }
    result = run(model, {"vectors": [{**linear, "layers": [2], "hook": "mlp_out"}]})
    assert list(result.vectors[0].applied) == [Site(2, "mlp_out")]
    assert_same(result, run(model))
    assert list(run(model, {"vectors": [{**linear, "layers": [2]}]}).vectors[0].applied) == [Site(2, "post_block")]
    with pytest.raises(NotAdmissibleError, match="layers_required"):
        run(model, {"vectors": [linear]})


def test_normalize_keeps_the_norm_and_turns_the_row() -> None:
    x, y = torch.tensor([3.0, 4.0]), torch.tensor([0.0, 1e30])
    assert torch.allclose(renormalize(x, y), torch.tensor([0.0, 5.0]))
    assert torch.equal(renormalize(x, torch.zeros(2)), torch.zeros(2))
    assert torch.allclose(renormalize(x * 1e30, y), torch.tensor([0.0, 5e30]))


def test_normalize_at_the_last_site_changes_no_logit(model: LlamaForCausalLM) -> None:
    """The final norm takes the length out again, so a normalized add equals the add there, and not before."""
    for layer, same in ((LAST, True), (1, False)):
        packed = random_direction(13, HIDDEN, [layer], norm=40.0)
        left = run(model, {"vectors": [static(packed)]})
        right = run(model, {"vectors": [static(packed, normalize=True)]})
        (assert_same if same else assert_differ)(left, right)
