"""Faults that gates are known to have had elsewhere, each by hand on a controller: several gates of one request, gates
beside static steering, gates that wait for a step, and what is left of gates.

The rows of a step are all zeros but for two coordinates, which two probes read. Every vector writes to a coordinate of
its own, so that a row tells what each of them was given.
"""

import math

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from steergate_server.registry.numbers import StoredPayload
from steergate_server.registry.spool import Spool, SpoolError
from steergate_server.runtime.plan import Plan, PlannedGate, PlannedVector, VectorGroup
from steergate_server.schema.errors import SteeringError
from steergate_server.schema.requests import Where
from unit.runtime.world import SITES, STREAM, WIDTH, assert_nothing_is_left, controller, geometry

torch.set_num_threads(1)

FIRST, LATER = ("post_block", 0), ("post_block", 1)
READS_A, READS_B, STATIC, ADDS_A, ADDS_B, LOCKED = range(6)
"""Coordinates."""

PROMPT = [7, 7, 7]
"""Its end is row 2, the first generated row is row 3."""

LOW, HIGH = -50.0, 50.0
"""Scores that leave nothing of a soft weight, and all of it."""


@pytest.fixture(scope="module")
def spool(tmp_path_factory):
    return Spool(tmp_path_factory.mktemp("spool"))


@pytest.fixture(scope="module")
def axes(spool):
    """By coordinate, the digest of its unit vector at two sites."""
    rows = np.eye(WIDTH, dtype=np.float32)
    numbers = ({f"{hook}/{layer:08d}": row for hook, layer in (FIRST, LATER)} for row in rows[:6])
    return [spool.put(StoredPayload("direction", one, {}), durable=False)[0] for one in numbers]


@pytest.fixture(params=["in_graph", "split"])
def control(request, spool):
    """A controller on which nothing may be left."""
    made = controller(spool, request.param)
    yield made
    for name in "abc":
        made.finish(name)
    assert_nothing_is_left(made)


@pytest.fixture
def gates(axes):
    """`gates(reads, adds, scope)`: a probe gate that adds; `always` without a probe."""

    def make(reads, adds, scope="this_token", **more):
        probe = {"when": "always"} if reads is None else {"when": "probe", "probe_digest": axes[reads]}
        site = None if reads is None else FIRST
        made = PlannedGate(
            at="generated", scope=scope, apply="add", probe_site=site, steer_digest=axes[adds], steer_sites=(FIRST,),
            **probe,
        )  # fmt: skip
        return replace(made, **more)

    return make


@pytest.fixture
def static(axes):
    """`static(coordinate)`: a vector on all rows, in a group of its own."""

    def make(coordinate=STATIC, sites=(FIRST,)):
        where = Where(prompt="all", generation="all")
        vector = PlannedVector(algorithm="direct", digest=axes[coordinate], sites=sites, where=where)
        return (VectorGroup(vectors=(vector,)),)

    return make


def attenuation(gate, keep):
    return replace(gate, apply="attenuate", keep=keep, steer_digest=None, steer_sites=())


def step(control, rows, site=FIRST, residual=False):
    """One row of each request: {request: (position, score of A, score of B)}. What was added at a site, by request.

    All sites run, in order; the scores are read at FIRST alone. residual: the stream comes in two parts.
    """
    control.begin_step(geometry([(name, row[0], 1) for name, row in rows.items()]))
    added = {}
    for number, (hook, layer) in ((n, (s.hook, s.layer)) for n, s in enumerate(SITES) if (s.hook, s.layer) in STREAM):
        hidden = torch.zeros(len(rows), WIDTH)
        if (hook, layer) == FIRST:
            hidden[:, [READS_A, READS_B]] = torch.tensor([[row[1], row[2]] for row in rows.values()])
        other = hidden * 0.75 if residual else None
        hidden = hidden * 0.25 if residual else hidden
        before = hidden.clone()
        control.steer(hidden, other, number)
        if (hook, layer) == site:
            added = dict(zip(rows, (hidden - before).tolist(), strict=True))
    control.end_step()
    assert control.take_fallen() == {}
    return added


def walk(control, name, scores, start=3, watch=(ADDS_A, ADDS_B)):
    """Rows of one request, one a step: what was added at the watched coordinates at each."""
    found = [step(control, {name: (start + at, *pair)})[name] for at, pair in enumerate(scores)]
    return [tuple(row[at] for at in watch) for row in found]


def assert_close(found, wanted):
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)


