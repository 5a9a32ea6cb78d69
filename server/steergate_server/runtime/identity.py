"""Cache identity: what keys KV blocks, so that they are shared only between runs with identical activations."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence

from steergate_server.runtime.plan import Plan, fingerprint
from steergate_server.runtime.selection import Selection, ignores_phase

_TAG = b"steergate/kv/1\0"


def first_changed_row(plan: Plan, selections: Sequence[Selection], prompt_length: int) -> int | None:
    """The first row whose KV the plan can change, or None; selections: what each of its stacks selects."""
    end = prompt_length - 1
    rows = [end + 1 if gate.at == "generated" else end for gate in plan.gates if gate.apply != "observe"]
    rows += [end] if plan.bridge else []
    rows += [row for selection in selections if (row := selection.first_row(end + 1)) is not None]
    return min(rows, default=None)


def cache_identity(plan: Plan, prompt_length: int) -> bytes:
    """32 bytes that stand for what the plan does to a request with this prompt length.

    The prompt length enters only where the effect depends on where the prompt ends; otherwise a later turn may reuse
    the blocks of an earlier answer.
    """
    clauses = [clause for stack in plan.stacks for clause in stack.clauses]
    phase_free = not plan.gates and not plan.bridge and all(map(ignores_phase, clauses))
    parts = (fingerprint(plan), "" if phase_free else str(prompt_length))
    # Joined by a byte that no part can hold: parts must not be able to imitate each other.
    return hashlib.sha256(_TAG + "\0".join(parts).encode()).digest()


class Epochs:
    """Replaces identities whose blocks may hold KV that their plan did not make: those of requests that failed.

    It remembers the last `limit` of them. To forget one could bring its blocks back, so before that every identity is
    replaced at once.
    """

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._general = 0
        self._epoch: dict[bytes, int] = {}
        self._origin: dict[bytes, bytes] = {}

    def current(self, identity: bytes) -> bytes:
        """What stands for an identity now."""
        epoch = self._epoch.get(identity, 0)
        if not epoch and not self._general:
            return identity
        replaced = hashlib.sha256(_TAG + identity + f"{self._general}\0{epoch}".encode()).digest()
        self._origin[replaced] = identity
        return replaced

    def advance(self, identities: Iterable[bytes]) -> None:
        """Replace identities, given as `current` gave them."""
        for given in identities:
            identity = self._origin.get(given, given)
            self._epoch[identity] = self._epoch.get(identity, 0) + 1
        if len(self._epoch) > self._limit:
            self._general += 1
            self._epoch.clear()
            self._origin.clear()


def tagged_hash(block_hash: bytes, identity: bytes) -> bytes:
    """The hash of the first changed block: its plain hash and the identity. Later blocks inherit it by the chain."""
    return hashlib.sha256(_TAG + block_hash + identity).digest()


def tagged_extension(
    plain: Callable[[], list[bytes]], hashes: list[bytes], first_block: int, identity: bytes
) -> list[bytes]:
    """New block hashes to append to `hashes`, with block `first_block` tagged by the identity.

    `plain()` computes the untagged hashes of every full block that `hashes` lacks, chained on its last element. The
    blocks behind the tagged one must chain on it, so they are computed again with it in place. `hashes` is left as
    it was.
    """
    start = len(hashes)
    fresh = plain()
    at = first_block - start
    if not 0 <= at < len(fresh):
        return fresh
    head = [*fresh[:at], tagged_hash(fresh[at], identity)]
    hashes.extend(head)
    try:
        return head + plain()
    finally:
        del hashes[start:]
