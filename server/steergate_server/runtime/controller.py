"""The controller of one engine process: admits plans, lays each step's steering out, and answers the ops of its sites.

It knows nothing of vLLM. A runner tells it which requests were added and finished, the geometry of each step, and when
the forward is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from steergate_server.graph.kernels import complete, kept_share, score_gates
from steergate_server.graph.lanes import GateTable, Lanes
from steergate_server.graph.pools import CapacityError, Pool
from steergate_server.registry.spool import Spool
from steergate_server.runtime.config import EngineConfig
from steergate_server.runtime.gates import GateState, carries, gate_bits, gate_phases
from steergate_server.runtime.geometry import StepGeometry
from steergate_server.runtime.history import History, replay
from steergate_server.runtime.payloads import PayloadCache
from steergate_server.runtime.plan import Plan, PlannedGate, PlannedVector
from steergate_server.runtime.reach import StepReach
from steergate_server.runtime.rows import RowSlots
from steergate_server.runtime.selection import PHASES, is_phase_only, select
from steergate_server.runtime.sites import Site
from steergate_server.runtime.slots import SlotBook
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


class _Spread(NamedTuple):
    """A request of the step whose static slots are laid out row by row: its rows' place, and where they start."""

    number: int
    first: int
    rows: int
    start: int


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
        self._device = device
        self._site_number = {(site.hook, site.layer): number for number, site in enumerate(self.sites)}
        self._payloads = PayloadCache(spool)
        gates = config.max_gates if config.gates else 0
        # One number more than requests that run: one may be added in the step that learns of another's end.
        numbers = 2 * max_requests + 1
        self.book = SlotBook(config, sites, self._payloads, config.max_slots or 4 * max_requests, dtype, device)
        width = max(site.width for site in sites)
        self.probes = Pool(1 + numbers * max(gates, 1), width, torch.float32, device)
        self.lanes = Lanes(max_rows, gates, device)
        self.gates = GateTable(numbers, gates, device)
        self.state = GateState(numbers, gates, device)
        self.trace = Trace() if config.trace else None
        self._live: dict[str, _Live] = {}
        self._free_numbers = list(range(numbers - 1, 0, -1))
        # What each live request gives to its rows; row 0 is "no request".
        self._prompt_length = np.zeros(numbers, dtype=np.int64)
        self._slot_by_phase = np.zeros((numbers, PHASES, 1 + gates), dtype=np.int32)
        self._source_by_phase = np.zeros((numbers, PHASES, gates), dtype=np.int8)
        self._look_by_phase = np.zeros((numbers, PHASES, gates), dtype=bool)
        self._row_slots: dict[int, RowSlots] = {}
        self._history: dict[int, tuple[Plan, History]] = {}
        self._gate_count = np.zeros(numbers, dtype=np.int64)
        self._damping = np.zeros(numbers, dtype=bool)
        # By site: it acts there, it probes there, it needs the complete row there, and the rank of its change.
        shape = (numbers, len(self.sites))
        self._touches, self._probing = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
        self._needs_value, self._rank = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=np.int64)
        self._idle: NDArray[np.bool_] = np.zeros(len(self.sites), dtype=bool)
        self._no_rank: NDArray[np.int64] = np.zeros(len(self.sites), dtype=np.int64)
        self._fault: Exception | None = None
        self._spread: list[_Spread] = []
        self._reach: StepReach | None = None
        self._step_rank = self._no_rank
        self._high_water = 0
        self._end_step()

    # Life of a request ------------------------------------------------------------------------------------------

    def add(self, request_id: str, plan: Plan, prompt: Sequence[int], max_length: int) -> None:
        """Install a plan for a request with a prompt of token ids and at most `max_length` rows in all.

        Raises SteeringError where it cannot be installed exactly; nothing is held then.
        """
        if request_id in self._live:
            raise ValueError(f"request {request_id} is live already")
        number = self._free_numbers[-1]
        self._payloads.hold(plan.digests)
        live = _Live(number, plan, [], [])
        try:
            self._install_vectors(live, prompt, max_length)
            for lane, gate in enumerate(plan.gates):
                self._install_gate(live, lane, gate)
        except BaseException as error:
            self._clear(live)
            if isinstance(error, CapacityError):
                raise SteeringError("over_capacity", f"{error}. Send the request again later.") from error
            if isinstance(error, OverflowError):
                raise SteeringError("out_of_range", f"{error}. Use a smaller scale or strength.") from error
            raise
        self._prompt_length[number] = len(prompt)
        self._gate_count[number] = len(plan.gates)
        self._free_numbers.pop()
        self._live[request_id] = live

    def finish(self, request_id: str) -> None:
        """Release everything that a request held and zero its state. Unknown ids are requests without steering."""
        live = self._live.pop(request_id, None)
        if live is not None:
            self._clear(live)
            self._free_numbers.append(live.number)
        if not self._live:
            self.lanes.clear(0, self._high_water)
            self._high_water = 0

    def resume(self, request_id: str, history: History) -> None:
        """A preempted request comes back: its rows are computed again, and its gates follow their history there."""
        live = self._live.get(request_id)
        if live is not None:
            self._history[live.number] = (live.plan, history)
            self.state.restore(live.number, history.latched())

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
        for table in (
            self._prompt_length, self._slot_by_phase, self._source_by_phase, self._look_by_phase, self._gate_count,
            self._damping, self._touches, self._probing, self._needs_value, self._rank,
        ):  # fmt: skip
            table[number] = 0
        self._row_slots.pop(number, None)
        self._history.pop(number, None)
        self.gates.clear(number)
        self.state.clear(number)
        for slot in live.slots:
            self.book.release(slot)
        for entry in live.probes:
            self.probes.release(entry)
        self._payloads.release(live.plan.digests)

    def _install_vectors(self, live: _Live, prompt: Sequence[int], max_length: int) -> None:
        clauses = [vector.where for vector in live.plan.vectors]
        if not clauses:
            return
        selection = select(clauses, prompt, max_length)
        slot_of = {0: 0}
        for mask in selection.distinct():
            slot_of[mask] = self.book.acquire(live.plan.at_sites(mask))
            self._hold(live, slot_of[mask])
        exact = not all(map(is_phase_only, clauses))
        rows = RowSlots(selection, slot_of, exact=exact, device=self._device)
        self._slot_by_phase[live.number, :, 0] = rows.by_phase
        if exact:
            self._row_slots[live.number] = rows

    def _hold(self, live: _Live, slot: int) -> None:
        live.slots.append(slot)
        number = live.number
        self._touches[number] |= self.book.sites_of(slot)
        self._needs_value[number] |= self.book.needs_value(slot)
        self._rank[number] = np.maximum(self._rank[number], self.book.ranks(slot))

    def _install_gate(self, live: _Live, lane: int, gate: PlannedGate) -> None:
        number, phases = live.number, gate_phases(gate)
        if gate.apply == "add":
            vector = PlannedVector(
                algorithm="direct",
                digest=gate.steer_digest,
                scale=gate.strength,
                sites=gate.steer_sites,
                where=_EVERYWHERE,
            )
            slot = self.book.acquire(dict.fromkeys(gate.steer_sites, (vector,)), in_tables=True)
            live.slots.append(slot)
            self._touches[number] |= self.book.sites_of(slot)
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
        slots = self._slot_by_phase[request, phase]
        self._spread = [
            _Spread(number, int(first[index]), int(geometry.counts[index]), int(geometry.starts[index]))
            for index, number in enumerate(numbers.tolist())
            if number in self._row_slots
        ]
        for number, at, count, start in self._spread:
            slots[at : at + count, 0] = self._row_slots[number].rows(start, count)
        self.lanes.request[:rows] = torch.from_numpy(request)
        self.lanes.position[:rows] = torch.from_numpy(position)
        self.lanes.slot[:rows] = torch.from_numpy(slots)
        self.lanes.weight[:rows, 0] = 1.0
        self._rows, self._geometry, self._numbers = rows, geometry, numbers
        self._reach = None
        self._open_sites(numbers)
        if self.lanes.look.shape[1]:
            self._lay_gates(request, phase, first, rows)
            if self._history:
                self._lay_history(first, position)
        if self.trace is not None:
            self.trace.begin(geometry, position)

    def _open_sites(self, numbers: NDArray[np.int64]) -> None:
        """What the step's requests do at each site, on the host: an op of a site with nothing to do returns at once."""
        self._active = np.any(self._touches[numbers], axis=0)
        self._probed = np.any(self._probing[numbers], axis=0)
        self._visited = self._active | self._probed
        self._step_needs_value = np.any(self._needs_value[numbers], axis=0)
        self._step_rank = np.max(self._rank[numbers], axis=0)
        self._used_lanes = 1 + int(self._gate_count[numbers].max())
        self._attenuated = bool(self._damping[numbers].any())

    def _lay_gates(
        self, request: NDArray[np.int64], phase: NDArray[np.int64], first: NDArray[np.int64], rows: int
    ) -> None:
        source = torch.from_numpy(self._source_by_phase[request, phase])
        first_rows = np.zeros(rows, dtype=bool)
        first_rows[first] = True
        lanes = self.lanes
        lanes.look[:rows] = torch.from_numpy(self._look_by_phase[request, phase])
        lanes.weight[:rows, 1:] = self.state.weights(source, lanes.request[:rows].long(), torch.from_numpy(first_rows))
        lanes.score[:rows] = float("nan")
        lanes.fired[:rows] = False
        lanes.forced[:rows] = False

    def _lay_history(self, first: NDArray[np.int64], position: NDArray[np.int64]) -> None:
        """Let the gates of resumed requests follow their history over the rows of this step that lie within it."""
        for index, number in enumerate(self._numbers.tolist()):
            if number not in self._history:
                continue
            plan, history = self._history[number]
            at = slice(int(first[index]), int(first[index] + self._geometry.counts[index]))
            if position[at.start] > history.end:
                del self._history[number]
                continue
            within = slice(at.start, at.start + int((position[at] <= history.end).sum()))
            for lane, again in replay(plan, history, position[within]).items():
                look = self.lanes.look[within, lane]
                self.lanes.weight[within, lane + 1] = torch.from_numpy(again.weight)
                self.lanes.forced[within, lane] = torch.from_numpy(again.forced)
                self.lanes.look[within, lane] = look & torch.from_numpy(again.look | again.forced)

    def see_tokens(self, tokens: torch.Tensor) -> None:
        """Settle the static slots that depend on generated tokens; tokens [>= rows]: the step's input ids, on the
        device."""
        for number, at, count, start in self._spread:
            rows = self._row_slots[number]
            skipped = max(0, int(self._prompt_length[number]) - start)
            if not rows.depends_on_token or skipped >= count:
                continue
            place = slice(at + skipped, at + count)
            generated = self.lanes.position[place] - int(self._prompt_length[number])
            self.lanes.slot[place, 0] = rows.conditioned(generated, tokens[place].long())

    def steer(self, hidden: torch.Tensor, residual: torch.Tensor | None, site: int) -> None:
        """The op of a site: score the gates that probe here, then steer `hidden` [rows, width] in place.

        It never raises: an exception would leave the forward and end the engine. A fault is kept for `end_step`.
        """
        if not self._visited[site]:
            return
        try:
            if self._probed[site]:
                score_gates(hidden, residual, site, self._rows, self.lanes, self.gates, self.probes.rows)
            if self._active[site]:
                self._change(hidden, residual, site)
        except Exception as error:
            self._fault = error
            self._visited = self._idle

    def _change(self, hidden: torch.Tensor, residual: torch.Tensor | None, site: int) -> None:
        lanes, used = self.lanes, self._used_lanes
        if self._reach is None:
            rows = slice(0, self._rows)
            self._reach = StepReach(self.book.touches, lanes.slot[rows, :used].long(), lanes.position[rows])
        active, slots, touched, positions = self._reach.at(site)
        if not len(slots):
            return
        value = complete(hidden, residual, active) if self._step_needs_value[site] else None
        change = self.book.change(site, slots[:, 0], value, positions, int(self._step_rank[site]))
        weight = lanes.weight[active, :used]
        if self._attenuated:
            share = kept_share(active, lanes, self.gates, used).unsqueeze(1)
            weight = torch.cat((share, weight[:, 1:]), dim=1)  # not in place: it may be a view of the lanes
            change = change * share
        for lane in range(1, used):
            change = change + weight[:, lane : lane + 1] * self.book.vector_rows(site, slots[:, lane])
        changed = (hidden[active].float() + change).to(hidden.dtype)
        if not self._all_in_range(changed):
            changed = self._refuse_overflow(hidden[active], changed, slots)
        hidden[active] = changed
        if self.trace is not None:
            self.trace.record(self.sites[site], torch.arange(self._rows)[active], slots, touched, weight)

    @staticmethod
    def _in_range(rows: torch.Tensor) -> torch.Tensor:
        """Whether each row [n] is finite and leaves later layers room to add to it. float16 has none to give."""
        # NaN compares as False.
        return (rows.abs() <= _largest(rows.dtype)).all(dim=1)

    @staticmethod
    def _all_in_range(rows: torch.Tensor) -> bool:
        """Whether every row is so, in one pass over them: every steered row of every site is looked at."""
        if not rows.numel():
            return True
        low, high = rows.aminmax()
        largest = _largest(rows.dtype)
        # Both are NaN if any number is.
        return -largest <= float(low) and float(high) <= largest

    def _refuse_overflow(self, before: torch.Tensor, changed: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """Leave rows [n, width] that would leave the range as they were; fail the requests of their slots [n, lanes].

        Not only for their own sake: the keys and values of such a row would stay behind in freed KV blocks, where an
        attention that multiplies them by zero makes a neighbour's answer NaN, too.
        """
        spoiled = ~self._in_range(changed) & self._in_range(before)
        for slot in set(slots[spoiled].flatten().tolist()) - {0}:
            self.book.faults[slot] = "The steered row left the range of the model's numbers. Use smaller numbers."
        return torch.where(spoiled.unsqueeze(1), before, changed)

    def end_step(self) -> dict[str, Evidence]:
        """Advance the gates' state after the forward; return the evidence of requests that want a report.

        Raises the fault, if any, that an op of this step met. `take_fallen` tells requests whose algorithm failed.
        """
        if self._fault is not None:
            raise self._fault
        evidence: dict[str, Evidence] = {}
        if self._rows and self._used_lanes > 1:
            last = np.cumsum(self._geometry.counts) - 1
            self.state.advance(self.lanes, torch.from_numpy(last), torch.from_numpy(self._numbers))
            evidence = self._evidence(last)
        self._end_step()
        return evidence

    def take_fallen(self) -> dict[str, str]:
        """Requests whose algorithms failed since the last call, with what happened."""
        if not self.book.faults:
            return {}
        faults, self.book.faults = self.book.faults, {}
        return {
            request_id: faults[slot] for request_id, live in self._live.items() for slot in live.slots if slot in faults
        }

    def _evidence(self, last: NDArray[np.int64]) -> dict[str, Evidence]:
        wanted = [
            (index, request_id)
            for index, request_id in enumerate(self._geometry.request_ids)
            if self._numbers[index] and self._wants_evidence(request_id)
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

    def _wants_evidence(self, request_id: str) -> bool:
        plan = self._live[request_id].plan
        return plan.report != "none" or any(map(carries, plan.gates))

    def _end_step(self) -> None:
        """Between steps every site is the identity: dummy, profile and warm-up runs must see no steering."""
        self._rows = 0
        self._fault = None
        self._reach = None
        self._spread = []
        self._used_lanes = 1
        self._attenuated = False
        self._active = self._probed = self._visited = self._step_needs_value = self._idle
        self._step_rank = self._no_rank
        self._numbers = np.zeros(0, dtype=np.int64)
        self._geometry = StepGeometry([], self._numbers, self._numbers)

    def abandon_step(self) -> list[str]:
        """Give a step up after a fault of ours: no row is steered; returns the steered requests that were in it."""
        requests = [request_id for request_id in self._geometry.request_ids if request_id in self._live]
        self.book.faults.clear()
        self._end_step()
        self.lanes.clear(0, self.lanes.slot.shape[0])
        return requests


def _largest(dtype: torch.dtype) -> float:
    """The largest number that a steered row may hold."""
    largest = torch.finfo(dtype).max
    return largest if dtype == torch.float16 else largest / 16


_EVERYWHERE = Where(prompt="all", generation="all")
"""A gate's vector has no clause of its own: its lane's weight decides."""