def soft(score, sharpness=1.0):
    return 1.0 / (1.0 + math.exp(-sharpness * score))


# Several gates, and what is beside them -----------------------------------------------------------------------------


@pytest.mark.parametrize("score", [LOW, -0.7, 0.4, HIGH])
def test_a_weight_is_its_gates_own(control, gates, static, score):
    """A low score takes nothing from static steering at the same site, nor from a locked default, nor another gate."""
    adding = gates(READS_A, ADDS_A), gates(None, ADDS_B)
    control.add("a", Plan(groups=static(), locked=static(LOCKED), gates=adding), PROMPT, 20)
    row = step(control, {"a": (3, score, 0.0)})["a"]
    assert row[STATIC] == row[LOCKED] == row[ADDS_B] == 1.0
    assert row[ADDS_A] == pytest.approx(soft(score), abs=1e-6)


@pytest.mark.parametrize("sites", [(LATER,), (FIRST, LATER)])
def test_a_vector_at_another_site_than_its_probe_is_gated_there(control, gates, sites):
    control.add("a", Plan(gates=(gates(READS_A, ADDS_A, steer_sites=sites),)), PROMPT, 20)
    for position, score in enumerate((LOW, HIGH, -0.7), start=3):
        for site in (FIRST, LATER):
            added = step(control, {"a": (position, score, 0.0)}, site)["a"][ADDS_A]
            assert added == pytest.approx(soft(score) * (site in sites), abs=1e-6)


def test_every_gate_has_its_own_probe(control, gates):
    control.add("a", Plan(gates=(gates(READS_A, ADDS_A), gates(READS_B, ADDS_B))), PROMPT, 20)
    found = walk(control, "a", [(LOW, HIGH), (HIGH, LOW), (HIGH, HIGH), (LOW, LOW)])
    assert_close(found, [(0, 1), (1, 0), (1, 1), (0, 0)])


@pytest.mark.parametrize("score", ["dot", "cosine"])
def test_two_thresholds_on_one_probe(control, gates, score):
    """Equal probes at one site: one row of the pool, and still two gates."""
    low, high = (gates(READS_A, adds, threshold=at, score=score, sharpness=1e4) for adds, at in ((3, 0.2), (4, 0.9)))
    control.add("a", Plan(gates=(low, high)), PROMPT, 20)
    assert control.probes.used == 1
    found = walk(control, "a", [(0.5, 0.5), (1.0, 0.0), (0.0, 1.0)])
    assert_close(found, [(1, 0), (1, 1), (0, 0)])


@pytest.mark.parametrize("order", [1, -1])
def test_a_gate_that_fired_ends_no_other_gates_probing(control, gates, order):
    """Nor does it matter which of them is declared first."""
    lasting = gates(READS_A, ADDS_A, "rest_of_request"), gates(READS_B, ADDS_B, "rest_of_request")
    control.add("a", Plan(gates=lasting[::order]), PROMPT, 20)
    found = walk(control, "a", [(LOW, LOW), (HIGH, LOW), (LOW, LOW), (LOW, HIGH), (LOW, LOW)])
    assert found == [(0, 0), (1, 0), (1, 0), (1, 1), (1, 1)]


def test_a_lasting_gate_acts_in_full_whatever_its_probe_reads_later(control, gates):
    control.add("a", Plan(gates=(gates(READS_A, ADDS_A, "rest_of_request"),)), PROMPT, 20)
    assert walk(control, "a", [(0.01, 0.0), (0.01, 0.0), (LOW, 0.0)], watch=(ADDS_A,)) == [(1,), (1,), (1,)]


@pytest.mark.parametrize("beside", ["always", "lasting", "soft"])
def test_one_step_stays_one_step_beside_other_gates(control, gates, beside):
    """And it fires again whenever its probe does."""
    other = {
        "always": gates(None, ADDS_B),
        "lasting": gates(READS_B, ADDS_B, "rest_of_request"),
        "soft": gates(READS_B, ADDS_B),
    }[beside]
    control.add("a", Plan(gates=(other, gates(READS_A, ADDS_A, "next_step"))), PROMPT, 20)
    found = walk(control, "a", [(HIGH, HIGH), (LOW, HIGH), (LOW, HIGH), (HIGH, HIGH), (HIGH, HIGH), (LOW, HIGH)])
    assert_close(found, [(0, 1), (1, 1), (0, 1), (0, 1), (1, 1), (1, 1)])


