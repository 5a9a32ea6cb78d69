"""What the scheduler counts for a request, against what an engine process then installs for it."""

import numpy as np
import pytest
import torch

from steergate_server.graph.pools import CapacityError
from steergate_server.registry.spool import Spool
from steergate_server.runtime.capacity import Capacity, Demand, Ledger, demand_of
from steergate_server.runtime.plan import Plan, PlannedGate
from steergate_server.schema.errors import SteeringError
from unit.algorithms.cases import AFFINE
from unit.runtime.world import STREAM, Request, assert_nothing_is_left, controller, library

torch.set_num_threads(1)

CLAUSES = [
    {"prompt": "all", "generation": "all"},
    {"answer": "all"},
    {"prompt_positions": [0, -1]},
    {"generation_positions": [0, 2]},
]
LENGTH = 9


@pytest.fixture(scope="module")
def spool(tmp_path_factory):
    return Spool(tmp_path_factory.mktemp("spool"))


@pytest.fixture(scope="module")
def vectors(spool):
    return library(spool, np.random.default_rng(11))


@pytest.fixture
def plans(vectors):
    """`plans(rng)`: a random plan with static vectors, gates and a bridge, in order to be installed in graph."""
    stackable = [
        vector
        for vector in vectors
        if vector.algorithm in AFFINE and not vector.normalize and set(vector.changes) == set(STREAM)
    ]
    directions = [vector for vector in stackable if vector.algorithm == "direct"]

    def gate(rng, scope):
        vector = directions[rng.integers(len(directions))]
        sites = tuple(site for site in STREAM if rng.random() < 0.6) or STREAM[:1]
        probed = {"when": "probe", "probe_digest": vector.digest, "probe_site": STREAM[0]}
        when = probed if scope != "rest_of_conversation" and rng.random() < 0.6 else {"when": "always"}
        return PlannedGate(
            at="generated", scope=scope, apply="add", steer_digest=vector.digest, steer_sites=sites,
            strength=float(rng.choice([1.0, 2.0])), **when,
        )  # fmt: skip

    def make(rng):
        used = [(stackable[rng.integers(len(stackable))], STREAM, CLAUSES[rng.integers(4)]) for _ in range(2)]
        static = Request("r", [1] * LENGTH, 3, [("sequential", used[: rng.integers(0, 3)])]).plan
        gates = tuple(gate(rng, "rest_of_request") for _ in range(rng.integers(0, 4)))
        bridge = tuple(gate(rng, "rest_of_conversation") for _ in range(rng.integers(0, 3)))
        groups = static.groups if static.vectors else ()
        return Plan(groups=groups, gates=gates, bridge=bridge)

    return make


def demand(plan, mode):
    masks = [selection.distinct() for selection in plan.select([1, 1, 1], LENGTH)]
    return demand_of(plan, masks, in_graph=mode == "in_graph")


def rows_used(control):
    pools = {id(tables.pool): tables.pool for tables, _ in control.book._local}
    return sum(pool.used for pool in pools.values())


@pytest.mark.parametrize("seed", range(15))
@pytest.mark.parametrize("mode", ["in_graph", "split"])
def test_what_is_counted_is_enough(spool, plans, mode, seed):
    """Of several requests at once: gates and bridges take slots and rows like static vectors, equal ones share them."""
    rng = np.random.default_rng((seed, 3))
    control, ledger = controller(spool, mode), Ledger()
    names = [f"request-{number}" for number in range(6)]
    for name in names:
        plan = plans(rng)
        control.add(name, plan, [1, 1, 1], LENGTH)
        ledger.reserve(name, demand(plan, mode))
        slots, rows = len(ledger._slots), sum(ledger._row_counts.values())
        assert control.book.slots.used <= slots
        assert rows_used(control) <= rows
        assert slots < control.book.slots.used + 4, "and not much too much"
    assert control.book.slots.used > 3
    for name in names:
        control.finish(name)
        ledger.release(name)
    assert ledger.empty
    assert_nothing_is_left(control)


