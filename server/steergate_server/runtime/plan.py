"""The plan: an admitted steering request, decoded, ruled, with every name resolved to a digest.

A plan is content. It holds no names and no payload bytes, only digests, so that it can be hashed, compared and sent
to every engine process as a few hundred bytes.
"""

from __future__ import annotations

import hashlib
from typing import Any, Literal

import msgspec

from steergate_server.schema.requests import Where

SiteName = tuple[str, int]
"""(hook, layer)."""


class PlannedVector(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
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

    @property
    def content(self) -> tuple[Any, ...]:
        """What the vector does to a row, wherever it is selected: hashable, and equal for equal numbers."""
        params = msgspec.json.encode(self.params, order="sorted")
        return (self.algorithm, self.digest, self.scale, self.normalize, params)


class VectorGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Static vectors that resolve their overlaps among themselves; a later group sees the result of an earlier one."""

    vectors: tuple[PlannedVector, ...] = ()
    conflict: str = "sequential"
    locked: bool = False


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


class Plan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What one engine request runs under. `report` asks for book-keeping and is no part of the plan's identity."""

    groups: tuple[VectorGroup, ...] = ()
    gates: tuple[PlannedGate, ...] = ()
    report: str = "none"

    @property
    def vectors(self) -> tuple[PlannedVector, ...]:
        """All static vectors in order of application."""
        return tuple(vector for group in self.groups for vector in group.vectors)

    def at_sites(self, mask: int) -> dict[SiteName, tuple[PlannedVector, ...]]:
        """What acts at each site on a row that selects the vectors of a bit mask, in order, conflicts resolved."""
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

    @property
    def digests(self) -> frozenset[str]:
        """Every payload that an engine process must have to run this plan."""
        found = [vector.digest for vector in self.vectors]
        for gate in self.gates:
            found += [gate.probe_digest, gate.steer_digest]
        return frozenset(digest for digest in found if digest is not None)


def fingerprint(plan: Plan) -> str:
    """sha256 (hex) of the plan's content as sorted compact JSON; labels and the report mode are left out."""
    content = msgspec.structs.replace(
        plan,
        report="none",
        gates=tuple(msgspec.structs.replace(gate, label=None) for gate in plan.gates),
        groups=tuple(
            msgspec.structs.replace(
                group, vectors=tuple(msgspec.structs.replace(vector, label=None) for vector in group.vectors)
            )
            for group in plan.groups
        ),
    )
    encoded = msgspec.json.encode(content, order="sorted")
    return hashlib.sha256(b"steergate/plan/1\0" + encoded).hexdigest()


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Plan)


def encode_plan(plan: Plan) -> bytes:
    """The plan as bytes for the engine request that carries it."""
    return _encoder.encode(plan)


def decode_plan(data: bytes) -> Plan:
    """The reverse of `encode_plan`. Raises `msgspec.ValidationError`."""
    return _decoder.decode(data)
