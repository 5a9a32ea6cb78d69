"""The server default: the operator's own steering, which requests inherit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

from msgspec.structs import replace

from steergate_server.capabilities import ALGORITHM_CAPABILITIES
from steergate_server.registry.names import NameIndex
from steergate_server.registry.numbers import canonical
from steergate_server.runtime.plan import PlannedGate, PlannedVector, VectorGroup
from steergate_server.runtime.resolve import Resolver
from steergate_server.schema.errors import SteeringError, format_path
from steergate_server.schema.registry import DefaultAddApply, DefaultProbeWhen, DigestVec, ServerDefault
from steergate_server.schema.requests import InlinePayload, InlineVec, NamedVec
from steergate_server.schema.rules import check
from steergate_server.schema.words import VectorKind

Source: TypeAlias = NamedVec | InlineVec | InlinePayload | DigestVec

SourcePlace: TypeAlias = tuple[Literal["vectors", "when", "apply"], int]
"""Where a source stands: a vector, or the `when` or `apply` of a gate, by index."""


class InstalledDefault(NamedTuple):
    """A default in force: as it was put, with digests in place of inline numbers, and resolved.

    Its `digests` are held as long as it is; `sources`: the digest that each source was resolved to.
    """

    definition: ServerDefault
    groups: tuple[VectorGroup, ...]
    gates: tuple[PlannedGate, ...]
    digests: tuple[str, ...]
    sources: Mapping[SourcePlace, str]

    def told(self, names: NameIndex) -> ServerDefault:
        """As GET tells it, for PUT to take: a name that does not lead to its numbers any more gives way to their
        digest."""

        def current(source: Source | None, kind: VectorKind, place: SourcePlace) -> Any:
            if not isinstance(source, NamedVec) or place not in self.sources:
                return source
            entry = names.find(source.name, kind)
            if entry is not None and entry.digest == self.sources[place]:
                return source
            return DigestVec(digest=self.sources[place], layers=source.layers, hook=source.hook)

        return _map_sources(self.definition, current)

    @property
    def client_gates(self) -> str:
        """What becomes of clients' gates where this default carries gates: reject, ignore or allow."""
        return self.definition.client_gates

    @property
    def locked(self) -> bool:
        """Whether clients are refused when they opt out; its vectors then apply last of all."""
        return self.definition.locked


def install(body: ServerDefault, resolver: Resolver, names: NameIndex, max_gates: int) -> InstalledDefault:
    """Check and resolve a default. Raises SteeringError, `param` from the body's root; nothing is held then."""
    _refuse_request_members(body)
    for problem in check(body, ALGORITHM_CAPABILITIES):
        # The numbers of a default are kept by their digest, so they last as long as a conversation may.
        if problem.code != "inline_conversation_steer":
            raise SteeringError(problem.code, problem.message, format_path(problem.path))
    if len(body.gates) > max_gates:
        raise SteeringError(
            "too_many_gates", f"{len(body.gates)} gates were given; this server runs at most {max_gates}.", "gates"
        )
    held: list[str] = []
    try:
        vectors, numbers = resolver.vectors(body, format_path, held)
        gates = resolver.gates(body, format_path, held)
    except BaseException:
        for digest in held:
            names.release(digest)
        raise
    groups = (VectorGroup(vectors=tuple(vectors), conflict=body.conflict),) if vectors else ()
    digests = _digests(body, dict(zip(numbers, vectors, strict=True)), gates, names)
    return InstalledDefault(_map_sources(body, _by_digest), groups, tuple(gates), tuple(held), digests)


def _digests(
    body: ServerDefault, vectors: Mapping[int, PlannedVector], gates: Sequence[PlannedGate], names: NameIndex
) -> dict[SourcePlace, str]:
    """What each source was resolved to. A vector of scale 0 is not planned, so its name is looked up again."""
    found: dict[SourcePlace, str | None] = {}
    for index, spec in enumerate(body.vectors):
        if index in vectors:
            found["vectors", index] = vectors[index].digest
        elif isinstance(spec.steer, NamedVec) and (entry := names.find(spec.steer.name, "steer")) is not None:
            found["vectors", index] = entry.digest
    for index, gate in enumerate(gates):
        found |= {("when", index): gate.probe_digest, ("apply", index): gate.steer_digest}
    return {place: digest for place, digest in found.items() if digest is not None}


def _refuse_request_members(body: ServerDefault) -> None:
    """Members that only a request can mean."""
    if not body.inherit_default:
        raise SteeringError(
            "unknown_field", "A default inherits from nothing. Leave `inherit_default` out.", "inherit_default"
        )
    if body.report != "none":
        raise SteeringError("unknown_field", "Each request asks for its own report. Leave `report` out.", "report")


def _map_sources(body: ServerDefault, change: Callable[[Source | None, VectorKind, SourcePlace], Any]) -> ServerDefault:
    """The default with each of its sources changed. change: takes one, the namespace of its name, and its place."""
    gates = []
    for index, gate in enumerate(body.gates):
        when, apply = gate.when, gate.apply
        if isinstance(when, DefaultProbeWhen):
            when = replace(when, probe=change(when.probe, "probe", ("when", index)))
        if isinstance(apply, DefaultAddApply):
            apply = replace(apply, steer=change(apply.steer, "steer", ("apply", index)))
        gates.append(replace(gate, when=when, apply=apply))
    vectors = [
        replace(spec, steer=change(spec.steer, "steer", ("vectors", index))) for index, spec in enumerate(body.vectors)
    ]
    return replace(body, vectors=vectors, gates=gates)


def _by_digest(source: Source | None, kind: VectorKind, place: SourcePlace) -> Any:  # noqa: ARG001 - as for every change
    """A digest in place of inline numbers."""
    if isinstance(source, InlineVec):
        return DigestVec(digest=canonical(source).digest)
    if isinstance(source, InlinePayload):
        return DigestVec(digest=canonical(source.payload).digest)
    return source
