"""The steering report: what was applied to an answer, and what the gates saw."""

from typing import Literal

from .words import Digest, Scope, Wire

__all__ = ["ChoiceReport", "GateReport", "SteeringReport", "VectorReport"]


class VectorReport(Wire, frozen=True, kw_only=True):
    """A static vector in the report."""

    label: str | None
    """The label it was sent with."""
    digest: Digest | None
    """Digest of its numbers; null for an algorithm that lives on params alone."""
    algorithm: str
    """What was done with the numbers."""
    sites: list[str]
    """Where, in execution order: `12:post_block`."""
    positions_selected: int | None = None
    """How many rows its clause selected; only per choice."""
    positions_applied: int | None = None
    """How many of them it changed: fewer where an earlier vector had priority; only per choice."""


class GateReport(Wire, frozen=True, kw_only=True):
    """A gate in the report."""

    label: str | None
    """The label it was sent with."""
    when: Literal["always", "probe"]
    """What made it act."""
    scope: Scope
    """How far a firing reaches."""
    apply: Literal["add", "attenuate", "observe"]
    """What it does."""
    status: Literal["ran", "bridged", "overridden"]
    """Ran in this request; was carried over from an earlier turn; was not run because of the server default."""
    evaluated: int
    """Rows at which it looked."""
    fired: int
    """Rows at which it fired."""
    first_fired: int | None
    """Absolute position of the first row at which it fired."""
    last_fired: int | None
    """Absolute position of the last row at which it fired."""
    max_score: float | None
    """The largest score seen; null for `always`, and where it never looked."""
    latched: bool
    """Whether it will act in later turns of the conversation."""
    sites_out_of_reach: list[str]
    """Sites with static steering that an attenuation cannot reach, as `12:post_block`."""
    first_answer_token: Literal["steered", "partly", "untouched"]
    """Whether the row that produced the first answer token was steered by it."""
    scores: list[tuple[int, float]] | None = None
    """`[position, score]` of the rows at which it looked, among the last 4,096 answer rows; empty for `always`. Only in
    the report `scores`."""


class ChoiceReport(Wire, frozen=True, kw_only=True):
    """What was applied to one choice."""

    index: int
    """The choice's index in the answer."""
    vectors: list[VectorReport]
    """The static vectors, the server default's first."""
    gates: list[GateReport]
    """The gates, the operator's first, then the request's in the order sent, then the bridged ones."""
    tokens: list[tuple[int, int, str, list[float]]] | None = None
    """`[position, token id, text, weights]` of the last 4,096 answer rows: the row's absolute position, the token that
    is its input, that token's text, and the weight that each of `gates` had there, from its probe's site on. The last
    token of the answer is no input, so it has no row. Only in the report `scores`."""


class SteeringReport(Wire, frozen=True, kw_only=True):
    """The member `steering_report` of an answer."""

    fingerprint: str
    """Fingerprint of the plan, as in `X-Steering-Applied`."""
    default: Literal["inherited", "overridden", "none"]
    """What became of the server default."""
    vectors: list[VectorReport]
    """The plan's static vectors."""
    choices: list[ChoiceReport]
    """Per choice."""
