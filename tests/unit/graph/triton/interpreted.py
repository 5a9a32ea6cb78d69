"""The Triton kernel under Triton's interpreter, on CPU tensors.

`test_triton_op` runs this file in a process of its own: whether Triton interprets is settled as it is imported first.
"""

from __future__ import annotations

import math
import os
from typing import NamedTuple

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from steergate_server.graph import triton_op
from steergate_server.graph.lanes import BELOW, COSINE, LASTING, SOFT
from steergate_server.graph.pools import Pool
from steergate_server.graph.tables import SiteTables
from steergate_server.graph.triton_op import TritonOp
from steergate_server.registry.spool import Spool
from steergate_server.runtime.lowering import lowering_problem
from steergate_server.runtime.plan import Plan, PlannedGate, VectorGroup
from unit.algorithms.cases import DTYPES, exact
from unit.graph import test_score_gates
from unit.graph.triton.scene import (
    ADDING,
    CPU,
    ELSEWHERE,
    LOCAL,
    SITE,
    SLOTS,
    STATIC,
    Outcome,
    by_hand,
    by_torch,
    fill,
    lay,
    scene,
    stream,
)
from unit.runtime.world import SITES, STREAM, WIDTH, assert_nothing_is_left, controller, geometry, library

assert os.environ.get("TRITON_INTERPRET") == "1"
torch.set_num_threads(1)

_convert = interpreter._convert_float


def _convert_as_devices_do(data, source, target, rounding):
    """bfloat16 is rounded to nearest even, and its smallest numbers are kept; the interpreter cuts off."""
    if {source, target} != {tl.float32, tl.bfloat16}:
        return _convert(data, source, target, rounding)
    if target is tl.bfloat16:
        return torch.from_numpy(np.ascontiguousarray(data)).bfloat16().view(torch.uint16).numpy()
    return (data.astype(np.uint32) << 16).view(np.float32)


interpreter._convert_float = _convert_as_devices_do


def run(made, rows, hidden, residual, op=None) -> Outcome:
    """One launch; `hidden` is left as it was."""
    op = op or TritonOp(made.places, made.touches, made.lanes, made.gates, made.probes, made.locked)
    op.open(rows)
    steered = hidden.clone()
    op.steer(steered, residual, SITE)
    lanes = made.lanes
    return Outcome(
        steered, lanes.weight[:, 1:].clone(), lanes.score.clone(), lanes.fired.clone(), set(op.take_faults())
    )


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def assert_agrees(made, rows, hidden, wanted, by_cpu, found) -> None:
    """With the float64 loop and with the op on CPU; what nothing acts on has the same bits as before."""
    value, weight, score, fired, margin, size = wanted
    untouched = np.ones(len(hidden), dtype=bool)
    for row in range(rows):
        slots = made.lanes.slot[row].tolist() + ([int(made.locked[row])] if made.locked is not None else [])
        untouched[row] = not any(bool(made.touches[SITE, slot]) for slot in slots)
    assert same_bits(found.hidden[untouched], hidden[untouched])
    looked = ~np.isnan(score)
    # Within the rounding of a sum of float32 numbers, and of one number in the model's dtype.
    rounding = 4e-6 * math.sqrt(made.width)
    clear = ~looked | (np.abs(margin) > 10 * rounding)
    sums = ~looked | (np.abs(exact(found.score) - score) <= rounding * (1 + np.abs(score)))
    assert sums.all()
    assert (np.isnan(exact(found.score)) == ~looked).all()
    assert (found.fired.numpy() == fired)[clear].all()
    steep = np.zeros(score.shape)
    for at in np.ndindex(score.shape):
        steep[at] = steepness(made, *at)
    assert (np.abs(exact(found.weight) - weight)[clear] <= (1e-6 + rounding * np.minimum(steep, 1e6))[clear]).all()
    sure = clear.all(axis=1)[: len(hidden)] if score.shape[1] else np.ones(len(hidden), dtype=bool)
    allowed = rounding * 4 * size[:, None] + float(torch.finfo(made.dtype).eps) * np.abs(value) + 1e-7
    assert (np.abs(exact(found.hidden) - value)[sure] <= allowed[sure]).all()
    assert (np.abs(exact(found.hidden) - exact(by_cpu.hidden))[sure] <= allowed[sure]).all()
    assert torch.equal(found.fired, by_cpu.fired) or not clear.all()
    assert torch.allclose(found.weight, by_cpu.weight, atol=1e-4) or not clear.all()
    assert found.faults == by_cpu.faults


