"""What the op makes of the tables: every family against the mathematics and against `_transform`."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steergate_server.algorithms.moe_router import MODES
from steergate_server.algorithms.registry import create_algorithm, get_algorithm
from steergate_server.graph.affine import Lowered, compose
from steergate_server.graph.families import FAMILIES
from steergate_server.graph.kernels import router_change, table_change
from steergate_server.graph.pools import Pool
from steergate_server.graph.tables import RouterTables, SiteTables
from unit.algorithms import oracle
from unit.algorithms.cases import (
    AFFINE,
    DTYPES,
    NORMALIZING,
    SOFT_MODES,
    assert_close,
    exact,
    make,
    routed,
    router,
    rows_of,
)

torch.set_num_threads(1)

CPU = torch.device("cpu")
LOWERABLE = (*AFFINE, "clamp")
SEEDS = st.integers(0, 2**32 - 1)
SCALES = st.sampled_from([0.0, 1.0, -1.0, 0.25, 2.0, -3.5])


def test_every_family_is_covered():
    families = {get_algorithm(name).graph_family for name in LOWERABLE}
    assert families | {"moe_gate"} == set(FAMILIES)
    assert get_algorithm("linear").graph_family is None
    assert "width" in (get_algorithm("linear").graph_payload_problem() or "")


@pytest.mark.parametrize("name", LOWERABLE)
def test_lowered_keys_and_shapes_are_the_familys(name):
    case = make(name, np.random.default_rng(1), 7, 0.5, rank=3)
    family = FAMILIES[get_algorithm(name).graph_family]
    lowered = get_algorithm(name).graph_lower(case.payload, case.scale)
    assert lowered.keys() == family.keys()
    sizes = {"width": 7, "rank": 3}
    for key, value in lowered.items():
        assert value is None or list(value.shape) == [sizes.get(size) or int(size) for size in family[key].shape]


def steps(width):
    return 8 + 2 * np.sqrt(width)


def apply(cases, normalize, rows, dtype):
    """T(x) float32 of each row by a random slot: slot k + 1 is the k-th case, slot 0 is none."""
    width = rows.shape[1]
    tables = SiteTables(2, 2 + len(cases), Pool(200, width, dtype, CPU), list(FAMILIES), 8, CPU)
    for number, case in enumerate(cases):
        algorithm = get_algorithm(case.name)
        parts = [Lowered(algorithm.graph_family, algorithm.graph_lower(case.payload, case.scale), normalize[number])]
        tables.write(number + 1, [(1, number, compose(parts, width))])
    slots = torch.arange(len(rows)) % (1 + len(cases))
    return slots, rows + table_change(rows, slots, 1, tables, max(tables.rank.values(), default=0))


@settings(max_examples=150, deadline=None)
@given(
    SEEDS,
    st.integers(1, 40),
    st.integers(1, 128),
    st.sampled_from(DTYPES),
    st.sampled_from(["plain", "zeros", "large"]),
    st.lists(st.tuples(st.sampled_from(LOWERABLE), SCALES, st.booleans()), min_size=1, max_size=6),
)
def test_tables_mean_what_the_algorithms_do(seed, count, width, dtype, kind, vectors):
    rng = np.random.default_rng(seed)
    cases = [make(name, rng, width, scale, rank=int(rng.integers(1, 4))) for name, scale, _ in vectors]
    normalize = [wanted and name in NORMALIZING for name, _, wanted in vectors]
    rows = rows_of(rng, count, width, torch.float32, kind)
    slots, found = apply(cases, normalize, rows, dtype)
    eps = float(torch.finfo(dtype).eps)
    assert torch.equal(found[slots == 0], rows[slots == 0])
    for number, case in enumerate(cases):
        mine = (slots == number + 1).nonzero().flatten()
        if not len(mine):
            continue
        before = exact(rows[mine])
        wanted, reach = case.change(before), case.reach(before)
        error = (2 * eps + steps(width) * 1.2e-7) * reach
        algorithm = create_algorithm(case.name, normalize=normalize[number])
        algorithm.set_payload(case.payload, case.scale)
        prepared = algorithm._transform(rows[mine], algorithm.payload)
        if normalize[number]:
            sizes = oracle.norms(wanted)
            assert torch.isfinite(found[mine]).all()
            known = sizes > 100 * error
            mine, prepared = mine[torch.from_numpy(known)], prepared[torch.from_numpy(known)]
            error = 2 * oracle.norms(before)[known] * error[known] / sizes[known] + 1e-6 * oracle.norms(before)[known]
            wanted = oracle.renormalized(before, wanted)[known]
        assert_close(found[mine], wanted, error)
        assert_close(found[mine], exact(prepared), 2 * error)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-3, 1.0, 100.0, 3e3])
def test_a_concept_pairs_length_does_not_matter_in_the_tables(size, dtype):
    """c (h2 - h1) is the same for pairs of any length, so the pool's dtype must not make a difference of it."""
    rng = np.random.default_rng(5)
    case = make("concept_replace", rng, 64, 1.0, size)
    rows = rows_of(rng, 8, 64, torch.float32, "plain")
    try:
        slots, found = apply([case], [False], rows, dtype)
    except OverflowError:
        pytest.fail("a pair of that length has a closed form within the dtype's range")
    mine = slots == 1
    before = exact(rows[mine])
    assert_close(found[mine], case.change(before), 4 * float(torch.finfo(dtype).eps) * case.reach(before))


