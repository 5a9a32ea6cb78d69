"""The controller of one engine process: admits plans, lays each step's steering out, and answers the ops of its sites.

It knows nothing of vLLM. A runner tells it which requests were added, finished and preempted, the geometry of each
step, and when the forward is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from steergate_server.algorithms.registry import get_algorithm
from steergate_server.graph.kernels import add_lanes, score_gates
from steergate_server.graph.lanes import GateTable, Lanes
from steergate_server.graph.pools import CapacityError, Pool, SlotIndex
from steergate_server.registry.spool import Spool
from steergate_server.runtime.config import EngineConfig
from steergate_server.runtime.gates import GateState, gate_bits, gate_phases
from steergate_server.runtime.geometry import StepGeometry
from steergate_server.runtime.payloads import PayloadCache
from steergate_server.runtime.plan import Plan, PlannedGate, PlannedVector
from steergate_server.runtime.selection import PHASES, selects_phase
from steergate_server.runtime.sites import Site
from steergate_server.runtime.trace import Trace
from steergate_server.schema.errors import SteeringError
from steergate_server.schema.requests import Where


class Evidence(NamedTuple):
    """What one request's gates saw in one step, at its last row: absolute position, and by gate whether it looked,
    its score (NaN for none) and whether it fired."""

    position: int
    looked: list[bool]
    scores: list[float]
    fired: list[bool]


class _Live(NamedTuple):
    """A live request: our number for it, its plan, and what it holds."""

    number: int
    plan: Plan
    slots: list[int]
    probes: list[int]
    reports: bool


class Controller:
    """Steering state of one engine process, for `max_requests` live requests and steps of `max_rows` rows."""

    def __init__(
        self,
        config: EngineConfig,
        sites: Sequence[Site],
        spool: Spool,
        *,
        dtype: torch.dtype,
        device: torch.device,
        max_rows: int,
        max_requests: int,
    ) -> None:
        self.config = config
        self.sites = list(sites)
        self._site_number = {(site.hook, site.layer): number for number, site in enumerate(self.sites)}
        self._payloads = PayloadCache(spool)
        width = self.sites[0].width
        slots = config.max_slots or 4 * max_requests
        gates = config.max_gates if config.gates else 0
        # One number more than requests that run: one may be added in the step that learns of another's end.
        numbers = 2 * max_requests + 1
        rows = max(2, config.memory_mib * 2**20 // (width * dtype.itemsize))
        self.pool = Pool("additive", min(rows, 1 + (slots - 1) * len(self.sites)), width, dtype, device)
        self.probes = Pool("probe", 1 + numbers * max(gates, 1), width, torch.float32, device)
        self.slots = SlotIndex(len(self.sites), slots, self.pool, device)
        self.lanes = Lanes(max_rows, gates, device)
        self.gates = GateTable(numbers, gates, device)
        self.state = GateState(numbers, gates, device)
        self.trace = Trace() if config.trace else None
        self._live: dict[str, _Live] = {}
        self._free_numbers = list(range(numbers - 1, 0, -1))
        # What each live request gives to a row of each phase; row 0 is "no request".
        self._prompt_length = np.zeros(numbers, dtype=np.int64)
        self._slot_by_phase = np.zeros((numbers, PHASES, 1 + gates), dtype=np.int32)
        self._source_by_phase = np.zeros((numbers, PHASES, gates), dtype=np.int8)
        self._look_by_phase = np.zeros((numbers, PHASES, gates), dtype=bool)
        self._touches = np.zeros((numbers, len(self.sites)), dtype=bool)
        self._probing = np.zeros((numbers, len(self.sites)), dtype=bool)
        self._damping = np.zeros(numbers, dtype=bool)
        self._gate_count = np.zeros(numbers, dtype=np.int64)
        self._idle: NDArray[np.bool_] = np.zeros(len(self.sites), dtype=bool)
        self._fault: Exception | None = None
        self._end_step()
        self._high_water = 0

    # Life of a request ------------------------------------------------------------------------------------------

    def add(self, request_id: str, plan: Plan, prompt_length: int) -> None:
        """Install a plan for a request whose prompt has `prompt_length` tokens.

        Raises SteeringError where it cannot be installed exactly; nothing is held then.
        """
        if request_id in self._live:
            raise ValueError(f"request {request_id} is live already")
        number = self._free_numbers[-1]
        self._payloads.hold(plan.digests)
        live = _Live(number, plan, [], [], plan.report != "none" and bool(plan.gates))
        try:
            self._install_vectors(live)
            for lane, gate in enumerate(plan.gates):
                self._install_gate(live, lane, gate)
        except BaseException as error:
            self._clear(live)
            if isinstance(error, CapacityError):
                raise SteeringError("over_capacity", f"{error}; retry later, or raise --steering-memory") from error
            if isinstance(error, OverflowError):
                raise SteeringError("out_of_range", f"{error}; use a smaller scale or strength") from error
            raise
        self._prompt_length[number] = prompt_length
        self._gate_count[number] = len(plan.gates)
        self._free_numbers.pop()
        self._live[request_id] = live

    def finish(self, request_id: str) -> None:
        """Release everything that a request held and zero its state. Unknown ids are requests without steering."""
        live = self._live.pop(request_id, None)
        if live is not None:
            self._clear(live)
            self._free_numbers.append(live.number)

    @property
    def live(self) -> int:
        """Requests that hold steering."""
        return len(self._live)

    @property
    def payloads_held(self) -> int:
        """Payloads that are in memory for live requests."""
        return self._payloads.held

    def lanes_nonzero(self) -> int:
        """How many lane slots, looks and request numbers are not zero; 0 when nothing is left of any request."""
        tensors = (self.lanes.slot, self.lanes.look, self.lanes.request, self.state.latched, self.state.fired_last)
        return sum(int(tensor.count_nonzero()) for tensor in tensors)

    def _clear(self, live: _Live) -> None:
        number = live.number
        for table in (self._slot_by_phase, self._source_by_phase, self._look_by_phase, self._touches, self._probing):
            table[number] = 0
        self._prompt_length[number] = 0
        self._damping[number] = False
        self._gate_count[number] = 0
        self.gates.clear(number)
        self.state.clear(number)
        for slot in live.slots:
            self.slots.release(slot)
        for entry in live.probes:
            self.probes.release(entry)
        self._payloads.release(live.plan.digests)

    def _install_vectors(self, live: _Live) -> None:
        selected = [selects_phase(vector.where) for vector in live.plan.vectors]
        for phase in range(PHASES):
            vectors = [vector for vector, rows in zip(live.plan.vectors, selected, strict=True) if rows[phase]]
            if vectors:
                slot = self._acquire_slot(live, vectors)
                self._slot_by_phase[live.number, phase, 0] = slot

    def _acquire_slot(self, live: _Live, vectors: list[PlannedVector]) -> int:
        rows: dict[int, list[PlannedVector]] = {}
        for vector in vectors:
            for site in vector.sites:
                rows.setdefault(self._site_number[site], []).append(vector)
        key = tuple((v.algorithm, v.digest, v.scale, v.sites) for v in vectors)
        slot = self.slots.acquire(
            key,
            {
                site: (
                    (site, tuple((v.algorithm, v.digest, v.scale) for v in here)),
                    lambda site=site, here=here: self._lower(site, here),  # type: ignore[misc]
                )
                for site, here in rows.items()
            },
        )
        live.slots.append(slot)
        self._touches[live.number, list(rows)] = True
        return slot

    def _lower(self, site: int, vectors: list[PlannedVector]) -> torch.Tensor:
        """The one row `[width]` that stands for several additive vectors at a site: their sum, in float32."""
        name = (self.sites[site].hook, self.sites[site].layer)
        total: torch.Tensor | None = None
        for vector in vectors:
            assert vector.digest is not None
            table = get_algorithm(vector.algorithm).graph_lower(self._payloads.row(vector.digest, name), vector.scale)
            row = table["additive"]
            assert row is not None
            total = row if total is None else total + row
        assert total is not None
        return total

    def _install_gate(self, live: _Live, lane: int, gate: PlannedGate) -> None:
        number, phases = live.number, gate_phases(gate)
        if gate.apply == "add":
            assert gate.steer_digest is not None
            vector = PlannedVector(
                algorithm="direct",
                digest=gate.steer_digest,
                scale=gate.strength,
                sites=gate.steer_sites,
                where=_EVERYWHERE,
            )
            slot = self._acquire_slot(live, [vector])
            self._slot_by_phase[number, phases.reach, lane + 1] = slot
        elif gate.apply == "attenuate":
            self.gates.damp[number, lane] = 1.0 - gate.keep
            self._damping[number] = True
        self._source_by_phase[number, :, lane] = phases.source
        self._look_by_phase[number, :, lane] = phases.look
        if gate.when == "probe":
            self._install_probe(live, lane, gate)

    def _install_probe(self, live: _Live, lane: int, gate: PlannedGate) -> None:
        assert gate.probe_digest is not None
        assert gate.probe_site is not None
        digest, name = gate.probe_digest, gate.probe_site
        entry = self.probes.acquire((digest, name), lambda: self._payloads.row(digest, name))
        live.probes.append(entry)
        number, site = live.number, self._site_number[name]
        self._probing[number, site] = True
        self.gates.site[number, lane] = site
        self.gates.probe[number, lane] = entry
        self.gates.threshold[number, lane] = gate.threshold
        self.gates.sharpness[number, lane] = min(gate.sharpness, torch.finfo(torch.float32).max)
        self.gates.mode[number, lane] = gate_bits(gate)

    # A step -----------------------------------------------------------------------------------------------------

    def begin_step(self, geometry: StepGeometry) -> None:
        """Lay out the lanes of a step. Nothing of an earlier step is left in them."""
        rows = geometry.rows
        numbers = np.zeros(len(geometry.request_ids), dtype=np.int64)
        if self._live:
            for index, request_id in enumerate(geometry.request_ids):
                live = self._live.get(request_id)
                if live is not None:
                    numbers[index] = live.number
        if not numbers.any():
            self._end_step()
            self.lanes.clear(0, self._high_water)
            self._high_water = 0
            return
        self.lanes.clear(rows, self._high_water)
        self._high_water = rows
        request = np.repeat(numbers, geometry.counts)
        first = np.concatenate(([0], np.cumsum(geometry.counts)[:-1]))
        position = np.arange(rows) + np.repeat(geometry.starts - first, geometry.counts)
        end = self._prompt_length[request] - 1
        phase = (position >= end).astype(np.int64) + (position > end)
        self.lanes.request[:rows] = torch.from_numpy(request)
        self.lanes.slot[:rows] = torch.from_numpy(self._slot_by_phase[request, phase])
        self.lanes.weight[:rows, 0] = 1.0
        self._rows, self._geometry, self._numbers = rows, geometry, numbers
        self._active = np.any(self._touches[numbers], axis=0)
        gates = int(self._gate_count[numbers].max())
        self._used_lanes = 1 + gates
        self._attenuated = bool(self._damping[numbers].any())
        self._probed = np.any(self._probing[numbers], axis=0)
        if self.lanes.look.shape[1]:
            source = torch.from_numpy(self._source_by_phase[request, phase])
            first_rows = torch.from_numpy(np.isin(np.arange(rows), first))
            self.lanes.look[:rows] = torch.from_numpy(self._look_by_phase[request, phase])
            self.lanes.weight[:rows, 1:] = self.state.weights(source, self.lanes.request[:rows].long(), first_rows)
            self.lanes.score[:rows] = float("nan")
            self.lanes.fired[:rows] = False
        self._visited = self._active | self._probed
        if self.trace is not None:
            self.trace.begin(geometry, position)

    def steer(self, hidden: torch.Tensor, residual: torch.Tensor | None, site: int) -> None:
        """The op of a site: score the gates that probe here, then steer `hidden` [rows, width] in place.

        It never raises: an exception would leave the forward and end the engine. A fault is raised by `end_step`.
        """
        if not self._visited[site]:
            return
        try:
            self._steer(hidden, residual, site)
        except Exception as error:
            self._fault = error
            self._visited = self._idle

    def _steer(self, hidden: torch.Tensor, residual: torch.Tensor | None, site: int) -> None:
        rows = self._rows
        if self._probed[site]:
            score_gates(hidden, residual, site, rows, self.lanes, self.gates, self.probes.rows)
        if not self._active[site]:
            return
        slots = self.lanes.slot[:rows, : self._used_lanes]
        entries = self.slots.table[site][slots.long()].long()
        weight = add_lanes(
            hidden, rows, self.lanes, self.gates, entries, self.pool.rows, self._used_lanes, self._attenuated
        )
        if self.trace is not None:
            self.trace.record(self.sites[site], slots, entries, weight)

    def end_step(self) -> dict[str, Evidence]:
        """Advance the gates' state after the forward; return the evidence of requests that want a report.

        Raises the fault, if any, that an op of this step met.
        """
        if self._fault is not None:
            raise self._fault
        if not self._rows:
            return {}
        last = np.cumsum(self._geometry.counts) - 1
        evidence: dict[str, Evidence] = {}
        if self._used_lanes > 1:
            self.state.advance(self.lanes, torch.from_numpy(last), torch.from_numpy(self._numbers))
            evidence = self._evidence(last)
        self._end_step()
        return evidence

    def _evidence(self, last: np.ndarray) -> dict[str, Evidence]:
        wanted = [
            (index, request_id)
            for index, request_id in enumerate(self._geometry.request_ids)
            if self._numbers[index] and self._live[request_id].reports
        ]
        if not wanted:
            return {}
        chosen = [index for index, _ in wanted]
        rows = torch.from_numpy(last[chosen])
        position = (self._geometry.starts + self._geometry.counts - 1)[chosen].tolist()
        looked, score = self.lanes.look[rows].tolist(), self.lanes.score[rows].tolist()
        fired = self.lanes.fired[rows].tolist()
        return {
            request_id: Evidence(position[at], looked[at], score[at], fired[at])
            for at, (_, request_id) in enumerate(wanted)
        }

    def _end_step(self) -> None:
        """Between steps every site is the identity: dummy, profile and warm-up runs must see no steering."""
        self._rows = 0
        self._fault = None
        self._used_lanes = 1
        self._attenuated = False
        self._active = self._probed = self._visited = self._idle
        self._numbers = np.zeros(0, dtype=np.int64)
        self._geometry = StepGeometry([], self._numbers, self._numbers)

    def abandon_step(self) -> list[str]:
        """Give a step up after a fault of ours: no row is steered; returns the steered requests that were in it."""
        requests = [request_id for request_id in self._geometry.request_ids if request_id in self._live]
        self._end_step()
        self.lanes.clear(0, self.lanes.slot.shape[0])
        return requests


_EVERYWHERE = Where(prompt="all", generation="all")
"""A gate's vector has no clause of its own: its lane's weight decides."""
