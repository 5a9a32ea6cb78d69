"""Scores, firings and soft weights of gates against numpy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steergate_server.graph.lanes import BELOW, COSINE, LASTING, SOFT, GateTable, Lanes
from unit.algorithms.cases import DTYPES, exact
from unit.graph.scoring import score_gates

torch.set_num_threads(1)

CPU = torch.device("cpu")
SITE = 2


def sigmoid(argument):
    """Saturating, in float64."""
    if argument >= 0:
        return 1 / (1 + math.exp(-min(argument, 800)))
    return math.exp(max(argument, -800)) / (1 + math.exp(max(argument, -800)))


def score_of(value, probe, mode):
    """Dot product, or cosine: 0 for a row of zeros."""
    if not mode & COSINE:
        return float(value @ probe)
    size = math.sqrt(value @ value) * math.sqrt(probe @ probe)
    return float(value @ probe) / size if size else 0.0


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 24),
    st.integers(1, 64),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.sampled_from([1e-3, 1.0, 7.5, 1e4, 1e30, 3e38]),
)
def test_against_numpy(seed, rows, width, dtype, split, sharpness):
    rng = np.random.default_rng(seed)
    padded, requests, count = rows + int(rng.integers(3)), 4, 3
    lanes, gates = Lanes(padded + 2, count, CPU), GateTable(requests, count, CPU)
    probes = torch.zeros(5, width)
    probes[1:] = torch.from_numpy(rng.normal(size=(4, width)))
    hidden = torch.from_numpy(rng.normal(size=(padded, width)) * rng.choice([1, 100])).to(dtype)
    hidden[torch.from_numpy(rng.random(padded) < 0.2)] = 0
    residual = torch.from_numpy(rng.normal(size=(padded, width))).to(dtype) if split else None
    if residual is not None:
        residual[~hidden.any(dim=1)] = 0
    gates.site[1:] = torch.from_numpy(rng.choice([-1, 0, SITE], p=[0.1, 0.2, 0.7], size=(requests - 1, count)))
    gates.probe[1:] = torch.from_numpy(rng.integers(1, 5, size=(requests - 1, count)))
    gates.threshold[1:] = torch.from_numpy(rng.normal(size=(requests - 1, count)))
    gates.sharpness[1:] = sharpness
    modes = [0, SOFT, LASTING, SOFT | BELOW, LASTING | BELOW, SOFT | COSINE, COSINE, SOFT | BELOW | COSINE]
    gates.mode[1:] = torch.from_numpy(rng.choice(modes, size=(requests - 1, count)))
    lanes.request[:rows] = torch.from_numpy(rng.integers(0, requests, size=rows))
    lanes.look[:padded] = torch.from_numpy(rng.random((padded, count)) < 0.7)
    lanes.weight[:] = torch.from_numpy(rng.choice([0.0, 1.0], size=lanes.weight.shape))
    before = lanes.weight.clone(), lanes.score.clone(), lanes.fired.clone()
    kept = hidden.clone()
    score_gates(hidden, residual, SITE, rows, lanes, gates, probes)
    assert torch.equal(hidden, kept)
    value = exact(hidden.float()) + (0 if residual is None else exact(residual.float()))
    for row in range(padded + 2):
        owner = int(lanes.request[row])
        for gate in range(count):
            at = (row, gate)
            if row >= rows or not lanes.look[at] or gates.site[owner, gate] != SITE:
                assert lanes.weight[row, gate + 1] == before[0][row, gate + 1]
                assert lanes.fired[at] == before[2][at]
                assert math.isnan(float(lanes.score[at]))
                continue
            mode, threshold = int(gates.mode[owner, gate]), float(gates.threshold[owner, gate])
            probe = exact(probes[int(gates.probe[owner, gate])])
            wanted = score_of(value[row], probe, mode)
            found = float(lanes.score[at])
            reach = 1.0 if mode & COSINE else math.sqrt(value[row] @ value[row]) * math.sqrt(probe @ probe)
            assert found == pytest.approx(wanted, abs=1e-6 * (4 + math.sqrt(width)) * reach)
            # Firing and weight follow from the score that is reported, to the bit.
            margin = (found - threshold) * (-1 if mode & BELOW else 1)
            assert bool(lanes.fired[at]) == (margin > 0)
            weight = float(lanes.weight[row, gate + 1])
            if mode & SOFT:
                argument = margin * float(gates.sharpness[owner, gate])
                assert weight == pytest.approx(sigmoid(argument), abs=1e-6 * (1 + min(abs(argument), 30)))
            elif mode & LASTING and margin > 0:
                assert weight == 1.0
            else:
                assert weight == float(before[0][row, gate + 1])
    assert torch.equal(lanes.weight[:, 0], before[0][:, 0])


def single(value, probe, threshold, mode, sharpness=1.0, residual=None):
    """(score, fired, weight) of one gate at one row."""
    lanes, gates = Lanes(1, 1, CPU), GateTable(2, 1, CPU)
    gates.site[1, 0], gates.probe[1, 0] = SITE, 1
    gates.threshold[1, 0], gates.sharpness[1, 0], gates.mode[1, 0] = threshold, sharpness, mode
    lanes.request[0], lanes.look[0, 0] = 1, True
    probes = torch.zeros(2, len(probe))
    probes[1] = torch.tensor(probe)
    score_gates(value, residual, SITE, 1, lanes, gates, probes)
    return float(lanes.score[0, 0]), bool(lanes.fired[0, 0]), float(lanes.weight[0, 1])


@pytest.mark.parametrize("mode", [0, SOFT, LASTING, BELOW, SOFT | BELOW, LASTING | BELOW])
@pytest.mark.parametrize("sharpness", [1e-30, 1.0, 1e30])
def test_a_score_that_equals_the_threshold_does_not_fire(mode, sharpness):
    score, fired, weight = single(torch.tensor([[1.5, 2.0]]), [1.0, 0.25], 2.0, mode, sharpness)
    assert (score, fired) == (2.0, False)
    assert weight == (0.5 if mode & SOFT else 0.0)


@pytest.mark.parametrize("side", [1, -1])
def test_a_threshold_keeps_the_value_that_was_written(side):
    """2 + 1e-12 is no float32, yet it is above a score of 2."""
    threshold = 2.0 + side * 1e-12
    value = torch.tensor([[1.5, 2.0]])
    assert single(value, [1.0, 0.25], threshold, 0)[1] == (side < 0)
    assert single(value, [1.0, 0.25], threshold, BELOW)[1] == (side > 0)


@pytest.mark.parametrize("flip", [0, BELOW])
@pytest.mark.parametrize("sharpness", [1e30, 3.4e38])
@pytest.mark.parametrize("threshold", [0.0, 1e300, -1e300, 1.9999999])
def test_soft_weights_saturate(threshold, sharpness, flip):
    _, fired, weight = single(torch.tensor([[1.5, 2.0]]), [1.0, 0.25], threshold, SOFT | flip, sharpness)
    assert fired == ((threshold < 2) != bool(flip))
    assert weight == float(fired)


def test_the_smallest_sharpness_meets_the_largest_margin():
    assert 0 <= single(torch.tensor([[1.5, 2.0]]), [1.0, 0.25], -1e300, SOFT, 1e-50)[2] <= 1


@pytest.mark.parametrize("mode", [SOFT | COSINE, LASTING | COSINE | BELOW])
def test_the_cosine_of_a_row_of_zeros_is_zero(mode):
    score, fired, _ = single(torch.zeros(1, 2), [1.0, 2.0], 0.0, mode)
    assert (score, fired) == (0.0, False)
    assert single(torch.zeros(1, 2), [1.0, 2.0], -0.5 if not mode & BELOW else 0.5, mode)[1]


@pytest.mark.parametrize("size", [1e-44, 1e-30, 1e30, 3e38])
def test_the_cosine_does_not_depend_on_lengths(size):
    value = torch.tensor([[3.0, 4.0]]) * (size / 5)
    expected = exact(value)[0]
    expected = float(expected @ [0.0, 1.0] / np.linalg.norm(expected / size) / size)
    assert single(value, [0.0, 1e-20], 0.0, COSINE)[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_two_parts_of_a_stream_are_summed_in_float32(dtype):
    value, residual = torch.tensor([[256.0, 6e4]]).to(dtype), torch.tensor([[0.125, 6e4]]).to(dtype)
    wanted = exact(value)[0] + exact(residual)[0]
    assert single(value, [1.0, 0.0], 256.0, 0, residual=residual)[:2] == (256.125, True)
    assert single(value, [0.0, 1.0], 0.0, 0, residual=residual)[0] == wanted[1]
