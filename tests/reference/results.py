"""What the interpreter reports: the answer, and a trace of every gate and every static vector."""

from __future__ import annotations

from dataclasses import dataclass, field

from .sources import Site


@dataclass(frozen=True)
class GateRow:
    """What a gate did at one answer row.

    `score` is None where the gate does not look. `weight` is in force from the probe site on, `weight_before` at the
    sites before it; they differ under probe x this_token, and at the row where a lasting probe gate first fires.
    """

    row: int
    score: float | None
    fired: bool
    weight: float
    weight_before: float


@dataclass
class GateTrace:
    """All answer rows of one gate, in order.

    `bridged`: an earlier turn latched it, so it was not run again and has no rows. `latched`: later turns are bridged.
    """

    label: str | None
    rows: list[GateRow] = field(default_factory=list)
    latched: bool = False
    bridged: bool = False

    @property
    def fired_rows(self) -> list[int]:
        """The rows at which the gate fired."""
        return [row.row for row in self.rows if row.fired]

    @property
    def scores(self) -> list[float]:
        """The scores in order, of the rows at which the gate looked."""
        return [row.score for row in self.rows if row.score is not None]


@dataclass
class VectorTrace:
    """The rows a static vector selected, and per site those it was applied at (`priority` makes them differ)."""

    label: str | None
    selected: list[int] = field(default_factory=list)
    applied: dict[Site, list[int]] = field(default_factory=dict)


@dataclass
class Result:
    """The answer and everything that was decided on the way to it.

    Attributes:
        tokens: Answer tokens; an ending `eos_id` is included.
        logprobs: log-softmax (float64) of the float32 logits, for each token.
        top_logprobs: The likeliest tokens of each step, likeliest first: token id to log-probability.
        gates: One trace per gate of the request, in order.
        vectors: One trace per vector of the request, in order; a vector of scale 0 has selected nothing.
        default_gates: The same for the server default.
        default_vectors: The same for the server default.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] = field(default_factory=list)
    gates: list[GateTrace] = field(default_factory=list)
    vectors: list[VectorTrace] = field(default_factory=list)
    default_gates: list[GateTrace] = field(default_factory=list)
    default_vectors: list[VectorTrace] = field(default_factory=list)
