"""Gate logic on an engine process: what a gate gives to each phase, and the state that it carries from step to step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from steergate_server.graph.lanes import BELOW, COSINE, LASTING, SOFT, Lanes
from steergate_server.runtime.plan import PlannedGate, PlannedVector, SiteName
from steergate_server.runtime.selection import PHASES, reachable_phases
from steergate_server.schema.hooks import site_order
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


def reaches(gate: PlannedGate, vector: PlannedVector) -> bool:
    """Whether an attenuating gate can ever meet a static vector: a row that both touch, at a site in reach."""
    selected = reachable_phases(vector.where)
    if not any(selected[phase] for phase in gate_phases(gate).reach):
        return False
    if gate.probe_site is None or gate.scope != "this_token":
        return True
    probe = gate.probe_site
    return any(site_order(*site) >= site_order(*probe) for site in vector.sites)


def added_vectors(gates: Iterable[PlannedGate]) -> dict[SiteName, tuple[PlannedVector, ...]]:
    """What gates that add would add at each site if all of them had weight 1; equal for equal gates in any order."""
    several = list(gates)
    if len(several) == 1:
        return dict.fromkeys(several[0].steer_sites, (_added_vector(several[0]),))
    found: dict[SiteName, list[PlannedVector]] = {}
    for gate in sorted(several, key=lambda gate: gate.identity):
        vector = _added_vector(gate)
        for site in gate.steer_sites:
            found.setdefault(site, []).append(vector)
    return {site: tuple(vectors) for site, vectors in found.items()}


def _added_vector(gate: PlannedGate) -> PlannedVector:
    return PlannedVector(
        algorithm="direct",
        digest=gate.steer_digest,
        scale=gate.strength,
        sites=gate.steer_sites,
        where=_EVERYWHERE,
    )


_EVERYWHERE = Where(prompt="all", generation="all")
"""A gate's vector has no clause of its own: its lane's weight decides."""


def gate_bits(gate: PlannedGate) -> int:
    """The bits of a probe gate's `GateTable.mode`."""
    bits = {"this_token": SOFT, "next_step": 0}.get(gate.scope, LASTING)
    return bits | (BELOW if gate.fires == "below" else 0) | (COSINE if gate.score == "cosine" else 0)


def carries(gate: PlannedGate) -> bool:
    """Whether a gate's firings matter to later rows, so that they must outlive a preemption."""
    return gate.when == "probe" and gate.scope != "this_token"


class Sources(NamedTuple):
    """Where the weights of a step's rows come from, [rows, gates] bool on the device: certain, the latch of their
    request, the firing of the row before; None where no row has one from there. `request` [rows] int64."""

    certain: torch.Tensor
    latched: torch.Tensor | None
    follows: torch.Tensor | None
    request: torch.Tensor


def sources_of(
    source: NDArray[np.int8], request: NDArray[np.int64], first: NDArray[np.int64], device: torch.device
) -> Sources:
    """The sources of a step's rows. source [rows, gates]; first: the rows at which a request starts, the only ones that
    follow directly on the row that `GateState.fired_last` speaks of."""
    latched, follows = source == LATCHED, np.zeros(source.shape, dtype=bool)
    follows[first] = source[first] == FIRED_LAST

    def there(mask: NDArray[np.bool_]) -> torch.Tensor:
        return torch.from_numpy(mask).to(device)

    return Sources(
        there(source == CERTAIN),
        there(latched) if latched.any() else None,
        there(follows) if follows.any() else None,
        torch.from_numpy(request).to(device),
    )


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

    def weights(self, sources: Sources) -> torch.Tensor:
        """Weights [rows, gates] float32 at the start of a step."""
        on = sources.certain
        if sources.latched is not None:
            on = on | (sources.latched & self.latched.index_select(0, sources.request))
        if sources.follows is not None:
            on = on | (sources.follows & self.fired_last.index_select(0, sources.request))
        return on.float()

    def advance(self, lanes: Lanes, last: torch.Tensor, request: torch.Tensor) -> None:
        """Take the firings of a step over. last [requests] int64: each one's last row; request: its number, not 0.

        A gate looks at one row of a request in a step at most: the prompt end or one generated row, which is the last.
        """
        fired = lanes.fired.index_select(0, last)
        self.latched.index_copy_(0, request, self.latched.index_select(0, request) | fired)
        self.fired_last.index_copy_(0, request, fired)
