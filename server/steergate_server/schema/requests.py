"""The steering request: static vectors and gates, as a client writes them."""

from typing import Annotated, Literal

from msgspec import Meta, field

from .payloads import PackedByHook, Payload
from .words import (
    At,
    Bound,
    Conflict,
    ExpertId,
    Fires,
    Label,
    NonEmptyLayers,
    Position,
    ProbeAt,
    ReportLevel,
    Scope,
    Score,
    TokenId,
    VectorName,
    Wire,
)

__all__ = [
    "MAX_VECTORS",
    "AddApply",
    "AlwaysWhen",
    "Apply",
    "AttenuateApply",
    "InlinePayload",
    "InlineVec",
    "NamedVec",
    "ObserveApply",
    "ProbeWhen",
    "SteeringGate",
    "SteeringRequest",
    "VectorSpec",
    "When",
    "Where",
]

MAX_VECTORS = 16
"""The most static vectors that one request may carry."""


class NamedVec(Wire, frozen=True, kw_only=True, tag_field="kind", tag="name"):
    """A registered vector, or some of its sites."""

    name: VectorName
    """The name it was registered under."""
    layers: NonEmptyLayers | None = None
    """Only these of its layers, counted from 0."""
    hook: str | None = None
    """Only its sites at this hook."""


class InlineVec(Wire, frozen=True, kw_only=True, tag_field="kind", tag="inline"):
    """Numbers that travel with the request: short for a `direction` payload, with the same digest."""

    packed: PackedByHook
    """Rows by hook."""


class InlinePayload(Wire, frozen=True, kw_only=True, tag_field="kind", tag="payload"):
    """A payload of any kind that travels with the request."""

    payload: Payload
    """The numbers."""


All = Literal["all"]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
PromptPositions = Annotated[list[Bound], Meta(min_length=1)]
GenerationPositions = Annotated[list[Position], Meta(min_length=1)]
PromptWindow = tuple[Bound, Bound | None]
GenerationWindow = tuple[Position, Position | None]


class Where(Wire, frozen=True, kw_only=True):
    """The rows that a static vector selects: the union of the includes minus the union of the excludes."""

    prompt: All | None = None
    """`all`: every prompt row."""
    generation: All | None = None
    """`all`: every generated row."""
    answer: All | None = None
    """`all`: every generated row and the prompt end."""
    prompt_tokens: TokenIds | None = None
    """Prompt rows whose token has one of these ids."""
    prompt_positions: PromptPositions | None = None
    """Prompt rows by absolute position; a negative one counts from the end of the whole prompt."""
    prompt_window: PromptWindow | None = None
    """Prompt rows `[start, stop)`; bounds may be negative, a null stop is the end."""
    generation_tokens: TokenIds | None = None
    """Generated rows whose token has one of these ids."""
    generation_positions: GenerationPositions | None = None
    """Generated rows by position, counted from 0."""
    generation_window: GenerationWindow | None = None
    """Generated rows `[start, stop)`; a null stop is the end."""
    exclude_prompt_tokens: TokenIds | None = None
    """Prompt rows to leave out, by token id."""
    exclude_prompt_positions: PromptPositions | None = None
    """Prompt rows to leave out, by position."""
    exclude_prompt_window: PromptWindow | None = None
    """Prompt rows to leave out, `[start, stop)`."""
    exclude_generation_tokens: TokenIds | None = None
    """Generated rows to leave out, by token id."""
    exclude_generation_positions: GenerationPositions | None = None
    """Generated rows to leave out, by position."""
    exclude_generation_window: GenerationWindow | None = None
    """Generated rows to leave out, `[start, stop)`."""


class VectorSpec(Wire, frozen=True, kw_only=True):
    """Static steering: a vector, what is done with it, how strongly, and at which rows."""

    steer: NamedVec | InlineVec | InlinePayload | None = None
    """The numbers. Null only for an algorithm that can live on `params` alone."""
    algorithm: Annotated[str, Meta(min_length=1, max_length=128)] = "direct"
    """What is done with the numbers; capabilities list the algorithms of a server."""
    scale: float = 1.0
    """The algorithm's coefficient. 0 drops the vector."""
    layers: NonEmptyLayers | None = None
    """Only these layers of the vector, counted from 0; required by payloads that name none."""
    hook: str | None = None
    """Where a payload that names no hook is applied; null is `post_block`."""
    normalize: bool = False
    """Rescale changed rows to their norm before the change, where the algorithm can."""
    where: Where
    """Which rows."""
    params: dict[str, int | float | str | bool | list[ExpertId] | None] = field(default_factory=dict)
    """The algorithm's own parameters."""
    label: Label | None = None
    """Name in logs and reports; no part of identity."""


class AlwaysWhen(Wire, frozen=True, kw_only=True, tag_field="kind", tag="always"):
    """Act at every row, without evidence."""

    at: At = "generated"
    """The rows."""


class ProbeWhen(Wire, frozen=True, kw_only=True, tag_field="kind", tag="probe"):
    """Act when a probe's score against the residual stream passes a threshold."""

    probe: NamedVec | InlineVec
    """A vector that comes down to a single site; that is where it looks."""
    threshold: float
    """The score at which it fires, in the units of the score."""
    sharpness: Annotated[float, Meta(gt=0)] = 1.0
    """Slope of the soft weight sigmoid(sharpness (score - threshold)), used by the scope `this_token`."""
    fires: Fires = "above"
    """Fires on scores above the threshold, or below it."""
    score: Score = "dot"
    """The dot product in float32, or that divided by both norms."""
    at: ProbeAt = "generated"
    """The rows at which the probe looks."""


When = AlwaysWhen | ProbeWhen
"""When a gate acts, told apart by `kind`."""


class AddApply(Wire, frozen=True, kw_only=True, tag_field="kind", tag="add"):
    """Add a vector at each of its sites, after everything static there."""

    steer: NamedVec | InlineVec
    """The vector."""
    strength: float = 1.0
    """Its coefficient."""


class AttenuateApply(Wire, frozen=True, kw_only=True, tag_field="kind", tag="attenuate"):
    """Turn the request's static steering down."""

    keep: Annotated[float, Meta(ge=0, le=1)]
    """The share of static steering that is left: 0 removes it, 1 changes nothing."""


class ObserveApply(Wire, frozen=True, kw_only=True, tag_field="kind", tag="observe"):
    """Change nothing: the gate is scored and reported."""


Apply = AddApply | AttenuateApply | ObserveApply
"""What a gate does, told apart by `kind`."""


class SteeringGate(Wire, frozen=True, kw_only=True):
    """Conditional steering: when it acts, how far that reaches, what it does."""

    when: When
    """What makes it act."""
    scope: Scope
    """How far a firing reaches."""
    apply: Apply
    """What it does."""
    label: Label | None = None
    """Name in logs and reports; no part of identity."""


class SteeringRequest(Wire, frozen=True, kw_only=True):
    """Everything a client asks of one generation's steering."""

    vectors: Annotated[list[VectorSpec], Meta(max_length=MAX_VECTORS)] = field(default_factory=list)
    """Static vectors, in the order in which they apply."""
    conflict: Conflict = "sequential"
    """What happens where several of them select one row at one site."""
    gates: list[SteeringGate] = field(default_factory=list)
    """Gates, independent of each other; the server's capabilities tell how many."""
    inherit_default: bool = True
    """Whether the server's default steering applies first."""
    report: ReportLevel = "none"
    """How much the answer tells about what was applied."""
