"""The plan: an admitted steering request, decoded, ruled, with every name resolved to a digest.

A plan is content. It holds no names and no payload bytes, only digests, so that it can be hashed, compared and sent
to every engine process as a few hundred bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec.structs import replace

from steergate_server.runtime.selection import Selection, select
from steergate_server.schema.requests import Where

SiteName = tuple[str, int]
"""(hook, layer)."""


class PlannedVector(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, dict=True):
    """One static vector: `digest` of its payload, the sites it acts at, the rows its clause selects, and the rank of a
    low-rank payload."""

    algorithm: str
    digest: str | None
    sites: tuple[SiteName, ...]
    where: Where
    scale: float = 1.0
    normalize: bool = False
    params: dict[str, Any] = {}
    rank: int = 0
    label: str | None = None

    @cached_property
    def content(self) -> tuple[Any, ...]:
        """What the vector does to a row, wherever it is selected: hashable, and equal for equal numbers."""
        params = msgspec.json.encode(self.params, order="sorted")
        return (self.algorithm, self.digest, self.scale, self.normalize, params)


class VectorGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Static vectors that resolve their overlaps among themselves; a later group sees the result of an earlier one."""

    vectors: tuple[PlannedVector, ...] = ()
    conflict: str = "sequential"


class PlannedGate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One gate, resolved. `probe_digest` is None for `always`; `steer_digest` is None unless it adds a vector."""

    when: Literal["always", "probe"]
    at: str
    scope: str
    apply: Literal["add", "attenuate", "observe"]
    probe_digest: str | None = None
    probe_site: SiteName | None = None
    threshold: float = 0.0
    sharpness: float = 1.0
    fires: str = "above"
    score: str = "dot"
    steer_digest: str | None = None
    steer_sites: tuple[SiteName, ...] = ()
    strength: float = 1.0
    keep: float = 1.0
    label: str | None = None

    @property
    def identity(self) -> bytes:
        """Stands for what the gate does: equal for equal gates, whatever their labels."""
        return hashlib.sha256(b"steergate/gate/1\0" + msgspec.msgpack.encode(replace(self, label=None))).digest()


class Stack(NamedTuple):
    """Groups of static vectors that make one change of a row; bit k of a mask stands for the k-th vector."""

    groups: tuple[VectorGroup, ...]

    @property
    def vectors(self) -> tuple[PlannedVector, ...]:
        """The vectors in order of application."""
        return tuple(vector for group in self.groups for vector in group.vectors)

    @property
    def clauses(self) -> list[Where]:
        """Which rows each of them selects."""
        return [vector.where for vector in self.vectors]

    def at_sites(self, mask: int) -> dict[SiteName, tuple[PlannedVector, ...]]:
        """What acts at each site on a row that selects the vectors of a bit mask, in order, conflicts resolved."""
        selected = [vector for number, vector in enumerate(self.vectors) if mask >> number & 1]
        if len(selected) == 1:
            return dict.fromkeys(selected[0].sites, (selected[0],))
        found: dict[SiteName, list[PlannedVector]] = {}
        number = 0
        for group in self.groups:
            owned: set[SiteName] = set()
            for vector in group.vectors:
                if mask >> number & 1:
                    for site in vector.sites:
                        if group.conflict != "priority" or site not in owned:
                            found.setdefault(site, []).append(vector)
                        owned.add(site)
                number += 1
        return {site: tuple(vectors) for site, vectors in found.items()}


class Conversation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The conversation that a request is a turn of; no part of the plan's content.

    `key` stands for the principal and the conversation id. `opted_out`: the client wants no steering at all in this
    turn. `settlement`: set where the API server may find the end of the answer before the last token that was
    computed (a stop string); it then tells which rows count, under this name.
    """

    key: str
    opted_out: bool = False
    settlement: str = ""


class Plan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one engine request runs under.

    `groups`: the server default's static vectors, then the request's. `locked`: those of a locked default, which apply
    last of all and which nothing attenuates. `operator_gates`: how many of the gates, from the first on, are the server
    default's; `operator_locked`: that default is locked. `bridge`: what earlier turns of the conversation latched.
    `report` and `conversation` ask for book-keeping and are no part of the plan's identity.
    """

    groups: tuple[VectorGroup, ...] = ()
    locked: tuple[VectorGroup, ...] = ()
    gates: tuple[PlannedGate, ...] = ()
    bridge: tuple[PlannedGate, ...] = ()
    operator_gates: int = 0
    operator_locked: bool = False
    report: str = "none"
    conversation: Conversation | None = None

    @property
    def stacks(self) -> tuple[Stack, Stack]:
        """The static vectors: those that gates act upon, and the locked ones."""
        return Stack(self.groups), Stack(self.locked)

    @property
    def vectors(self) -> tuple[PlannedVector, ...]:
        """The static vectors that gates act upon, in order of application."""
        return Stack(self.groups).vectors

    def select(self, prompt: Sequence[int], max_length: int) -> tuple[Selection, Selection]:
        """What the vectors of each stack select of a prompt and at most `max_length` rows in all."""
        ids = np.asarray(prompt, dtype=np.int64)
        own, locked = (select(stack.clauses, ids, max_length) for stack in self.stacks)
        return own, locked

    @property
    def acts(self) -> bool:
        """Whether there is anything for an engine process to do."""
        return bool(self.groups or self.locked or self.gates or self.bridge)

    @property
    def digests(self) -> frozenset[str]:
        """Every payload that an engine process must have to run this plan."""
        found = [vector.digest for stack in self.stacks for vector in stack.vectors]
        for gate in self.gates:
            found += [gate.probe_digest, gate.steer_digest]
        found += [gate.steer_digest for gate in self.bridge]
        return frozenset(digest for digest in found if digest is not None)


def fingerprint(plan: Plan) -> str:
    """sha256 (hex) of the plan's content as sorted compact JSON: no labels, no report, no conversation."""
    content = Plan(
        groups=_unlabelled_groups(plan.groups),
        locked=_unlabelled_groups(plan.locked),
        gates=tuple(replace(gate, label=None) for gate in plan.gates),
        bridge=tuple(replace(gate, label=None) for gate in plan.bridge),
    )
    encoded = msgspec.json.encode(content, order="sorted")
    return hashlib.sha256(b"steergate/plan/1\0" + encoded).hexdigest()


def _unlabelled_groups(groups: tuple[VectorGroup, ...]) -> tuple[VectorGroup, ...]:
    return tuple(
        replace(group, vectors=tuple(replace(vector, label=None) for vector in group.vectors)) for group in groups
    )


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Plan)


def encode_plan(plan: Plan) -> bytes:
    """The plan as bytes for the engine request that carries it."""
    return _encoder.encode(plan)


def decode_plan(data: bytes) -> Plan:
    """The reverse of `encode_plan`. Raises `msgspec.ValidationError`."""
    return _decoder.decode(data)
