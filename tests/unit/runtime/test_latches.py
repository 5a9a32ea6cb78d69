"""The conversation latch by itself: its bounds, what it keeps alive, and what a turn is bridged by."""

import numpy as np
import pytest
from msgspec.structs import replace

from steergate_server.registry.numbers import StoredPayload
from steergate_server.registry.spool import Spool, SpoolError
from steergate_server.runtime.conversations import Conversations, forget_message
from steergate_server.runtime.latches import MAX_GATES, Latches
from steergate_server.runtime.plan import Conversation, Plan, PlannedGate
from steergate_server.schema.errors import SteeringError

ATTENUATES = PlannedGate(when="always", at="generated", scope="rest_of_conversation", apply="attenuate", keep=0.5)


@pytest.fixture
def spool(tmp_path):
    return Spool(tmp_path)


@pytest.fixture
def add(spool):
    """`add(number, width)`: a gate that adds a vector of its own, whose name is gone: only a latch keeps it."""

    def make(number, width=8, **more):
        numbers = {"post_block/00000001": np.full(width, number + 1, dtype=np.float32)}
        digest, _ = spool.put(StoredPayload("direction", numbers, {}), durable=False)
        gate = PlannedGate(
            when="always", at="generated", scope="rest_of_conversation", apply="add", steer_digest=digest,
            steer_sites=(("post_block", 1),),
        )  # fmt: skip
        return replace(gate, **more)

    return make


def is_kept(spool, gate):
    """Whether its vector can still be read although no name points to it."""
    spool.discard(gate.steer_digest)
    try:
        return spool.load(gate.steer_digest).digest == gate.steer_digest
    except SpoolError:
        return False


def known(latches, *keys):
    """Which conversations are remembered, asked without using them."""
    return [key for key in keys if key in latches._conversations]


# Bounds -------------------------------------------------------------------------------------------------------------


def test_what_was_used_longest_ago_is_forgotten_first(spool, add):
    latches = Latches(spool, max_conversations=3)
    gates = {key: add(number) for number, key in enumerate("abcdef")}
    for key in "abc":
        latches.latch(key, gates[key], locked=False)
    assert latches.of("a")  # a turn of it: it is now the youngest
    latches.latch("b", gates["b"], locked=False)  # so is what latches again
    latches.latch("d", gates["d"], locked=False)
    assert known(latches, *"abcd") == ["a", "b", "d"]
    latches.latch("e", gates["e"], locked=False)
    assert known(latches, *"abde") == ["b", "d", "e"]
    assert [key for key in "abcde" if is_kept(spool, gates[key])] == ["b", "d", "e"]
    assert latches.of("a") == latches.of("never") == {}
    assert len(latches) == 3, "asking for a conversation makes none"


def test_large_vectors_are_bounded_by_their_bytes(spool, add):
    size = spool.pin(add(0, 1000).steer_digest)
    spool.unpin(add(0, 1000).steer_digest)
    latches = Latches(spool, max_bytes=3 * size + 10)
    gates = {key: add(number, 1000) for number, key in enumerate("abcd")}
    for key in "abc":
        latches.latch(key, gates[key], locked=False)
    assert known(latches, *"abc") == ["a", "b", "c"]
    latches.latch("d", gates["d"], locked=False)
    assert known(latches, *"abcd") == ["b", "c", "d"]
    assert [key for key in "abcd" if is_kept(spool, gates[key])] == ["b", "c", "d"]


def test_one_vector_counts_once_however_often_it_is_latched(spool, add):
    one = add(0, 1000)
    size = spool.pin(one.steer_digest)
    spool.unpin(one.steer_digest)
    latches = Latches(spool, max_bytes=size + 10)
    for _ in range(3):
        for key in "abc":
            latches.latch(key, one, locked=False)
            latches.latch(key, replace(one, strength=2.0), locked=False)
    assert len(latches) == 3
    for key in "abc":
        assert is_kept(spool, one)
        latches.forget(key)
    assert not is_kept(spool, one)


def test_a_latch_larger_than_the_bound_stays_alone(spool, add):
    """It is what the client asked for just now; the others go."""
    latches = Latches(spool, max_bytes=10)
    for number, key in enumerate("ab"):
        latches.latch(key, add(number, 1000), locked=False)
    assert known(latches, *"ab") == ["b"]
    assert len(latches.of("b")) == 1


