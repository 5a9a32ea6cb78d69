"""Bodies and answers of the steering routes: vectors, the server default, capabilities, status, validation."""

from typing import Annotated, Any, Literal

from msgspec import Meta, field

from .hooks import Component
from .payloads import PackedByHook, Payload
from .requests import (
    MAX_VECTORS,
    AddApply,
    AlwaysWhen,
    AttenuateApply,
    InlinePayload,
    InlineVec,
    NamedVec,
    ObserveApply,
    ProbeWhen,
    SteeringGate,
    SteeringRequest,
    VectorSpec,
)
from .words import ClientGates, Digest, NonEmptyLayers, VectorKind, VectorName, Wire

__all__ = [
    "AlgorithmInfo",
    "CapabilitiesAnswer",
    "DefaultAddApply",
    "DefaultAnswer",
    "DefaultGate",
    "DefaultProbeWhen",
    "DefaultVectorSpec",
    "DigestVec",
    "ErrorAnswer",
    "ErrorDetail",
    "ForgetAnswer",
    "HookInfo",
    "Limits",
    "RegisterAnswer",
    "RegisterRequest",
    "ServerDefault",
    "StatusAnswer",
    "UnregisterAnswer",
    "UnregisterRequest",
    "ValidateAnswer",
    "VectorInfo",
    "WorkerStatus",
]


class RegisterRequest(Wire, frozen=True, kw_only=True):
    """Body of `POST /v1/steering/vectors/register`: exactly one of `packed` and `payload`."""

    name: VectorName
    """The name to register."""
    kind: VectorKind
    """The namespace. A probe is a direction at a single site."""
    packed: PackedByHook | None = None
    """Rows by hook: short for a `direction` payload."""
    payload: Payload | None = None
    """A payload of any kind."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The registrant's own notes, given back by the list routes; no part of identity."""
    replace: bool = False
    """Whether a name that exists with other content may move to this one."""


class RegisterAnswer(Wire, frozen=True, kw_only=True):
    """Answer of the register route."""

    status: Literal["created", "unchanged", "replaced"]
    """What happened to the name."""
    name: VectorName
    """The name."""
    kind: VectorKind
    """The namespace."""
    digest: Digest
    """Digest of the canonical numbers, computed by the server."""


class UnregisterRequest(Wire, frozen=True, kw_only=True):
    """Body of `POST /v1/steering/vectors/unregister`."""

    name: VectorName
    """The name to forget."""
    kind: VectorKind
    """Its namespace."""


class UnregisterAnswer(Wire, frozen=True, kw_only=True):
    """Answer of the unregister route."""

    status: Literal["unregistered"]
    """The name is gone; requests that run keep their numbers."""
    name: VectorName
    """The name."""
    kind: VectorKind
    """The namespace."""


class VectorInfo(Wire, frozen=True, kw_only=True):
    """A registered vector, without its numbers. The list route answers with a list of these."""

    name: VectorName
    """The name."""
    kind: VectorKind
    """The namespace."""
    digest: Digest
    """Digest of the canonical numbers."""
    hooks: list[str]
    """The hooks that the payload names, in execution order; empty where it names none."""
    layers: list[int]
    """The layers that the payload names, ascending; empty where it names none."""
    width: int | None
    """Elements per row; null where hooks differ in width, and for router payloads."""
    bytes: int
    """Size of the stored numbers, in bytes."""
    created: str
    """When the name was pointed at this content: UTC, ISO 8601."""
    metadata: dict[str, Any]
    """What the registrant noted."""


class DigestVec(Wire, frozen=True, kw_only=True, tag_field="kind", tag="digest"):
    """A payload that the server holds already. Only the server default may name one."""

    digest: Digest
    """Digest of the canonical numbers."""
    layers: NonEmptyLayers | None = None
    """Only these of its layers, counted from 0."""
    hook: str | None = None
    """Only its sites at this hook."""


# The default's structs are the request's with one more source, so that what GET answers can be PUT again. They are
# subclasses: whatever takes a request takes a default.


class DefaultVectorSpec(VectorSpec, frozen=True, kw_only=True):
    """Static steering in the server default."""

    steer: NamedVec | InlineVec | InlinePayload | DigestVec | None = None  # type: ignore[assignment]
    """The numbers. Null only for an algorithm that can live on `params` alone."""


class DefaultProbeWhen(ProbeWhen, frozen=True, kw_only=True, tag_field="kind", tag="probe"):
    """A probe in the server default."""

    probe: NamedVec | InlineVec | DigestVec  # type: ignore[assignment]
    """A vector that comes down to a single site; that is where it looks."""


class DefaultAddApply(AddApply, frozen=True, kw_only=True, tag_field="kind", tag="add"):
    """An addition in the server default."""

    steer: NamedVec | InlineVec | DigestVec  # type: ignore[assignment]
    """The vector."""


class DefaultGate(SteeringGate, frozen=True, kw_only=True):
    """A gate in the server default."""

    when: AlwaysWhen | DefaultProbeWhen
    """What makes it act."""
    apply: DefaultAddApply | AttenuateApply | ObserveApply
    """What it does."""


