"""moe_router in all of its modes, against the mathematics."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steergate_server.algorithms.moe_router import MODES
from steergate_server.algorithms.registry import create_algorithm
from unit.algorithms import oracle
from unit.algorithms.cases import DTYPES, SOFT_MODES, assert_close, exact, routed, router

torch.set_num_threads(1)

SEEDS = st.integers(0, 2**32 - 1)
EXPERTS = st.one_of(st.integers(2, 256), st.sampled_from([2, 8, 60, 128]))


def run(settings_, logits, positions=None):
    """The logits that the algorithm makes of `logits` [n, E]."""
    algorithm = create_algorithm("moe_router")
    algorithm.set_payload(settings_, 1.0)
    at = torch.arange(len(logits)) if positions is None else torch.as_tensor(positions)
    return algorithm._transform(logits, {**algorithm.payload, "positions": at})


def logits_of(rng, count, experts, dtype):
    """Logits with some ties among them, and now and then a row of equal ones."""
    rows = np.round(rng.normal(size=(count, experts)) * rng.choice([0.1, 3, 50]), 1)
    rows[rng.random(count) < 0.1] = 1.5
    return torch.from_numpy(rows).to(dtype)


def moved(logits, found):
    """Where logits differ in any bit."""
    kind = torch.int32 if logits.dtype == torch.float32 else torch.int16
    return logits.view(kind) != found.view(kind)


def test_every_mode_is_covered():
    assert {*MODES} == {"activate", "deactivate", *SOFT_MODES}


@pytest.mark.parametrize("mode", ["activate", "deactivate", "soft", "soft_topk"])
@settings(max_examples=60, deadline=None)
@given(SEEDS, st.integers(1, 64), EXPERTS, st.sampled_from(DTYPES))
def test_modes(mode, seed, count, experts, dtype):
    rng = np.random.default_rng(seed)
    plan = router(rng, experts, mode)
    logits = logits_of(rng, count, experts, dtype)
    before = logits.clone()
    found = run(plan, logits)
    assert torch.equal(logits, before)
    assert found.dtype == dtype
    slack = 1e-6 * (8 + np.sqrt(experts)) * (1 + abs(plan["lambda"])) * np.abs(exact(logits)).max(axis=1) + 1e-6
    assert_close(found, routed(plan, exact(logits)), slack)
    if mode in SOFT_MODES:
        others = [expert for expert in range(experts) if expert not in plan["expert_ids"]]
        assert not moved(logits, found)[:, others].any()


def test_deactivation_is_last(rng):
    plan = router(rng, 5, "activate", expert_ids=[2], activate_ids=[1], deactivate_ids=[2, 4], epsilon=1.0)
    logits = torch.tensor([[0.0, 1.0, 2.0, -3.0, 5.0]])
    normal = oracle.log_softmax(exact(logits))[0]
    found = run(plan, logits)[0]
    wanted = [normal[0], normal.max() + 1, normal.min() - 1, normal[3], normal.min() - 1]
    assert found.tolist() == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("experts", [2, 8, 60])
@pytest.mark.parametrize("mode", ["activate", "deactivate"])
def test_toggled_experts_are_chosen_or_not(rng, experts, mode):
    plan = router(rng, experts, mode, expert_ids=[0], activate_ids=[], deactivate_ids=[], epsilon=0.01)
    logits = torch.from_numpy(rng.normal(size=(20, experts))).float()
    found = run(plan, logits)
    best = found.argmax(dim=1) if mode == "activate" else found.argmin(dim=1)
    assert not best.any()


def test_top_k_counts_the_lower_index_first_among_equals(rng):
    plan = router(rng, 6, "soft_topk", expert_ids=[0, 1, 2, 3, 4, 5], topk=2)
    found = run(plan, torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0, 1.0]]))
    assert moved(torch.tensor([[1.0, 2.0, 2.0, 2.0, 0.0, 1.0]]), found)[0].tolist() == [True, False, False] + [True] * 3


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("expert", [4, 5, 1000])
def test_experts_that_the_layer_lacks_are_refused(rng, mode, expert):
    plan = router(rng, 4, mode, expert_ids=[1, expert])
    with pytest.raises((ValueError, IndexError)):
        run(plan, torch.zeros(1, 4))


# The random mode


def drawn(plan, positions, logits=None):
    """The experts that are raised at each position."""
    if logits is None:
        logits = torch.arange(plan["experts"], dtype=torch.float32).repeat(len(positions), 1)
    return moved(logits, run(plan, logits, positions))


@settings(max_examples=80, deadline=None)
@given(SEEDS, st.integers(1, 64), EXPERTS, st.sampled_from(DTYPES))
def test_random_experts_are_raised_by_the_same_amount_as_chosen_ones(seed, count, experts, dtype):
    rng = np.random.default_rng(seed)
    plan = router(rng, experts, "soft_random", **{"lambda": float(rng.choice([-2.0, 0.5, 4.0]))})
    logits = torch.from_numpy(rng.normal(size=(count, experts)) * 4).to(dtype)
    positions = torch.from_numpy(rng.integers(0, 2**31, size=count))
    found = run(plan, logits, positions)
    every = oracle.soft(exact(logits), range(experts), plan["lambda"])
    chosen = np.abs(exact(found) - every) < np.abs(exact(found) - exact(logits))
    # Where the boost is lost in rounding there is nothing to tell apart.
    assert (chosen.sum(axis=1) == len(plan["expert_ids"])).all() or dtype == torch.bfloat16
    wanted = np.where(moved(logits, found).numpy(), every, exact(logits))
    assert_close(found, wanted, 1e-4 * (1 + np.abs(exact(logits)).max(axis=1)))
    assert torch.equal(found, run(plan, logits, positions))


def test_the_draw_depends_on_seed_layer_and_position_alone(rng):
    plan = router(rng, 64, "soft_random", expert_ids=[0, 1, 2, 3], seed=5, layer=3, **{"lambda": 1.0})
    positions = torch.arange(200)
    base = drawn(plan, positions)
    assert (base.sum(dim=1) == 4).all()
    # Neither the ids themselves, nor lambda, nor the logits, nor the other rows of the step matter.
    assert torch.equal(base, drawn({**plan, "expert_ids": [60, 9, 13, 2]}, positions))
    assert torch.equal(base, drawn({**plan, "lambda": -3.0}, positions))
    assert torch.equal(base, drawn(plan, positions, torch.from_numpy(rng.normal(size=(200, 64))).float()))
    order = torch.from_numpy(rng.permutation(200))
    assert torch.equal(base[order], drawn(plan, order))
    assert torch.equal(base[40:43], drawn(plan, positions[40:43]))
    for other in ({"seed": 6}, {"layer": 4}):
        assert (drawn({**plan, **other}, positions) != base).any(dim=1).float().mean() > 0.9
    assert len({tuple(row.nonzero().flatten().tolist()) for row in base}) > 190


@pytest.mark.parametrize(("experts", "count"), [(8, 2), (60, 4), (128, 8)])
def test_the_draw_is_roughly_uniform(rng, experts, count):
    """Chi-square over many positions, for single experts and for neighbouring positions."""
    trials = 4000
    plan = router(rng, experts, "soft_random", expert_ids=list(range(count)), **{"lambda": 1.0})
    found = drawn(plan, torch.arange(trials)).double()
    expected = trials * count / experts
    square = float(((found.sum(dim=0) - expected) ** 2 / (expected * (1 - count / experts))).sum())
    assert square < experts + 5 * np.sqrt(2 * experts)
    again = float((found[1:] * found[:-1]).sum()) / (trials - 1)
    chance = count * count / experts
    assert abs(again - chance) < 6 * np.sqrt(chance / trials) + 0.01
