"""Every algorithm's `_transform` against the mathematics, over shapes, dtypes and extremes."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steergate_server.algorithms.base import BaseSteerVectorAlgorithm
from steergate_server.algorithms.registry import create_algorithm
from unit.algorithms import oracle
from unit.algorithms.cases import DTYPES, HIDDEN, NORMALIZING, assert_close, exact, float32, make, rows_of, tensor

torch.set_num_threads(1)

EPS32 = float(torch.finfo(torch.float32).eps)
COUNTS = st.integers(1, 64)
WIDTHS = st.one_of(st.integers(1, 256), st.sampled_from([1, 2, 256]))
SCALES = st.one_of(st.sampled_from([0.0, 1.0, -1.0, 0.5, 2.0, -3.0]), st.floats(-100, 100, width=32))
KINDS = st.sampled_from(["plain", "large", "tiny", "zeros"])
SEEDS = st.integers(0, 2**32 - 1)


def steps(width):
    """Rounding errors that a float32 sum over a width may pile up, in units of its eps."""
    return 8 + 2 * np.sqrt(width)


@pytest.mark.parametrize("name", HIDDEN)
@settings(max_examples=60, deadline=None)
@given(SEEDS, COUNTS, WIDTHS, st.sampled_from(DTYPES), KINDS, SCALES, st.sampled_from([1e-20, 1e-3, 1.0, 30.0]))
def test_transform(name, seed, count, width, dtype, kind, scale, size):
    rng = np.random.default_rng(seed)
    case = make(name, rng, width, scale, size, rank=int(rng.integers(1, 5)))
    rows = rows_of(rng, count, width, dtype, kind)
    before = rows.clone()
    algorithm = create_algorithm(name)
    algorithm.set_payload(case.payload, case.scale)
    found = algorithm._transform(rows, algorithm.payload)
    assert torch.equal(rows, before)
    assert found.dtype == dtype
    assert found.shape == rows.shape
    assert_close(found, case.change(exact(rows)), EPS32 * steps(width) * case.reach(exact(rows)))


@pytest.mark.parametrize("name", NORMALIZING)
@settings(max_examples=80, deadline=None)
@given(SEEDS, COUNTS, WIDTHS, st.sampled_from(DTYPES), KINDS, SCALES, st.sampled_from([1e-20, 1.0, 1e3]))
def test_normalize(name, seed, count, width, dtype, kind, scale, size):
    rng = np.random.default_rng(seed)
    case = make(name, rng, width, scale, size)
    rows = rows_of(rng, count, width, dtype, kind)
    algorithm = create_algorithm(name, normalize=True)
    algorithm.set_payload(case.payload, case.scale)
    found = algorithm._transform(rows, algorithm.payload)
    before = exact(rows)
    changed = case.change(before)
    # Where little is left of a row, its direction is that of the rounding errors: only its norm is known.
    error = EPS32 * steps(width) * case.reach(before)
    known = oracle.norms(changed) > 100 * error + float(torch.finfo(dtype).smallest_normal)
    wanted = oracle.renormalized(before, changed)
    amplified = oracle.norms(before)[known] * (error[known] / oracle.norms(changed)[known] + EPS32)
    assert_close(found[torch.from_numpy(known)], wanted[known], amplified, ulps=3)
    assert torch.isfinite(found).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 3.0, 1e5])
@pytest.mark.parametrize("name", NORMALIZING)
def test_normalize_where_the_changed_row_is_out_of_range_before_it_is_rescaled(name, scale, dtype):
    """The row that is kept fits the dtype; only what lies in between would not."""
    width = 8
    rows = torch.full((3, width), 2.0e4).to(dtype)
    v = torch.full((width,), 3.0e4)
    v[0] = -1e4
    payload = {
        "direct": v,
        "replace": v,
        "erase": {"direction": v},
        "concept_replace": {"h1": torch.full((width,), 1.0), "h2": v},
    }[name]
    before, exact_v = exact(rows), exact(v)
    changed = {
        "direct": lambda: oracle.direct(before, scale, exact_v),
        "replace": lambda: oracle.replace(before, scale, exact_v),
        "erase": lambda: oracle.erase(before, scale, exact_v),
        "concept_replace": lambda: oracle.concept_replace(before, scale, np.ones(width), exact_v),
    }[name]()
    algorithm = create_algorithm(name, normalize=True)
    algorithm.set_payload(payload, scale)
    found = algorithm._transform(rows, algorithm.payload)
    assert_close(found, oracle.renormalized(before, changed), 1e-5 * oracle.norms(before), ulps=3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-6, 1e-9, 1e-30])
def test_normalized_replace_by_a_tiny_vector_keeps_its_direction(size, dtype):
    v = float32(np.array([3.0, -4.0, 0.0, 12.0]) * size)
    rows = torch.tensor([[1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 0.0], [-100.0, 0.0, 0.0, 1.0]], dtype=dtype)
    algorithm = create_algorithm("replace", normalize=True)
    algorithm.set_payload(tensor(v), 1.0)
    found = algorithm._transform(rows, algorithm.payload)
    wanted = oracle.renormalized(exact(rows), oracle.replace(exact(rows), 1.0, v))
    assert_close(found, wanted, 1e-5 * oracle.norms(exact(rows)), ulps=3)


@pytest.mark.parametrize("name", ["erase", "clamp", "concept_replace"])
@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-30, 1e-19, 1e19])
@pytest.mark.parametrize("kind", ["plain", "large"])
def test_a_vectors_length_does_not_matter_where_it_is_divided_out(name, size, kind):
    """Every float32 vector that is not zero has a direction; its square does not have to fit float32."""
    rng = np.random.default_rng(7)
    case = make(name, rng, 16, 1.0, size)
    rows = rows_of(rng, 5, 16, torch.float32, kind)
    algorithm = create_algorithm(name)
    algorithm.set_payload(case.payload, case.scale)
    found = algorithm._transform(rows, algorithm.payload)
    assert_close(found, case.change(exact(rows)), EPS32 * steps(16) * case.reach(exact(rows)))


@pytest.mark.parametrize("name", ["erase", "clamp", "concept_replace"])
def test_a_vector_of_zeros_is_refused_where_it_is_divided_by(name):
    zero = torch.zeros(4)
    payload = {"h1": zero, "h2": torch.ones(4)} if name == "concept_replace" else {"direction": zero, "min": 0.0}
    algorithm = create_algorithm(name)
    algorithm.set_payload(payload)
    with pytest.raises(ValueError, match="zero"):
        algorithm._transform(torch.ones(2, 4), algorithm.payload)
    with pytest.raises(ValueError, match="zero"):
        algorithm.graph_lower(payload, 1.0)


@pytest.mark.parametrize(
    "params", [{}, {"min": 2.0, "max": 1.0}, {"value": 1.0, "min": 0.0}, {"value": 1.0, "max": 2.0}]
)
def test_clamp_refuses_bounds_that_are_none(params):
    algorithm = create_algorithm("clamp")
    algorithm.set_payload({"direction": torch.ones(4), **params})
    with pytest.raises(ValueError, match=r"bound|value|exceeds"):
        algorithm._transform(torch.ones(2, 4), algorithm.payload)


# _renormalize


@settings(max_examples=150, deadline=None)
@given(
    SEEDS,
    COUNTS,
    WIDTHS,
    st.sampled_from(DTYPES),
    st.sampled_from([1e-6, 1.0, 6e4]),
    st.sampled_from([1e-6, 1.0, 6e4]),
)
def test_renormalize_keeps_norms(seed, count, width, dtype, before, after):
    rng = np.random.default_rng(seed)
    pair = []
    for size in (before, after):
        rows = rng.normal(size=(count, width))
        rows *= size / oracle.norms(rows)[:, None]
        rows[rng.random(count) < 0.2] = 0
        pair.append(torch.from_numpy(rows).to(dtype))
    original, transformed = pair
    found = BaseSteerVectorAlgorithm._renormalize(original, transformed)
    assert found.dtype == dtype
    wanted = oracle.renormalized(exact(original), exact(transformed))
    assert_close(found, wanted, EPS32 * steps(width) * oracle.norms(exact(original)))
    zero = ~exact(transformed).any(axis=1)
    assert not found[torch.from_numpy(zero)].any()


@pytest.mark.parametrize(("dtype", "largest"), [(torch.float16, 6e4), (torch.bfloat16, 3e38), (torch.float32, 3e38)])
def test_renormalize_at_the_end_of_the_range(dtype, largest):
    """Elements near the largest number: the row's norm itself lies outside of the dtype, its elements do not."""
    original = torch.full((2, 64), largest).to(dtype)
    transformed = torch.ones(2, 64).to(dtype)
    transformed[1, ::2] = -1
    for pair in ((original, transformed), (transformed, original), (original, original)):
        found = BaseSteerVectorAlgorithm._renormalize(*pair)
        assert_close(found, oracle.renormalized(exact(pair[0]), exact(pair[1])), np.zeros(2), ulps=3)
