"""The server default: the operator's own steering, which requests inherit."""

from __future__ import annotations

from typing import Any, NamedTuple

from msgspec.structs import replace

from steergate_server.capabilities import ALGORITHM_CAPABILITIES
from steergate_server.registry.names import NameIndex
from steergate_server.registry.numbers import canonical
from steergate_server.runtime.plan import PlannedGate, VectorGroup
from steergate_server.runtime.resolve import Resolver
from steergate_server.schema.errors import SteeringError, format_path
from steergate_server.schema.registry import DefaultAddApply, DefaultProbeWhen, DigestVec, ServerDefault
from steergate_server.schema.requests import InlinePayload, InlineVec
from steergate_server.schema.rules import check


class InstalledDefault(NamedTuple):
    """A default in force: as GET tells it, and resolved. Its `digests` are held as long as it is."""

    definition: ServerDefault
    groups: tuple[VectorGroup, ...]
    gates: tuple[PlannedGate, ...]
    digests: tuple[str, ...]

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
        vectors, _ = resolver.vectors(body, format_path, held)
        gates = resolver.gates(body, format_path, held)
    except BaseException:
        for digest in held:
            names.release(digest)
        raise
    groups = (VectorGroup(vectors=tuple(vectors), conflict=body.conflict),) if vectors else ()
    return InstalledDefault(_by_digest(body), groups, tuple(gates), tuple(held))


def _refuse_request_members(body: ServerDefault) -> None:
    """Members that only a request can mean."""
    if not body.inherit_default:
        raise SteeringError(
            "unknown_field", "A default inherits from nothing. Leave `inherit_default` out.", "inherit_default"
        )
    if body.report != "none":
        raise SteeringError("unknown_field", "Each request asks for its own report. Leave `report` out.", "report")


def _by_digest(body: ServerDefault) -> ServerDefault:
    """The default with digests in place of inline numbers, so that what GET answers can be PUT again."""
    return replace(
        body,
        vectors=[replace(spec, steer=_digest_of(spec.steer)) for spec in body.vectors],
        gates=[
            replace(
                gate,
                when=replace(gate.when, probe=_digest_of(gate.when.probe))
                if isinstance(gate.when, DefaultProbeWhen)
                else gate.when,
                apply=replace(gate.apply, steer=_digest_of(gate.apply.steer))
                if isinstance(gate.apply, DefaultAddApply)
                else gate.apply,
            )
            for gate in body.gates
        ],
    )


def _digest_of(source: Any) -> Any:
    if isinstance(source, InlineVec):
        return DigestVec(digest=canonical(source).digest)
    if isinstance(source, InlinePayload):
        return DigestVec(digest=canonical(source.payload).digest)
    return source
