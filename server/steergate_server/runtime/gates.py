"""Gate logic on an engine process: what a gate gives to each phase, and the state that it carries from step to step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from steergate_server.graph.lanes import BELOW, COSINE, LASTING, SOFT, Lanes
from steergate_server.runtime.plan import PlannedGate, PlannedVector, SiteName
from steergate_server.runtime.selection import PHASES
from steergate_server.schema.requests import Where

NOTHING, CERTAIN, LATCHED, FIRED_LAST = 0, 1, 2, 3
"""Where a lane's weight comes from when a row starts: 0, 1, the latch, or the firing of the row before."""


class GatePhases(NamedTuple):
    """By phase (before the prompt end, at it, generated): the source of the weight, and whether the gate looks."""

    source: tuple[int, int, int]
    look: tuple[bool, bool, bool]

    @property
    def reach(self) -> list[int]:
        """The phases whose rows can get a weight other than 0."""
        return [phase for phase in range(PHASES) if self.source[phase] != NOTHING or self.look[phase]]


def gate_phases(gate: PlannedGate) -> GatePhases:
    """What a gate gives to the rows of each phase (gates.md). Rows before the prompt end are left alone."""
    at_end, generated = gate.at in ("prompt_end", "answer"), gate.at in ("generated", "answer")
    look = (False, at_end, generated)
    if gate.when == "always":
        return GatePhases((NOTHING, CERTAIN if at_end else NOTHING, CERTAIN if generated else NOTHING), look)
    carried = {"this_token": NOTHING, "next_step": FIRED_LAST}.get(gate.scope, LATCHED)
    return GatePhases((NOTHING, NOTHING, carried), look)


def added_vectors(gates: Iterable[PlannedGate]) -> dict[SiteName, tuple[PlannedVector, ...]]:
    """What gates that add would add at each site if all of them had weight 1; equal for equal gates in any order."""
    found: dict[SiteName, list[PlannedVector]] = {}
    for gate in sorted(gates, key=lambda gate: gate.identity):
        vector = PlannedVector(
            algorithm="direct",
            digest=gate.steer_digest,
            scale=gate.strength,
            sites=gate.steer_sites,
            where=_EVERYWHERE,
        )
        for site in gate.steer_sites:
            found.setdefault(site, []).append(vector)
    return {site: tuple(vectors) for site, vectors in found.items()}


_EVERYWHERE = Where(prompt="all", generation="all")
"""A gate's vector has no clause of its own: its lane's weight decides."""


def gate_bits(gate: PlannedGate) -> int:
    """The bits of a probe gate's `GateTable.mode`."""
    bits = {"this_token": SOFT, "next_step": 0}.get(gate.scope, LASTING)
    return bits | (BELOW if gate.fires == "below" else 0) | (COSINE if gate.score == "cosine" else 0)


def carries(gate: PlannedGate) -> bool:
    """Whether a gate's firings matter to later rows, so that they must outlive a preemption."""
    return gate.when == "probe" and gate.scope != "this_token"


class GateState:
    """What the gates of live requests remember: `latched` and `fired_last`, [requests, gates] bool.

    It lives on the device and is advanced there: what comes from the host is copied over, and nothing is read back.
    """

    def __init__(self, requests: int, gates: int, device: torch.device) -> None:
        self.latched = torch.zeros((requests, gates), dtype=torch.bool, device=device)
        self.fired_last = torch.zeros((requests, gates), dtype=torch.bool, device=device)

    def clear(self, request: int) -> None:
        """Forget one request number."""
        self.latched[request] = False
        self.fired_last[request] = False

    def restore(self, request: int, latched: list[bool]) -> None:
        """Set what the gates of a resumed request had come to, from its history."""
        self.latched[request, : len(latched)] = torch.tensor(latched, device=self.latched.device)
        self.fired_last[request] = False

    def weights(self, source: torch.Tensor, request: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """Weights [rows, gates] float32 at the start of a step.

        source [rows, gates] int8; request [rows] int64; first [rows] bool: the row is its request's first in this
        step, the only one that follows directly on the row that `fired_last` speaks of.
        """
        device = self.latched.device
        source, request, first = source.to(device), request.to(device), first.to(device)
        follows = self.fired_last[request] & first.unsqueeze(1)
        on = (source == CERTAIN) | ((source == LATCHED) & self.latched[request]) | ((source == FIRED_LAST) & follows)
        return on.float()

    def advance(self, lanes: Lanes, last: torch.Tensor, request: torch.Tensor) -> None:
        """Take the firings of a step over. last [requests of the step] int64: each one's last row; request: numbers.

        A gate looks at one row of a request in a step at most: the prompt end or one generated row, which is the last.
        """
        device = self.latched.device
        last, request = last.to(device), request.to(device)
        fired = lanes.fired[last]
        self.latched[request] |= fired
        self.fired_last[request] = fired
        # Number 0 stands for requests without steering; it must stay empty.
        self.clear(0)
