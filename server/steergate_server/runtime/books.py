"""The scheduler's books: what the gates of each request were seen to do, counted only where the output was accepted."""

from __future__ import annotations

import math
from typing import Any

from steergate_server.runtime.controller import Evidence
from steergate_server.runtime.history import History
from steergate_server.runtime.plan import Plan


class GateBook:
    """The running account of one gate of one request. Positions are absolute rows.

    `positions` are kept for a gate that acts at the row after each firing: a resumed request needs them.
    """

    __slots__ = ("evaluated", "fired", "first_fired", "last_fired", "max_score", "positions")

    def __init__(self, *, keeps_positions: bool = False) -> None:
        self.positions: list[int] | None = [] if keeps_positions else None
        self.evaluated = 0
        self.fired = 0
        self.first_fired: int | None = None
        self.last_fired: int | None = None
        self.max_score: float | None = None

    def add(self, position: int, score: float, fired: bool) -> None:
        """Count one row at which the gate looked; `score` is NaN for a gate that has none."""
        self.evaluated += 1
        if not math.isnan(score):
            self.max_score = score if self.max_score is None else max(self.max_score, score)
        if fired:
            self.fired += 1
            self.last_fired = position
            if self.positions is not None:
                self.positions.append(position)
            if self.first_fired is None:
                self.first_fired = position

    def snapshot(self) -> dict[str, Any]:
        """The account as plain values."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "positions"}

    def history(self) -> list[int]:
        """The firings that a resumed request must know of."""
        if self.positions is not None:
            return self.positions
        return [] if self.first_fired is None else [self.first_fired]


class RequestBook:
    """The accounts of one request's gates, in the order of its plan."""

    def __init__(self, plan: Plan) -> None:
        self._always = [gate.when == "always" for gate in plan.gates]
        self._gates = [GateBook(keeps_positions=gate.scope == "next_step") for gate in plan.gates]

    def accept(self, evidence: Evidence) -> None:
        """Count what was seen at a row whose output was accepted."""
        for gate, always, looked, score, fired in zip(
            self._gates, self._always, evidence.looked, evidence.scores, evidence.fired, strict=False
        ):
            if looked:
                gate.add(evidence.position, score, always or fired)

    def history(self, end: int) -> History:
        """What the gates did before row `end`, the first that was not accepted yet."""
        return History([gate.history() for gate in self._gates], end)

    @property
    def fired(self) -> int:
        """Rows at which any of the gates fired, summed over the gates."""
        return sum(gate.fired for gate in self._gates)

    def snapshot(self) -> list[dict[str, Any]]:
        """The accounts as plain values."""
        return [gate.snapshot() for gate in self._gates]