class ServerDefault(SteeringRequest, frozen=True, kw_only=True):
    """Body of `PUT /v1/steering/default`: a steering request, and how clients relate to it."""

    vectors: Annotated[list[DefaultVectorSpec], Meta(max_length=MAX_VECTORS)] = field(default_factory=list)  # type: ignore[assignment]
    """Static vectors, in the order in which they apply."""
    gates: list[DefaultGate] = field(default_factory=list)  # type: ignore[assignment]
    """The operator's gates; they take lanes before the client's."""
    client_gates: ClientGates = "reject"
    """What becomes of a client's own gates where this default carries gates."""
    locked: bool = False
    """Whether clients are refused when they opt out."""


class DefaultAnswer(Wire, frozen=True, kw_only=True):
    """Answer of the default's routes."""

    default: ServerDefault | None
    """The default in force, with digests in place of inline numbers; null if there is none."""


class ForgetAnswer(Wire, frozen=True, kw_only=True):
    """Answer of `DELETE /v1/steering/conversations/{id}`."""

    status: Literal["forgotten", "unknown"]
    """Whether the conversation had a latch."""
    conversation_id: str
    """The conversation."""


class ErrorDetail(Wire, frozen=True, kw_only=True):
    """One error, in OpenAI's terms."""

    message: str
    """What was given, what is allowed, what to do."""
    type: str
    """OpenAI's error type."""
    param: str | None
    """Path of the culprit in the request as sent."""
    code: str
    """One of the exported error codes."""


class ErrorAnswer(Wire, frozen=True, kw_only=True):
    """Body of every refusal."""

    error: ErrorDetail
    """The error."""


class ValidateAnswer(Wire, frozen=True, kw_only=True):
    """Answer of `POST /v1/steering/validate`."""

    valid: bool
    """Whether the request would be admitted."""
    errors: list[ErrorDetail]
    """Everything that is wrong with it."""


class HookInfo(Wire, frozen=True, kw_only=True):
    """One hook of the served model."""

    hook: str
    """Its name."""
    component: Component
    """What its value belongs to."""
    width: int
    """Elements per row."""
    layers: list[int]
    """The layers that have it."""
    steerable: bool
    """Whether the operator declared it, so that it carries ops."""


class AlgorithmInfo(Wire, frozen=True, kw_only=True):
    """One algorithm as this server offers it."""

    payload_kind: str | None
    """The payload kind that it takes."""
    source: str
    """The native file kind that its payload may come from."""
    normalize: bool
    """Whether `normalize` is permitted."""
    params: list[str]
    """The parameters that it takes."""
    target_component: Component
    """What it works on."""
    enabled: bool
    """Whether the operator declared it."""
    graph_mode: Literal["eager", "split", "in_graph"] | None
    """How it runs here; null where it is not enabled."""
    reason: str | None = None
    """Why it does not run in graph, or only under a condition."""


class Limits(Wire, frozen=True, kw_only=True):
    """What one request may carry."""

    vectors: int
    """Static vectors."""
    gates: int
    """Gates."""
    inline_bytes: int
    """Decoded inline bytes."""
    graph_rank: int
    """Summed rank of the low-rank maps at one site, in graph."""
    slots: int
    """Distinct sets of vectors that live requests can have at once."""
    pool_rows: dict[str, int]
    """Payload rows that live requests can hold at once, by component."""


class CapabilitiesAnswer(Wire, frozen=True, kw_only=True):
    """Answer of `GET /v1/steering/capabilities`."""

    contract: str
    """Contract version, MAJOR.MINOR."""
    model: str
    """The served model's name."""
    hidden_width: int
    """Elements per row of the residual stream."""
    layers: int
    """Number of decoder blocks."""
    hooks: list[HookInfo]
    """The model's hooks, in execution order."""
    algorithms: dict[str, AlgorithmInfo]
    """By name."""
    sources: list[Literal["name", "inline"]]
    """Where a request's numbers may come from."""
    gates: bool
    """Whether gates are switched on."""
    gates_reason: str | None = None
    """Why gates are off, or limited."""
    graph_mode: Literal["eager", "split", "in_graph"]
    """How steering runs inside the model."""
    limits: Limits
    """What one request may carry."""


class WorkerStatus(Wire, frozen=True, kw_only=True):
    """One worker's share of the status."""

    rank: int
    """The worker's rank."""
    graph_mode: Literal["eager", "split", "in_graph"]
    """How steering runs inside its part of the model."""
    pool_used: int
    """Bytes of its payload pools in use."""
    pool_capacity: int
    """Bytes of its payload pools."""


class StatusAnswer(Wire, frozen=True, kw_only=True):
    """Answer of `GET /v1/steering/status`."""

    pool_used: int
    """Bytes of the payload pools in use, on the fullest worker."""
    pool_capacity: int
    """Bytes of the payload pools of one worker."""
    live_requests: int
    """Steered requests that are running, or preempted."""
    gates_installed: int
    """Gates of the running requests."""
    latches: int
    """Conversations with a latch, over all engines."""
    one_principal: bool
    """True where no API key tells clients apart, so that all share their conversation ids."""
    latches_per_engine: bool
    """True where a conversation must stay with one engine."""
    workers: list[WorkerStatus]
    """Each worker."""
    counters: dict[str, int]
    """Counts since start, by metric name."""
