"""Turns of conversations, as the scheduler sees them: what bridges a turn, what it latches, and when that counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec.structs import replace

from steergate_server.runtime.controller import Evidence
from steergate_server.runtime.latches import Latches
from steergate_server.runtime.plan import Conversation, Plan, PlannedGate
from steergate_server.schema.errors import SteeringError

_MESSAGE, _FORGET, _SETTLE = "steergate:", "forget:", "settle:"

CONVERSATION_SCOPE = "rest_of_conversation"


def forget_message(key: str) -> str:
    """The message that makes the scheduler forget a conversation."""
    return f"{_MESSAGE}{_FORGET}{key}"


def settle_message(settlement: str, last_row: int) -> str:
    """The message that tells the scheduler the last row whose output the client was given."""
    return f"{_MESSAGE}{_SETTLE}{settlement}:{last_row}"


class Latching:
    """What one turn may latch. `lanes`: its gates of this scope, by their place among those that run.

    Where a settlement is awaited, firings are kept, with their rows, until it tells which of them count.
    """

    __slots__ = ("conversation", "firings", "forgotten", "lanes", "locked", "open_always")

    def __init__(self, conversation: Conversation, lanes: dict[int, PlannedGate], locked: frozenset[int]) -> None:
        self.conversation = conversation
        self.lanes = lanes
        self.locked = locked
        self.open_always = [lane for lane, gate in lanes.items() if gate.when == "always"]
        self.firings: dict[int, int] = {}
        """By lane, the first row at which it fired, while a settlement is awaited."""
        self.forgotten = False


class Turn(NamedTuple):
    """What a request comes to: the plan that runs, which of the declared gates it runs, and what may latch."""

    plan: Plan
    ran: Sequence[int]
    latching: Latching | None


class Conversations:
    """The turns that are running, over the latches."""

    def __init__(self, latches: Latches) -> None:
        self.latches = latches
        self._bridged: dict[str, tuple[PlannedGate, ...]] = {}
        self._latching: dict[str, Latching] = {}
        self._unsettled: dict[str, Latching] = {}

    def open_turn(self, request_id: str, declared: Plan) -> Turn:
        """A request starts. Raises SteeringError (`default_locked`, `over_capacity`), OSError."""
        everything = range(len(declared.gates))
        conversation = declared.conversation
        if conversation is None:
            return Turn(declared, everything, None)
        latched = self.latches.of(conversation.key)
        if conversation.opted_out:
            if any(entry.locked for entry in latched.values()):
                raise SteeringError(
                    "default_locked",
                    "A gate of the operator's locked default fired in this conversation, so steering cannot be turned "
                    "off. Leave `steering` out.",
                    "steering",
                )
            return Turn(declared, everything, None)
        ran = [index for index in everything if declared.gates[index].identity not in latched]
        latching = self._latching_of(declared, conversation, ran)
        if latching is not None:
            self.latches.check_room(conversation.key, latching.lanes.values())
        bridge = tuple(entry.gate for entry in latched.values())
        if bridge:
            self.latches.hold(bridge)
            self._bridged[request_id] = bridge
        if latching is not None:
            self._latching[request_id] = latching
            if conversation.settlement:
                self._unsettled[conversation.settlement] = latching
        if not bridge:
            return Turn(declared, everything, latching)
        plan = replace(declared, gates=tuple(declared.gates[index] for index in ran), bridge=bridge)
        return Turn(plan, ran, latching)

    @staticmethod
    def _latching_of(declared: Plan, conversation: Conversation, ran: Sequence[int]) -> Latching | None:
        gates = [declared.gates[index] for index in ran]
        lanes = {lane: gate for lane, gate in enumerate(gates) if gate.scope == CONVERSATION_SCOPE}
        if not lanes:
            return None
        operator = declared.operator_gates if declared.operator_locked else 0
        return Latching(conversation, lanes, frozenset(lane for lane, index in enumerate(ran) if index < operator))

    def see(self, latching: Latching, rows: Sequence[Evidence]) -> None:
        """Outputs of a turn were accepted; rows: what its gates saw at the rows that produced them. Raises OSError."""
        if latching.forgotten:
            return
        # What always acts needs no evidence: it has latched with the first answer token.
        always, latching.open_always = latching.open_always, []
        for lane in always:
            self._latch(latching, lane)
        for row in rows:
            for lane, gate in latching.lanes.items():
                if gate.when == "always" or not (row.looked[lane] and row.fired[lane]):
                    continue
                if latching.conversation.settlement:
                    latching.firings.setdefault(lane, row.position)
                else:
                    self._latch(latching, lane)

    def _latch(self, latching: Latching, lane: int) -> None:
        self.latches.latch(latching.conversation.key, latching.lanes[lane], locked=lane in latching.locked)

    def close_turn(self, request_id: str) -> None:
        """A request ended, however."""
        self._latching.pop(request_id, None)
        bridge = self._bridged.pop(request_id, None)
        if bridge is not None:
            self.latches.release(bridge)

    def take_message(self, name: str) -> bool:
        """Whether an id is a message of the API server; if so, it is done."""
        if not name.startswith(_MESSAGE):
            return False
        content = name.removeprefix(_MESSAGE)
        if content.startswith(_FORGET):
            self._forget(content.removeprefix(_FORGET))
        elif content.startswith(_SETTLE):
            settlement, _, row = content.removeprefix(_SETTLE).partition(":")
            self._settle(settlement, int(row))
        return True

    def _forget(self, key: str) -> None:
        self.latches.forget(key)
        # What runs now belongs to what is forgotten.
        for latching in [*self._latching.values(), *self._unsettled.values()]:
            if latching.conversation.key == key:
                latching.forgotten = True

    def _settle(self, settlement: str, last_row: int) -> None:
        latching = self._unsettled.pop(settlement, None)
        if latching is None or latching.forgotten:
            return
        for lane, row in latching.firings.items():
            if row <= last_row:
                self._latch(latching, lane)
        latching.firings.clear()
