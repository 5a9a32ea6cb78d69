"""What a resumed request's gates did before it was preempted, and how the rows that are computed again follow it.

Rows inside the history take their weight from it, never from a new score: a score that lies near its threshold can come
out on the other side when its row is computed in another batch. Weights of scope `this_token` are computed anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from steergate_server.runtime.gates import carries
from steergate_server.runtime.plan import Plan


class History(NamedTuple):
    """`fired` by gate: absolute positions of accepted firings, ascending; the first alone where a firing lasts. `end`:
    the first row that was not accepted yet, and is computed for the first time."""

    fired: Sequence[Sequence[int]]
    end: int

    def latched(self) -> list[bool]:
        """By gate, whether it has fired."""
        return [bool(positions) for positions in self.fired]


class Replay(NamedTuple):
    """How one gate goes over rows [n] that lie within a history: the weight each starts with, whether the gate looks
    at it for the first time, and whether it fires there again whatever its score."""

    weight: NDArray[np.float32]
    look: NDArray[np.bool_]
    forced: NDArray[np.bool_]


def replay(plan: Plan, history: History, positions: NDArray[np.int64]) -> dict[int, Replay]:
    """By gate whose firings carry, how it goes over rows at absolute positions [n], none of them beyond `end`."""
    found = {}
    for lane, gate in enumerate(plan.gates):
        if not carries(gate):
            continue
        fired = np.asarray(history.fired[lane], dtype=np.int64)
        fresh = positions >= history.end
        if gate.scope == "next_step":
            weight, forced = np.isin(positions - 1, fired), np.zeros(len(positions), dtype=bool)
        else:
            first = fired[0] if len(fired) else np.iinfo(np.int64).max
            # At the row of the firing itself the weight is 1 from the probe's site on only.
            weight, forced = positions > first, positions == first
        found[lane] = Replay(weight.astype(np.float32), fresh, forced)
    return found