def test_the_end_of_one_step_ends_no_attenuation(control, gates, static):
    """Nor does an attenuation damp what gates add."""
    half = attenuation(gates(None, ADDS_B), 0.25)
    plan = Plan(groups=static(), locked=static(LOCKED), gates=(gates(READS_A, ADDS_A, "next_step"), half))
    control.add("a", plan, PROMPT, 20)
    found = walk(control, "a", [(HIGH, 0.0), (LOW, 0.0), (LOW, 0.0)], watch=(STATIC, ADDS_A, LOCKED))
    assert found == [(0.25, 0, 1), (0.25, 1, 1), (0.25, 0, 1)]


@pytest.mark.parametrize(
    ("scope", "kept"),
    [("next_step", [1, 0.25, 1, 1]), ("rest_of_request", [0.25, 0.25, 0.25, 0.25]), ("this_token", [0.25, 1, 1, 1])],
)
def test_attenuations_keep_to_their_scope(control, gates, static, scope, kept):
    gate = attenuation(gates(READS_A, ADDS_A, scope), 0.25)
    control.add("a", Plan(groups=static(), gates=(gate,)), PROMPT, 20)
    found = walk(control, "a", [(HIGH, 0.0), (LOW, 0.0), (LOW, 0.0), (LOW, 0.0)], watch=(STATIC,))
    assert [row[0] for row in found] == pytest.approx(kept, abs=1e-6)


def test_attenuations_of_one_request_multiply(control, gates, static):
    two = attenuation(gates(None, ADDS_A), 0.5), attenuation(gates(READS_A, ADDS_A), 0.25)
    control.add("a", Plan(groups=static(), gates=two), PROMPT, 20)
    found = walk(control, "a", [(HIGH, 0.0), (LOW, 0.0)], watch=(STATIC,))
    assert [row[0] for row in found] == pytest.approx([0.125, 0.5], abs=1e-6)


# When gates act -----------------------------------------------------------------------------------------------------


def test_nothing_waits_for_a_second_answer_token(control, gates):
    """`always` needs no evidence, and a soft weight is that of its own row: the first row looked at is steered."""
    adding = gates(None, ADDS_A, at="answer"), gates(READS_B, ADDS_B, at="answer")
    control.add("a", Plan(gates=adding), PROMPT, 20)
    found = walk(control, "a", [(0.0, HIGH)] * 4, start=1)
    assert_close(found, [(0, 0), (1, 1), (1, 1), (1, 1)])


def test_one_step_waits_for_its_request(control, gates):
    """It fired, and then its request was left out of some steps: its next row is the one that is meant."""
    pulsing = gates(READS_A, ADDS_A, "next_step")
    control.add("a", Plan(gates=(pulsing,)), PROMPT, 20)
    control.add("b", Plan(gates=(pulsing,)), PROMPT, 20)
    assert walk(control, "a", [(HIGH, 0.0)], watch=(ADDS_A,)) == [(0,)]
    assert walk(control, "b", [(LOW, 0.0), (HIGH, 0.0), (LOW, 0.0)], watch=(ADDS_A,)) == [(0,), (0,), (1,)]
    both = step(control, {"b": (6, LOW, 0.0), "a": (4, LOW, 0.0)})
    assert (both["a"][ADDS_A], both["b"][ADDS_A]) == (1, 0)
    assert walk(control, "a", [(LOW, 0.0)], start=5, watch=(ADDS_A,)) == [(0,)]


def test_gates_alone_are_something_to_do(control, gates):
    """A request without static steering is in no step idle, the first after others included."""
    assert step(control, {"b": (0, 0.0, 0.0)})["b"] == [0.0] * WIDTH
    control.add("a", Plan(gates=(gates(None, ADDS_A),)), PROMPT, 20)
    found = step(control, {"b": (1, 0.0, 0.0), "a": (3, 0.0, 0.0)})
    assert (found["a"][ADDS_A], found["b"][ADDS_A]) == (1, 0)


@pytest.mark.parametrize("scope", ["this_token", "rest_of_request"])
def test_every_scope_probes_the_same_value(control, gates, scope):
    """Where the stream comes in two parts, it is their sum."""
    gate = gates(READS_A, ADDS_A, scope, threshold=0.9, sharpness=1e4)
    control.add("a", Plan(gates=(gate,)), PROMPT, 20)
    assert step(control, {"a": (3, 1.0, 0.0)}, residual=True)["a"][ADDS_A] == pytest.approx(1, abs=1e-6)
    assert control.lanes.score[0, 0] == 1.0


