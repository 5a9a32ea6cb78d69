"""Composition in closed form against running the vectors one after the other, and who may say that there is none."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import steergate_server.algorithms  # noqa: F401 - registers the built-in algorithms
from steergate_server.algorithms.registry import get_algorithm
from steergate_server.graph.affine import Lowered, NotLowerableError, compose
from steergate_server.runtime.lowering import lowering_problem
from steergate_server.runtime.plan import PlannedVector
from steergate_server.schema.requests import Where
from unit.algorithms import oracle
from unit.algorithms.cases import AFFINE, HIDDEN, NORMALIZING, exact, make

torch.set_num_threads(1)

SEEDS = st.integers(0, 2**32 - 1)
SCALES = st.sampled_from([1.0, -1.0, 0.5, 2.0, 0.0])
WIDTHS = st.integers(1, 48)


def lowered(case, normalize=False):
    algorithm = get_algorithm(case.name)
    if algorithm.graph_family is None:
        return Lowered("", {}, normalize)
    return Lowered(algorithm.graph_family, algorithm.graph_lower(case.payload, case.scale), normalize)


def meaning(change, rows):
    """A SiteChange on float64 rows, from what its parts are said to be."""
    affine = change.affine
    found = affine.keep * rows + (rows @ exact(affine.reads).T) @ exact(affine.writes) + exact(affine.bias)
    if change.clamp is not None:
        u = exact(change.clamp.direction)
        assert abs(np.sqrt(u @ u) - 1) < 1e-6
        found = oracle.clamp(found, change.clamp.strength, u, change.clamp.low, change.clamp.high)
    return oracle.renormalized(rows, found) if change.normalize else found


@settings(max_examples=120, deadline=None)
@given(
    SEEDS, WIDTHS, st.lists(st.tuples(st.sampled_from(AFFINE), SCALES), max_size=4), st.sampled_from([None, "clamp"])
)
def test_a_composition_is_the_vectors_one_after_the_other(seed, width, vectors, last):
    rng = np.random.default_rng(seed)
    if last is not None:
        vectors = [*vectors[:3], (last, 0.75)]
    cases = [make(name, rng, width, scale, rank=int(rng.integers(1, 4))) for name, scale in vectors]
    change = compose([lowered(case) for case in cases], width)
    rows = rng.normal(size=(5, width))
    wanted, reach = rows, oracle.norms(rows)
    for case in cases:
        gain = case.reach(wanted) / np.maximum(oracle.norms(wanted), 1e-300)
        reach = np.maximum(case.reach(wanted), reach * np.minimum(gain, 1e6))
        wanted = case.change(wanted)
    assert change.affine.reads.shape == change.affine.writes.shape == (change.affine.rank, width)
    assert change.affine.rank <= sum(_rank(case) for case in cases)
    assert not change.normalize
    tolerance = 1e-5 * (1 + reach + _parts(change.affine, rows))
    assert (np.abs(meaning(change, rows) - wanted) <= tolerance[:, None]).all()


def _rank(case):
    return {"erase": 1, "concept_replace": 1}.get(case.name, case.rank)


def _parts(affine, rows):
    """How large the summands of a composition get; they are rounded to float32, and may cancel."""
    reads, writes = exact(affine.reads), exact(affine.writes)
    return np.abs(rows @ reads.T) @ oracle.norms(writes) + oracle.norms(exact(affine.bias)[None])


@settings(max_examples=60, deadline=None)
@given(SEEDS, WIDTHS, st.sampled_from(NORMALIZING), SCALES)
def test_a_single_vector_may_keep_the_norm(seed, width, name, scale):
    rng = np.random.default_rng(seed)
    case = make(name, rng, width, scale)
    rows = rng.normal(size=(5, width))
    found = meaning(compose([lowered(case, normalize=True)], width), rows)
    changed = case.change(rows)
    known = oracle.norms(changed) > 1e-4 * case.reach(rows)
    wanted = oracle.renormalized(rows, changed)
    allowed = 1e-5 * case.reach(rows) / np.maximum(oracle.norms(changed), 1e-300) * oracle.norms(rows) + 1e-6
    assert (np.abs(found - wanted)[known] <= allowed[known][:, None]).all()


def test_nothing_composes_to_nothing():
    change = compose([], 4)
    rows = np.arange(12.0).reshape(3, 4)
    assert (meaning(change, rows) == rows).all()
    assert change.affine.rank == 0


VECTORS = st.tuples(st.sampled_from(HIDDEN), SCALES, st.booleans())


def sequence(rng, width, vectors):
    """Cases, whether each keeps the norm, and the vectors of a plan that stand for them."""
    cases = [make(name, rng, width, scale, rank=int(rng.integers(1, 5))) for name, scale, _ in vectors]
    keeps = [wanted and name in NORMALIZING for name, _, wanted in vectors]
    planned = [
        PlannedVector(
            algorithm=case.name,
            digest=f"{number:064x}",
            sites=(("post_block", 0),),
            where=Where(prompt="all"),
            scale=case.scale,
            normalize=normalize,
            params=dict(case.params),
            rank=case.rank,
        )
        for number, (case, normalize) in enumerate(zip(cases, keeps, strict=True))
    ]
    return cases, keeps, planned


def has_closed_form(vectors):
    """From the documents: only the last may be a clamp; `normalize` stands alone; `linear` has none."""
    names = [name for name, _, _ in vectors]
    if "linear" in names or "clamp" in names[:-1]:
        return False
    return len(vectors) == 1 or not any(wanted and name in NORMALIZING for name, _, wanted in vectors)


@settings(max_examples=150, deadline=None)
@given(SEEDS, st.lists(VECTORS, min_size=1, max_size=4), st.integers(0, 6))
def test_what_is_said_of_a_plan_is_what_composition_does(seed, vectors, limit):
    rng = np.random.default_rng(seed)
    vectors = [(name, scale or 1.0, wanted) for name, scale, wanted in vectors]  # scale 0 is dropped at admission
    names = [name for name, _, _ in vectors]
    if "replace" in names and any(
        name in ("erase", "concept_replace", "lm_steer", "loreft") for name in names[names.index("replace") :]
    ):
        return  # the test below
    cases, keeps, planned = sequence(rng, 12, vectors)
    problem = lowering_problem(planned, limit)
    parts = [lowered(case, keep) for case, keep in zip(cases, keeps, strict=True)]
    if not has_closed_form(vectors):
        assert problem
        with pytest.raises(NotLowerableError, match=r"\w"):
            compose(parts, 12)
        return
    change = compose(parts, 12)
    assert (problem is not None) == (change.affine.rank > limit)
    assert problem is None or str(limit) in problem


@pytest.mark.parametrize("name", ["erase", "concept_replace", "lm_steer", "loreft"])
def test_a_map_of_a_constant_row_takes_no_rank(name):
    """After `replace` every row is the same, so that whatever follows is a constant again."""
    cases, keeps, planned = sequence(np.random.default_rng(3), 12, [("replace", 1.0, False), (name, 1.0, False)])
    change = compose([lowered(case, keep) for case, keep in zip(cases, keeps, strict=True)], 12)
    assert change.affine.rank == 0
    assert lowering_problem(planned, 0) is None


@pytest.mark.parametrize("first", ["clamp", "linear"])
@pytest.mark.parametrize("second", HIDDEN)
def test_what_cannot_come_first(first, second):
    rng = np.random.default_rng(2)
    cases = [make(name, rng, 6, 1.0) for name in (first, second)]
    with pytest.raises(NotLowerableError):
        compose([lowered(case) for case in cases], 6)


@pytest.mark.parametrize("place", [0, 1])
@pytest.mark.parametrize("name", NORMALIZING)
def test_normalize_stands_alone(name, place):
    rng = np.random.default_rng(2)
    parts = [lowered(make("direct", rng, 6, 1.0)), lowered(make("direct", rng, 6, 1.0))]
    parts[place] = lowered(make(name, rng, 6, 1.0), normalize=True)
    with pytest.raises(NotLowerableError, match="normalize"):
        compose(parts, 6)


@pytest.mark.parametrize(("count", "lowers"), [(1, True), (2, False)])
def test_routers_do_not_compose(count, lowers):
    vector = PlannedVector(
        algorithm="moe_router",
        digest=None,
        sites=(("router_logits", 0),),
        where=Where(prompt="all"),
        params={"mode": "soft", "expert_ids": [1]},
    )
    assert (lowering_problem([vector] * count, 8) is None) == lowers
