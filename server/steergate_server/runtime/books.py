"""The scheduler's books: what the gates of each request were seen to do, counted only where the output was accepted."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from typing import Any

from steergate_server.runtime.controller import Evidence
from steergate_server.runtime.history import History
from steergate_server.runtime.plan import Plan

MAX_ROWS = 4_096
"""Rows of which the report `scores` tells."""


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


class RowLog:
    """The last rows of one request: by gate, its score (NaN where it did not look, and for `always`) and its weight.

    Kept flat, since it may be copied for every output of a request that has a stop string.
    """

    def __init__(self, gates: int) -> None:
        self._gates = gates
        self._positions, self._scores, self._weights = array("q"), array("f"), array("f")

    def add(self, evidence: Evidence) -> None:
        """Note one row."""
        self._positions.append(evidence.position)
        self._scores.extend(evidence.scores[: self._gates])
        self._weights.extend(evidence.weights[: self._gates])
        if len(self._positions) == 2 * MAX_ROWS:
            del self._positions[:MAX_ROWS]
            del self._scores[: MAX_ROWS * self._gates]
            del self._weights[: MAX_ROWS * self._gates]

    def snapshot(self) -> dict[str, bytes]:
        """The last `MAX_ROWS` rows as bytes, for `logged_rows`."""
        values = MAX_ROWS * self._gates
        return {
            "positions": self._positions[-MAX_ROWS:].tobytes(),
            "scores": self._scores[-values:].tobytes(),
            "weights": self._weights[-values:].tobytes(),
        }


def logged_rows(snapshot: dict[str, bytes], gates: int) -> Iterator[tuple[int, list[float], list[float]]]:
    """The rows of a `RowLog` of `gates` gates: absolute position, scores by gate, weights by gate."""
    positions, scores, weights = array("q"), array("f"), array("f")
    for values, name in ((positions, "positions"), (scores, "scores"), (weights, "weights")):
        values.frombytes(snapshot[name])
    for number, position in enumerate(positions):
        row = slice(number * gates, (number + 1) * gates)
        yield position, scores[row].tolist(), weights[row].tolist()


class RequestBook:
    """The accounts of one request's gates, in the order of its plan."""

    def __init__(self, plan: Plan) -> None:
        self._always = [gate.when == "always" for gate in plan.gates]
        self._gates = [GateBook(keeps_positions=gate.scope == "next_step") for gate in plan.gates]
        self._rows = RowLog(len(plan.gates)) if plan.report == "scores" else None

    def accept(self, evidence: Evidence) -> None:
        """Count what was seen at a row whose output was accepted."""
        for gate, always, looked, score, fired in zip(
            self._gates, self._always, evidence.looked, evidence.scores, evidence.fired, strict=False
        ):
            if looked:
                gate.add(evidence.position, score, always or fired)
        if self._rows is not None:
            self._rows.add(evidence)

    def history(self, end: int) -> History:
        """What the gates did before row `end`, the first that was not accepted yet."""
        return History([gate.history() for gate in self._gates], end)

    @property
    def fired(self) -> int:
        """Rows at which any of the gates fired, summed over the gates."""
        return sum(gate.fired for gate in self._gates)

    def snapshot(self, *, last: bool = True) -> dict[str, Any]:
        """The accounts as plain values: `gates`, and `rows` where the plan asks for them.

        last: this may be the last snapshot that is looked at; the rows are left out of others.
        """
        accounts: dict[str, Any] = {"gates": [gate.snapshot() for gate in self._gates]}
        if self._rows is not None and last:
            accounts["rows"] = self._rows.snapshot()
        return accounts