def steepness(made, row, number) -> float:
    gate = made.known.get((int(made.lanes.request[row]), number))
    return 0.0 if gate is None or not gate.mode & SOFT or gate.sharpness > 1e6 else gate.sharpness


def check(made, rng, rows, split, padded=0) -> None:
    lay(made, rng, rows)
    hidden, residual = stream(rng, made, rows + padded, split)
    wanted = by_hand(made, rows, hidden, residual)
    by_cpu = by_torch(made, rows, hidden, residual)
    assert_agrees(made, rows, hidden, wanted, by_cpu, run(made, rows, hidden, residual))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("width", "rows", "gates", "rank", "locked"),
    [
        (1, 12, 2, 1, False),
        (7, 40, 1, 3, True),
        (5, 70, 0, 1, False),
        (100, 16, 5, 4, True),
        (100, 9, 0, 2, False),
        (100, 9, 0, 0, True),
        (1024, 6, 3, 4, True),
        (33, 20, 4, 1, False),
        (64, 0, 2, 2, True),
        (64, 1, 2, 2, False),
    ],
)
@pytest.mark.parametrize("split", [False, True])
def test_against_a_loop_by_hand_and_the_op_on_cpu(dtype, width, rows, gates, rank, locked, split):
    rng = np.random.default_rng([width, rows, gates, split])
    check(scene(rng, width, dtype, gates, rank, locked), rng, rows, split, padded=3)


def test_families_that_no_algorithm_needs_have_no_tables():
    rng = np.random.default_rng(3)
    made = scene(rng, 20, torch.float32, 2, 4, True, only_biases=True)
    assert made.tables.reads is None
    assert made.tables.forget is None
    assert made.tables.clamp is None
    check(made, rng, 20, True)


def test_rows_and_numbers_that_lie_apart():
    rng = np.random.default_rng(6)
    made = scene(rng, 40, torch.float16, 3, 3, True)
    lay(made, rng, 10)
    hidden, residual = stream(rng, made, 10, True)
    spread = torch.zeros(20, 80, dtype=hidden.dtype)[::2, 1::2]
    spread.copy_(hidden)
    weight = made.lanes.weight.clone()
    whole = run(made, 10, hidden, residual)
    made.lanes.weight.copy_(weight)
    op = TritonOp(made.places, made.touches, made.lanes, made.gates, made.probes, made.locked)
    op.open(10)
    op.steer(spread, residual, SITE)
    assert same_bits(spread, whole.hidden)


