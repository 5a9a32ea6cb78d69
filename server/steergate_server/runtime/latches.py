"""The conversation latch: which gates fired in earlier turns of a conversation, and so act in every later one.

It lives in the scheduler, the one place that sees a turn's firings, its end, and the start of the next turn. Two bounds
keep it small: the conversation that was used longest ago is forgotten first.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

from steergate_server.registry.spool import Spool
from steergate_server.runtime.plan import PlannedGate
from steergate_server.schema.errors import SteeringError

MAX_CONVERSATIONS = 1_024
MAX_BYTES = 256 * 2**20
MAX_GATES = 64
"""Gates that one conversation may latch: they act together in every later turn."""


class Latched(NamedTuple):
    """A gate that fired. `locked`: it belongs to a locked server default, so clients cannot turn it off."""

    gate: PlannedGate
    locked: bool


class Latches:
    """Latched gates by conversation key, each once, by what it does.

    The vectors that they add are kept in the spool, whatever becomes of the names they came from, as long as they are
    latched or a running request is bridged by them.
    """

    def __init__(self, spool: Spool, *, max_conversations: int = MAX_CONVERSATIONS, max_bytes: int = MAX_BYTES) -> None:
        self._spool = spool
        self._max_conversations = max_conversations
        self._max_bytes = max_bytes
        self._conversations: OrderedDict[str, dict[bytes, Latched]] = OrderedDict()
        self._holders: Counter[str] = Counter()
        self._sizes: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self._conversations)

    def of(self, key: str) -> dict[bytes, Latched]:
        """What a conversation has latched, by gate identity, in the order of the identities."""
        found = self._conversations.get(key)
        if found is None:
            return {}
        self._conversations.move_to_end(key)
        return dict(sorted(found.items()))

    def check_room(self, key: str, gates: Iterable[PlannedGate]) -> None:
        """Raise SteeringError (`over_capacity`) if a conversation could not latch these gates, too."""
        known = self._conversations.get(key, {})
        total = len({*known, *(gate.identity for gate in gates)})
        if total > MAX_GATES:
            raise SteeringError(
                "over_capacity",
                f"The conversation would latch {total} gates; it may latch {MAX_GATES}. Forget it with DELETE "
                "/v1/steering/conversations/{id}, or declare fewer gates.",
                "conversation_id",
            )

    def latch(self, key: str, gate: PlannedGate, *, locked: bool) -> None:
        """A gate fired, so that it acts in later turns. Latching it again changes nothing.

        Raises OSError where its vector cannot be kept.
        """
        found = self._conversations.setdefault(key, {})
        self._conversations.move_to_end(key)
        identity = gate.identity
        if identity in found:
            found[identity] = Latched(found[identity].gate, found[identity].locked or locked)
            return
        try:
            self.hold([gate])
        except OSError:
            if not found:
                del self._conversations[key]
            raise
        found[identity] = Latched(gate, locked)
        self._evict()

    def forget(self, key: str) -> bool:
        """Forget a conversation; whether it was known."""
        found = self._conversations.pop(key, None)
        if found is None:
            return False
        self.release(latched.gate for latched in found.values())
        return True

    def hold(self, gates: Iterable[PlannedGate]) -> None:
        """Keep the vectors that gates add until `release`. Raises OSError; nothing is held then."""
        held = []
        try:
            for digest in _digests(gates):
                if not self._holders[digest]:
                    self._sizes[digest] = self._spool.pin(digest)
                self._holders[digest] += 1
                held.append(digest)
        except OSError:
            self._release(held)
            raise

    def release(self, gates: Iterable[PlannedGate]) -> None:
        """Give one hold of each back."""
        self._release(_digests(gates))

    def _release(self, digests: Iterable[str]) -> None:
        for digest in digests:
            self._holders[digest] -= 1
            if not self._holders[digest]:
                del self._holders[digest], self._sizes[digest]
                self._spool.unpin(digest)

    def _evict(self) -> None:
        while len(self._conversations) > 1 and (
            len(self._conversations) > self._max_conversations or sum(self._sizes.values()) > self._max_bytes
        ):
            self.forget(next(iter(self._conversations)))


def _digests(gates: Iterable[PlannedGate]) -> list[str]:
    return [gate.steer_digest for gate in gates if gate.steer_digest is not None]