@pytest.mark.parametrize(("mode", "slots"), [("in_graph", 1), ("split", 2)])
def test_a_gate_that_adds_what_is_added_anyway(spool, vectors, mode, slots):
    """The same vector, as static steering and by a gate: one slot where both live in tables, two where one does not."""
    vector = next(vector for vector in vectors if vector.algorithm == "direct" and not vector.normalize)
    gate = PlannedGate(
        when="always", at="generated", scope="this_token", apply="add", steer_digest=vector.digest,
        steer_sites=STREAM, strength=vector.scale,
    )  # fmt: skip
    static = Request("r", [1] * LENGTH, 3, [("sequential", [(vector, STREAM, CLAUSES[0])])]).plan
    plan = Plan(groups=static.groups, gates=(gate,))
    control = controller(spool, mode)
    control.add("a", plan, [1, 1, 1], LENGTH)
    assert len(demand(plan, mode).slots) == control.book.slots.used == slots
    control.finish("a")


@pytest.mark.parametrize("mode", ["in_graph", "split"])
def test_whoever_has_no_room_waits_and_is_not_installed_in_part(spool, plans, mode):
    """Slots for all static vectors, and not for the gates: the scheduler knows, and the engine installs nothing."""
    rng = np.random.default_rng(5)
    plan = next(plan for plan in iter(lambda: plans(rng), None) if plan.groups and len(plan.gates) > 1 and plan.bridge)
    needed = demand(plan, mode)
    static = demand(Plan(groups=plan.groups), mode)
    assert static.slots < needed.slots
    rooms = {"hidden_states": 10**6, "attn_heads": 10**6}
    ledger = Ledger()
    assert ledger.fits(needed, Capacity(len(needed.slots), rooms))
    assert not ledger.fits(needed, Capacity(len(needed.slots) - 1, rooms))
    control = controller(spool, mode, max_slots=len(static.slots) + 2)  # the empty one, and one gate's
    with pytest.raises(SteeringError) as refused:
        control.add("a", plan, [1, 1, 1], LENGTH)
    assert refused.value.code == "over_capacity"
    assert isinstance(refused.value.__cause__, CapacityError)
    assert_nothing_is_left(control)


def test_a_reservation_lasts_until_its_request_ends():
    """Whether or not a step runs it; equal content counts once."""
    capacity = Capacity(3, {"hidden_states": 10})
    ledger = Ledger()
    one, two = (Demand(frozenset(slots), {("hidden_states", slot): 3 for slot in slots}) for slots in ("ab", "bc"))
    ledger.reserve("r", one)
    assert ledger.fits(two, capacity)
    ledger.reserve("s", two)
    assert not ledger.fits(Demand(frozenset("d"), {}), capacity)
    assert not ledger.fits(Demand(frozenset(), {("hidden_states", "x"): 2}), capacity)
    assert ledger.fits(one, capacity)
    assert not ledger.needs_new(one)
    ledger.release("r")
    ledger.release("r")
    assert ledger.fits(Demand(frozenset("d"), {("hidden_states", "d"): 4}), capacity)
    assert not ledger.fits(Demand(frozenset("de"), {}), capacity)
    ledger.release("s")
    assert ledger.empty


@pytest.mark.parametrize("seed", range(20))
def test_what_fits_is_what_a_count_of_everything_says(seed):
    """Whatever was reserved and released in whatever order."""
    rng = np.random.default_rng((seed, 7))
    ledger, held = Ledger(), {}
    for step in range(60):
        chosen = rng.integers(0, 12, rng.integers(1, 4)).tolist()
        components = ["hidden_states", "attn_heads"]
        wanted = Demand(frozenset(chosen), {(components[one % 2], one): 1 + one for one in chosen})
        if held and rng.random() < 0.4:
            name = str(rng.choice(list(held)))
            ledger.release(name)
            del held[name]
        else:
            held[str(step)] = wanted
            ledger.reserve(str(step), wanted)
        rows = {row: count for one in (*held.values(), wanted) for row, count in one.rows.items()}
        needed = {name: sum(count for row, count in rows.items() if row[0] == name) for name in components}
        slots = len(set().union(*(one.slots for one in held.values()), wanted.slots))
        room = {name: int(rng.integers(max(0, count - 2), count + 3)) for name, count in needed.items()}
        capacity = Capacity(int(rng.integers(max(0, slots - 1), slots + 2)), room)
        enough = slots <= capacity.slots and all(needed[name] <= room[name] for name in components)
        assert ledger.fits(wanted, capacity) == enough