class Recorded:
    """Stands for the kernel at a launch, and keeps what it was launched with."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *args, **options: self.launches.append((grid, args, options))


class NoOps(torch.utils._python_dispatch.TorchDispatchMode):
    """Nothing is computed while the mode is on; what it costs to ask a tensor for its value would be."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} was run")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_replay_sees_what_has_changed(monkeypatch, dtype):
    """The arguments of a launch between steps, used again for each step, as a captured graph does."""
    rng, kernel, recorded = np.random.default_rng(8), triton_op.steer_rows, Recorded()
    made = scene(rng, 50, dtype, 2, 2, True)
    op = TritonOp(made.places, made.touches, made.lanes, made.gates, made.probes, made.locked)
    hidden, residual = torch.zeros(16, 50, dtype=dtype), torch.zeros(16, 50, dtype=dtype)
    monkeypatch.setattr(triton_op, "steer_rows", recorded)
    with NoOps():
        op.steer(hidden, residual, SITE)
    [(grid, args, options)] = recorded.launches
    assert grid == (16,)
    for rows in (0, 11, 16, 3, 0):
        fill(made, rng)
        lay(made, rng, rows)
        for buffer, values in zip((hidden, residual), stream(rng, made, 16, True), strict=True):
            buffer.copy_(values)
        op.open(rows)
        before = hidden.clone()
        wanted, by_cpu = by_hand(made, rows, hidden, residual), by_torch(made, rows, hidden, residual)
        kernel[grid](*args, **options)
        lanes = made.lanes
        found = Outcome(hidden, lanes.weight[:, 1:], lanes.score, lanes.fired, set(op.take_faults()))
        assert_agrees(made, rows, before, wanted, by_cpu, found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("split", [False, True])
def test_rows_that_would_leave_the_range_stay_as_they_were(dtype, split):
    rng = np.random.default_rng(9)
    made = scene(rng, 24, dtype, 2, 2, True)
    largest = float(torch.finfo(dtype).max) / (1 if dtype == torch.float16 else 16)
    lay(made, rng, 8)
    lanes = made.lanes
    for tensor in (lanes.slot, lanes.look, lanes.request, made.locked):
        tensor.zero_()
    lanes.weight[:] = 1.0
    plain = next(slot for slot in STATIC if _is_plain(made.changes[slot]))
    for slot in (ADDING[0], plain):
        made.tables.pool.rows[int(made.tables.bias[LOCAL, slot])] = largest * 0.75
    hidden, residual = stream(rng, made, 8, split)
    lanes.slot[:4, 1] = ADDING[0]
    lanes.slot[1, 0] = ELSEWHERE
    made.locked[4:6] = plain
    hidden[1], hidden[5] = largest * 0.5, largest * 0.5
    hidden[2, 5], hidden[3, 7] = float("nan"), float("inf")
    by_cpu, found = by_torch(made, 8, hidden, residual), run(made, 8, hidden, residual)
    # The slots of rows 1 and 5. Row 1 has slots of its own, of which any may be to blame.
    assert found.faults == by_cpu.faults == {ADDING[0], ELSEWHERE, plain}
    for row in (1, 5, 6, 7):
        assert same_bits(found.hidden[row], hidden[row])
    for row in (0, 4):
        assert (found.hidden[row].float() - largest * 0.75).abs().max() < largest * 0.01
    # Whoever made these, it was not steering; the numbers beside them are steered.
    assert (torch.isfinite(found.hidden) == torch.isfinite(hidden)).all()
    assert (found.hidden[2:4] != hidden[2:4]).sum() >= 46


def _is_plain(change) -> bool:
    return change.affine.keep == 1 and not change.affine.rank and change.clamp is None and not change.normalize


# The scores at their edges: the suite of the op on CPU, with the kernel in its place


def score_gates(hidden, residual, site, rows, lanes, gates, probes):
    """The kernel as `kernels.score_gates`: at a site where no slot does anything."""
    tables = SiteTables(1, SLOTS, Pool(2, hidden.shape[1], hidden.dtype, CPU), (), 0, CPU)
    touches = torch.zeros(site + 1, SLOTS, dtype=torch.bool)
    op = TritonOp([(tables, 0)] * (site + 1), touches, lanes, gates, probes)
    op.open(rows)
    op.steer(hidden, residual, site)


@pytest.fixture(autouse=True)
def _kernel_in_the_suite(monkeypatch):
    monkeypatch.setattr(test_score_gates, "score_gates", score_gates)


@pytest.mark.parametrize("mode", [SOFT, SOFT | BELOW, LASTING, LASTING | BELOW, SOFT | COSINE])
def test_a_row_that_is_not_a_number_fires_nothing(mode):
    value = torch.tensor([[float("nan"), 2.0]])
    _, fired, weight = test_score_gates.single(value, [1.0, 0.25], 1.0, mode)
    # The cosine of such a row is that of a row of zeros, below the threshold.
    assert not fired
    assert weight == pytest.approx(1 / (1 + math.e) if mode & COSINE else 0.0)


for _name in dir(test_score_gates):
    if _name.startswith("test_") and _name != "test_against_numpy":  # too many rows to interpret
        globals()[_name] = getattr(test_score_gates, _name)


# The whole way: two controllers of the same requests, one of which has the kernel


GATES = (
    {"when": "always", "at": "generated", "scope": "this_token", "apply": "add", "strength": 0.5},
    {"when": "probe", "at": "answer", "scope": "this_token", "apply": "attenuate", "keep": 0.25, "sharpness": 2.0},
    {"when": "probe", "at": "generated", "scope": "next_step", "apply": "add", "strength": -1.0, "fires": "below"},
    {"when": "probe", "at": "prompt_end", "scope": "rest_of_request", "apply": "attenuate", "keep": 0.0,
     "score": "cosine", "threshold": -0.5},
)  # fmt: skip


def gate_of(rng, directions, **fields):
    sites = [("post_attn", 0), ("post_block", 0), ("post_block", 1)]
    if fields["when"] == "probe":
        fields |= {"probe_digest": str(rng.choice(directions)), "probe_site": sites[int(rng.integers(2))]}
    if fields["apply"] == "add":
        fields |= {"steer_digest": str(rng.choice(directions)), "steer_sites": tuple(sites[1:])}
    return PlannedGate(**fields)


def plans_of(rng, vectors, directions):
    """Plans of three requests: two static vectors, a router's settings and some gates each."""
    everywhere = {"prompt": "all", "generation": "all"}
    routers = [vector for vector in vectors if vector.algorithm == "moe_router"]
    others = [vector for vector in vectors if vector.algorithm not in ("moe_router", "linear")]
    for number in range(3):
        chosen = []
        while not chosen or lowering_problem([vector.planned(STREAM, everywhere) for vector in chosen], 24):
            chosen = [others[int(at)] for at in rng.choice(len(others), size=2, replace=False)]
        chosen.append(routers[number % len(routers)])
        planned = [vector.planned(list(vector.changes), everywhere) for vector in chosen]
        gates = tuple(gate_of(rng, directions, **fields) for fields in GATES[number:])
        yield f"r{number}", Plan(groups=(VectorGroup(vectors=tuple(planned)),), gates=gates, report="gates")


@pytest.mark.parametrize("seed", range(4))
def test_a_controller_steers_alike_with_either_op(tmp_path, seed):
    rng = np.random.default_rng([11, seed])
    dtype = DTYPES[seed % len(DTYPES)]
    spool = Spool(tmp_path)
    vectors = library(spool, rng, 2)
    directions = [vector.digest for vector in vectors if vector.algorithm == "direct"]
    pair = [controller(spool, "in_graph", dtype) for _ in range(2)]
    pair[1]._device_op = pair[1]._build_device_op()
    plans = dict(plans_of(rng, vectors, directions))
    for name, plan in plans.items():
        for control in pair:
            control.add(name, plan, [1, 2, 3], 12)
    order = [*plans, "plain"]
    for step in range(4):
        spans = [(name, 0, 3) if not step else (name, 2 + step, 1) for name in order]
        one, other = (through_the_sites(control, spans, np.random.default_rng([seed, step]), dtype) for control in pair)
        allowed = 8 * float(torch.finfo(dtype).eps)
        for mine, theirs in zip(one.values, other.values, strict=True):
            assert torch.allclose(mine.float(), theirs.float(), rtol=allowed, atol=40 * allowed)
        assert one.evidence.keys() == other.evidence.keys() == set(plans)
        for name, rows in one.evidence.items():
            (seen,), (also,) = rows, other.evidence[name]
            assert (seen.position, seen.looked, seen.fired) == (also.position, also.looked, also.fired)
            assert np.allclose(seen.scores, also.scores, rtol=1e-2, atol=100 * allowed, equal_nan=True)
        assert one.fallen == other.fallen
        rng.shuffle(order)
    for control in pair:
        for name in plans:
            control.finish(name)
        assert_nothing_is_left(control)
        idle = torch.ones(4, WIDTH, dtype=dtype)
        control.steer(idle, None, 1)
        assert (idle == 1).all()


class Step(NamedTuple):
    """What one step through all sites came to."""

    values: list[torch.Tensor]
    evidence: dict
    fallen: dict


def through_the_sites(control, spans, rng, dtype) -> Step:
    """One step; each site sees fresh rows, of which some are padding. Streams are split in two."""
    control.begin_step(geometry(spans))
    control.see_tokens(torch.ones(128, dtype=torch.int64))
    rows, values = sum(count for _, _, count in spans) + 2, []
    for number, site in enumerate(SITES):
        hidden, residual = (torch.from_numpy(rng.normal(size=(rows, site.width))).to(dtype) for _ in range(2))
        before = hidden.clone()
        control.steer(hidden, residual if site.width == WIDTH and number != 4 else None, number)
        assert same_bits(hidden[-2:], before[-2:])
        values.append(hidden)
    return Step(values, control.end_step(), control.take_fallen())


def test_a_fault_of_the_op_is_kept_in_a_step_and_raised_at_a_capture(tmp_path):
    control = controller(Spool(tmp_path), "in_graph")
    control._device_op = control._build_device_op()
    with pytest.raises(ValueError, match="unpack"):
        control.steer(torch.zeros(4), None, 1)
    control.add("a", Plan(gates=(PlannedGate(**GATES[0] | {"apply": "observe"}),)), [1], 9)
    control.begin_step(geometry([("a", 0, 1)]))
    control.steer(torch.zeros(4), None, 1)
    with pytest.raises(ValueError, match="unpack"):
        control.end_step()
    assert control.abandon_step() == ["a"]