@settings(max_examples=100, deadline=None)
@given(
    SEEDS,
    st.integers(1, 40),
    st.integers(2, 64),
    st.sampled_from(DTYPES),
    st.lists(st.sampled_from(MODES), min_size=1, max_size=4),
)
def test_router_tables_mean_what_the_algorithm_does(seed, count, experts, dtype, modes):
    rng = np.random.default_rng(seed)
    plans = [router(rng, experts, mode) for mode in modes]
    tables = RouterTables(2, 1 + len(plans), Pool(20, experts, torch.float32, CPU), CPU)
    for number, plan in enumerate(plans):
        tables.write(1, number + 1, number, get_algorithm("moe_router").graph_lower(plan, 1.0))
    logits = torch.from_numpy(np.round(rng.normal(size=(count, experts)) * 5, 1)).to(dtype)
    positions = torch.from_numpy(rng.integers(0, 10**6, size=count))
    slots = torch.from_numpy(rng.integers(1, 1 + len(plans), size=count))
    before = logits.float()
    change = router_change(before, slots, 1, tables, positions)
    found = (before + change).to(dtype)
    for number, plan in enumerate(plans):
        mine = (slots == number + 1).nonzero().flatten()
        if not len(mine):
            continue
        algorithm = create_algorithm("moe_router")
        algorithm.set_payload(plan, 1.0)
        prepared = algorithm._transform(logits[mine], {**algorithm.payload, "positions": positions[mine]})
        slack = 1e-5 * (1 + abs(plan["lambda"])) * (1 + np.abs(exact(logits[mine])).max(axis=1))
        assert_close(found[mine], exact(prepared), slack)
        if plan["mode"] in SOFT_MODES:
            still = prepared == logits[mine]
            if plan["mode"] != "soft_random":
                still[:, plan["expert_ids"]] = False
            # Equal as the dtype rounds: up to half a unit of the largest logit may be behind it.
            rounding = torch.finfo(dtype).eps * float(before[mine].abs().max())
            assert not change[mine][still & (prepared == logits[mine])].abs().gt(slack.max() + rounding).any()
        if plan["mode"] in ("soft", "soft_topk"):
            others = [expert for expert in range(experts) if expert not in plan["expert_ids"]]
            assert torch.equal(found[mine][:, others], logits[mine][:, others])
        if plan["mode"] != "soft_random":
            assert_close(found[mine], routed(plan, exact(logits[mine])), slack)