def test_no_state_moves_between_steps(control, gates):
    """A warm-up forward runs the ops over whatever rows it has."""
    control.add("a", Plan(gates=(gates(READS_A, ADDS_A, "rest_of_request"),)), PROMPT, 20)
    assert walk(control, "a", [(LOW, 0.0)], watch=(ADDS_A,)) == [(0,)]
    hidden = torch.full((4, WIDTH), HIGH)
    for number, site in enumerate(SITES):
        if (site.hook, site.layer) in STREAM:
            control.steer(hidden, None, number)
    assert (hidden == HIGH).all()
    assert walk(control, "a", [(LOW, 0.0)], start=4, watch=(ADDS_A,)) == [(0,)]


# What is left -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["next_step", "rest_of_request"])
def test_a_gates_state_ends_with_its_request(control, gates, scope):
    """The next request of the same content takes its place, and nothing of what it had come to."""
    plan = Plan(gates=(gates(READS_A, ADDS_A, scope),))
    control.add("a", plan, PROMPT, 20)
    number = control._live.get("a").number
    walk(control, "a", [(HIGH, 0.0)])
    control.finish("a")
    control.add("b", plan, PROMPT, 20)
    assert control._live.get("b").number == number
    assert walk(control, "b", [(LOW, 0.0), (LOW, 0.0)], watch=(ADDS_A,)) == [(0,), (0,)]


def test_an_attenuation_ends_with_its_request(control, gates, static):
    """Whoever takes its place has another gate in its lane, and is not damped, though a neighbour is."""
    half = Plan(groups=static(), gates=(attenuation(gates(None, ADDS_A), 0.25),))
    control.add("a", half, PROMPT, 20)
    assert walk(control, "a", [(0.0, 0.0)], watch=(STATIC,)) == [(0.25,)]
    control.finish("a")
    control.add("b", Plan(groups=static(), gates=(gates(None, ADDS_A),)), PROMPT, 20)
    control.add("c", half, PROMPT, 20)
    found = step(control, {"b": (3, 0.0, 0.0), "c": (3, 0.0, 0.0)})
    assert (found["b"][STATIC], found["b"][ADDS_A], found["c"][STATIC]) == (1, 1, 0.25)


def test_a_probe_is_its_numbers_and_not_its_place(control, gates):
    """Its row in the pool is free again when its request ends, and holds other numbers then."""
    for name, reads in zip("abc", (READS_A, READS_B, READS_A), strict=True):
        control.add(name, Plan(gates=(gates(reads, ADDS_A, "rest_of_request"),)), PROMPT, 20)
        assert control.probes.used == 1
        assert int(control.gates.probe[control._live.get(name).number, 0]) == 1
        step(control, {name: (3, 5.0, -6.0)})
        assert control.lanes.score[0, 0] == (-6.0 if reads == READS_B else 5.0)
        control.finish(name)


BROKEN = {
    "no-probe": ({"probe_digest": "0" * 64}, SpoolError),
    "no-vector": ({"steer_digest": "1" * 64}, SpoolError),
    "probe-at-no-site": ({"probe_site": ("mlp_in", 1)}, KeyError),
    "vector-at-no-site": ({"steer_sites": (("mlp_in", 1),)}, KeyError),
    "too-strong": ({"strength": 1e39}, SteeringError),
}


@pytest.mark.parametrize(("broken", "kind"), BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("place", [0, 1])
def test_a_gate_that_cannot_be_installed_is_none_at_all(control, gates, static, broken, kind, place):
    """Its request holds nothing, not even its other gates; in particular it does not act unconditionally."""
    one, other = gates(READS_A, ADDS_A, "rest_of_request"), gates(None, ADDS_B)
    pair = [other, other]
    pair[place] = replace(one, **broken)
    control.add("b", Plan(groups=static(), gates=(one,)), PROMPT, 20)
    held = control.book.slots.used, control.book.pool_used, control.probes.used, control.payloads_held
    with pytest.raises(kind):
        control.add("a", Plan(groups=static(), gates=tuple(pair)), PROMPT, 20)
    assert (control.book.slots.used, control.book.pool_used, control.probes.used, control.payloads_held) == held
    found = step(control, {"a": (3, HIGH, HIGH), "b": (3, HIGH, HIGH)})
    assert found["a"] == [0.0] * WIDTH
    assert (found["b"][STATIC], found["b"][ADDS_A], found["b"][ADDS_B]) == (1, 1, 0)