def test_the_gates_of_one_conversation_are_bounded(spool):
    latches = Latches(spool)
    gates = [replace(ATTENUATES, keep=number / 100) for number in range(MAX_GATES + 1)]
    for gate in gates[:-1]:
        latches.check_room("a", [gate])
        latches.latch("a", gate, locked=False)
    latches.check_room("a", gates[:5])
    latches.check_room("b", gates[-1:])
    with pytest.raises(SteeringError) as refused:
        latches.check_room("a", gates[-1:])
    assert (refused.value.code, refused.value.param) == ("over_capacity", "conversation_id")


# What is latched ----------------------------------------------------------------------------------------------------


def test_a_gate_is_latched_once_by_what_it_does(spool, add):
    latches, gate = Latches(spool), add(1)
    latches.latch("a", gate, locked=False)
    latches.latch("a", replace(gate, label="again"), locked=False)
    latches.latch("a", replace(gate, strength=2.0), locked=False)
    assert [latched.gate.strength for latched in latches.of("a").values()].count(1.0) == 1
    assert len(latches.of("a")) == 2


def test_what_an_operator_locked_stays_locked(spool, add):
    latches = Latches(spool)
    for locked in (False, True, False):
        latches.latch("a", add(1), locked=locked)
    assert [latched.locked for latched in latches.of("a").values()] == [True]


def test_a_vector_that_cannot_be_kept_leaves_nothing(spool, add):
    """Neither half a latch nor an empty conversation."""
    latches, gate = Latches(spool), add(1)
    spool.discard(gate.steer_digest)
    with pytest.raises(OSError, match=gate.steer_digest):
        latches.latch("a", gate, locked=False)
    assert (len(latches), latches.of("a")) == (0, {})
    latches.latch("a", ATTENUATES, locked=False)
    with pytest.raises(OSError, match=gate.steer_digest):
        latches.latch("a", gate, locked=False)
    assert [latched.gate for latched in latches.of("a").values()] == [ATTENUATES]


# Turns --------------------------------------------------------------------------------------------------------------


def turn_of(*gates, **more):
    return Plan(gates=gates, conversation=Conversation(key="a"), **more)


@pytest.fixture
def conversations(spool, add):
    """One in which a gate that adds and one that attenuates are latched."""
    latches = Latches(spool, max_conversations=1)
    for gate in (add(1), ATTENUATES):
        latches.latch("a", gate, locked=False)
    return Conversations(latches)


def test_a_turn_without_gates_is_bridged_by_everything_that_latched(conversations, add):
    turn = conversations.open_turn("r", turn_of())
    assert sorted(gate.apply for gate in turn.plan.bridge) == ["add", "attenuate"]
    assert (turn.plan.gates, turn.latching) == ((), None)
    assert set(turn.plan.bridge) == {add(1), ATTENUATES}


def test_a_bridged_turn_runs_its_own_gates_too(conversations, add):
    """All but those that the bridge stands for; nothing else of its plan is touched."""
    own, again, lasting = replace(add(2), scope="this_token"), replace(ATTENUATES, label="again"), add(3)
    turn = conversations.open_turn("r", turn_of(own, again, lasting, report="scores"))
    assert (turn.plan.gates, list(turn.ran)) == ((own, lasting), [0, 2])
    assert turn.plan == replace(turn_of(own, lasting, report="scores"), bridge=turn.plan.bridge)
    assert turn.latching.lanes == {1: lasting}


def test_a_bridge_outlives_its_conversation(conversations, spool, add):
    """The vectors of a running turn stay until it ends, though another conversation drives its own out."""
    gate = add(1)
    conversations.open_turn("r", turn_of())
    conversations.latches.latch("b", add(5), locked=False)
    assert known(conversations.latches, *"ab") == ["b"]
    assert is_kept(spool, gate)
    conversations.close_turn("r")
    assert not is_kept(spool, gate)
    conversations.close_turn("r")  # once more does no harm


def test_forgetting_keeps_what_a_running_turn_needs(conversations, spool, add):
    gate = add(1)
    conversations.open_turn("r", turn_of())
    assert conversations.take_message(forget_message("a"))
    assert is_kept(spool, gate)
    assert conversations.open_turn("s", turn_of()).plan.bridge == ()
    conversations.close_turn("r")
    assert not is_kept(spool, gate)
