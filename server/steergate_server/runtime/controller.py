"""The controller of one engine process: admits plans, lays each step's steering out, and answers the ops of its sites.

It knows nothing of vLLM. A runner tells it which requests were added and finished, the geometry of each step, and when
the forward is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from steergate_server.graph.kernels import (
    Looks,
    all_in_range,
    complete,
    in_range,
    kept_share,
    looks_by_site,
    score_gates,
)
from steergate_server.graph.lanes import Lanes
from steergate_server.graph.pools import Pool
from steergate_server.registry.spool import Spool
from steergate_server.runtime.config import EngineConfig
from steergate_server.runtime.gates import GateState, carries
from steergate_server.runtime.geometry import StepGeometry
from steergate_server.runtime.history import History, replay
from steergate_server.runtime.live import LiveRequests
from steergate_server.runtime.payloads import PayloadCache
from steergate_server.runtime.plan import Plan
from steergate_server.runtime.reach import StepReach
from steergate_server.runtime.sites import Site
from steergate_server.runtime.slots import SlotBook
from steergate_server.runtime.trace import Trace
from steergate_server.schema.hooks import PROBED_HOOKS

if TYPE_CHECKING:
    from steergate_server.graph.triton_op import TritonOp


class Evidence(NamedTuple):
    """What one request's gates saw at one row of a step: absolute position, and by gate whether it looked,
    its score (NaN for none), whether it fired, and the weight it ended with."""

    position: int
    looked: list[bool]
    scores: list[float]
    fired: list[bool]
    weights: list[float]


class _Spread(NamedTuple):
    """A request of the step whose static slots are laid out row by row: its rows' place, and where they start."""

    number: int
    at: int
    length: int
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
        self._payloads = PayloadCache(spool)
        # One lane more than gates: that of what earlier turns latched.
        lanes = config.max_gates + 1 if config.gates else 0
        # One number more than requests that run: one may be added in the step that learns of another's end.
        numbers = 2 * max_requests + 1
        self.book = SlotBook(config, sites, self._payloads, config.max_slots or 4 * max_requests, dtype, device)
        # Probes read the residual stream; heads and experts may be wider than it.
        width = max((site.width for site in sites if site.hook in PROBED_HOOKS), default=1)
        self.probes = Pool(1 + numbers * max(lanes - 1, 1), width, torch.float32, device)
        self.lanes = Lanes(max_rows, lanes, device)
        site_number = {(site.hook, site.layer): number for number, site in enumerate(self.sites)}
        self._live = LiveRequests(numbers, lanes, site_number, self.book, self.probes, self._payloads, device)
        self.gates = self._live.gates
        self.state = GateState(numbers, lanes, device)
        self.trace = Trace() if config.trace else None
        self._device_op = self._build_device_op() if device.type == "cuda" and self.book.in_graph else None
        self._history: dict[int, tuple[Plan, History]] = {}
        # Requests whose rows left the range in this step, by number, with what happened.
        self._spoiled: dict[int, str] = {}
        self._idle: NDArray[np.bool_] = np.zeros(len(self.sites), dtype=bool)
        self._no_rank: NDArray[np.int64] = np.zeros(len(self.sites), dtype=np.int64)
        self._fault: Exception | None = None
        self._spread: list[_Spread] = []
        self._reach: StepReach | None = None
        self._looks: dict[int, Looks] | None = None
        self._gates_laid = False
        self._step_rank = self._no_rank
        self._high_water = 0
        self._end_step()

    def _build_device_op(self) -> TritonOp:
        # Needs Triton, which an engine on CPU does without.
        from steergate_server.graph.triton_op import TritonOp

        if self.trace is not None:
            raise ValueError("`trace` records what the op on CPU does; the op on CUDA keeps no record. Switch it off.")
        return TritonOp(
            self.book.places, self.book.touches, self.lanes, self.gates, self.probes.rows, self.lanes.locked
        )

    # Life of a request ------------------------------------------------------------------------------------------

    def add(self, request_id: str, plan: Plan, prompt: Sequence[int], max_length: int) -> None:
        """Install a plan for a request with a prompt of token ids and at most `max_length` rows in all.

        Raises SteeringError where it cannot be installed exactly; nothing is held then.
        """
        self._live.add(request_id, plan, prompt, max_length)

    def finish(self, request_id: str) -> None:
        """Release everything that a request held and zero its state. Unknown ids are requests without steering."""
        live = self._live.finish(request_id)
        if live is not None:
            self._history.pop(live.number, None)
            self.state.clear(live.number)
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
    def gates_installed(self) -> int:
        """Gates of the live requests."""
        return self._live.gate_total

    @property
    def payloads_held(self) -> int:
        """Payloads that are in memory for live requests."""
        return self._payloads.held

    def lanes_nonzero(self) -> int:
        """How many lane slots, looks and request numbers are not zero; 0 when nothing is left of any request."""
        lanes = self.lanes
        tensors = (lanes.slot, lanes.locked, lanes.look, lanes.request, self.state.latched, self.state.fired_last)
        return sum(int(tensor.count_nonzero()) for tensor in tensors)

    # A step -----------------------------------------------------------------------------------------------------

    def begin_step(self, geometry: StepGeometry) -> None:
        """Lay out the lanes of a step. Nothing of an earlier step is left in them."""
        # First of all: whoever abandons a step that could not be laid out must know whose it was.
        self._geometry = geometry
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
        end = self._live.prompt_length[request] - 1
        phase = (position >= end).astype(np.int64) + (position > end)
        self._rows, self._geometry, self._numbers = rows, geometry, numbers
        self._lay_slots(request, phase, first)
        self.lanes.request[:rows] = torch.from_numpy(request)
        self.lanes.position[:rows] = torch.from_numpy(position)
        self.lanes.weight[:rows, 0] = 1.0
        self._reach = self._looks = None
        self._open_sites(numbers)
        if self._device_op is not None:
            self._device_op.open(rows)
        # Also in the step after the last gate: nothing of it may be left in the lanes.
        if self._used_lanes > 1 or self._gates_laid:
            self._gates_laid = self._used_lanes > 1
            self._lay_gates(request, phase, first, rows)
            if self._history:
                self._lay_history(first, position)
        if self.trace is not None:
            self.trace.begin(geometry, position)

    def _lay_slots(self, request: NDArray[np.int64], phase: NDArray[np.int64], first: NDArray[np.int64]) -> None:
        """Lay out the slots of the step's rows, from the tables by phase and from the rows of exact clauses."""
        live, geometry, rows = self._live, self._geometry, self._rows
        slots, locked = live.slot_by_phase[request, phase], live.locked_by_phase[request, phase]
        self._spread = [
            _Spread(number, int(first[index]), int(geometry.counts[index]), int(geometry.starts[index]))
            for index, number in enumerate(self._numbers.tolist())
            if number in live.exact_rows
        ]
        for number, at, count, start in self._spread:
            exact = live.exact_rows[number]
            if exact.own is not None:
                slots[at : at + count, 0] = exact.own.rows(start, count)
            if exact.locked is not None:
                locked[at : at + count] = exact.locked.rows(start, count)
        self.lanes.slot[:rows] = torch.from_numpy(slots)
        self.lanes.locked[:rows] = torch.from_numpy(locked)

    def _open_sites(self, numbers: NDArray[np.int64]) -> None:
        """What the step's requests do at each site, on the host: an op of a site with nothing to do returns at once."""
        live = self._live
        self._active = np.any(live.touches[numbers], axis=0)
        self._probed = np.any(live.probing[numbers], axis=0)
        self._visited = self._active | self._probed
        self._step_needs_value = np.any(live.needs_value[numbers], axis=0)
        self._step_rank = np.max(live.rank[numbers], axis=0)
        self._used_lanes = 1 + int(live.lane_count[numbers].max())
        self._attenuated = bool(live.damping[numbers].any())
        self._locked = bool(live.has_locked[numbers].any())

    def _lay_gates(
        self, request: NDArray[np.int64], phase: NDArray[np.int64], first: NDArray[np.int64], rows: int
    ) -> None:
        source = torch.from_numpy(self._live.source_by_phase[request, phase])
        first_rows = np.zeros(rows, dtype=bool)
        first_rows[first] = True
        lanes = self.lanes
        lanes.look[:rows] = torch.from_numpy(self._live.look_by_phase[request, phase])
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
                seen = torch.from_numpy(again.look | again.forced).to(self._device)
                self.lanes.weight[within, lane + 1] = torch.from_numpy(again.weight)
                self.lanes.forced[within, lane] = torch.from_numpy(again.forced)
                self.lanes.look[within, lane] &= seen

    def see_tokens(self, tokens: torch.Tensor) -> None:
        """Settle the static slots that depend on generated tokens; tokens [>= rows]: the step's input ids, on the
        device."""
        for number, at, count, start in self._spread:
            length = int(self._live.prompt_length[number])
            skipped = max(0, length - start)
            if skipped >= count:
                continue
            place = slice(at + skipped, at + count)
            generated = self.lanes.position[place] - length
            exact = self._live.exact_rows[number]
            for rows, slots in ((exact.own, self.lanes.slot[:, 0]), (exact.locked, self.lanes.locked)):
                if rows is not None and rows.depends_on_token:
                    slots[place] = rows.conditioned(generated, tokens[place].long())

    def steer(self, hidden: torch.Tensor, residual: torch.Tensor | None, site: int) -> None:
        """The op of a site: score the gates that probe here, then steer `hidden` [rows, width] in place.

        It never raises: an exception would leave the forward and end the engine. A fault is kept for `end_step`.
        """
        if self._device_op is not None:
            self._steer_on_device(self._device_op, hidden, residual, site)
            return
        if not self._visited[site]:
            return
        try:
            if self._probed[site]:
                self._probe(hidden, residual, site)
            if self._active[site]:
                self._change(hidden, residual, site)
        except Exception as error:
            self._fault = error
            self._visited = self._idle

    def _probe(self, hidden: torch.Tensor, residual: torch.Tensor | None, site: int) -> None:
        if self._looks is None:
            self._looks = looks_by_site(self._rows, self.lanes, self.gates)
        looks = self._looks.get(site)
        if looks is not None:
            score_gates(hidden, residual, looks, self.lanes, self.probes.rows)

    def _steer_on_device(
        self, device_op: TritonOp, hidden: torch.Tensor, residual: torch.Tensor | None, site: int
    ) -> None:
        try:
            device_op.steer(hidden, residual, site)
        except Exception as error:
            # Between steps graphs are captured: one without the op would replay unsteered for ever.
            if not self._rows:
                raise
            self._fault = error

    def _change(self, hidden: torch.Tensor, residual: torch.Tensor | None, site: int) -> None:
        lanes, used = self.lanes, self._used_lanes
        if self._reach is None:
            slots = lanes.slot[: self._rows, :used].long()
            if self._locked:
                slots = torch.cat((slots, lanes.locked[: self._rows].long().unsqueeze(1)), dim=1)
            self._reach = StepReach(self.book.touches, slots, lanes.position[: self._rows])
        active, slots, touched, positions = self._reach.at(site)
        if not len(slots):
            return
        value = complete(hidden, residual, active) if self._step_needs_value[site] else None
        rank = int(self._step_rank[site])
        change = self.book.change(site, slots[:, 0], value, positions, rank)
        weight = lanes.weight[active, :used]
        if self._attenuated:
            share = kept_share(active, lanes, self.gates, used).unsqueeze(1)
            weight = torch.cat((share, weight[:, 1:]), dim=1)  # not in place: it may be a view of the lanes
            change = change * share
        for lane in range(1, used) if self.book.takes_vectors(site) else ():
            change = change + weight[:, lane : lane + 1] * self.book.vector_rows(site, slots[:, lane])
        if self._locked:
            so_far = None if value is None else value + change
            change = change + self.book.change(site, slots[:, used], so_far, positions, rank)
            weight = torch.nn.functional.pad(weight, (0, 1), value=1.0)
        changed = (hidden[active].float() + change).to(hidden.dtype)
        if not all_in_range(changed):
            changed = self._refuse_overflow(hidden[active], changed, active)
        hidden[active] = changed
        if self.trace is not None:
            self.trace.record(self.sites[site], torch.arange(self._rows)[active], slots, touched, weight)

    def _refuse_overflow(self, before: torch.Tensor, changed: torch.Tensor, rows: torch.Tensor | slice) -> torch.Tensor:
        """Leave values [n, width] that would leave the range as they were; fail the requests of those rows [n].

        Not only for their own sake: the keys and values of such a row would stay behind in freed KV blocks, where an
        attention that multiplies them by zero makes a neighbour's answer NaN, too.
        """
        spoiled = ~in_range(changed) & in_range(before)
        for number in set(self.lanes.request[rows][spoiled].tolist()):
            self._spoiled[number] = _OUT_OF_RANGE
        return torch.where(spoiled.unsqueeze(1), before, changed)

    def end_step(self) -> dict[str, list[Evidence]]:
        """Advance the gates' state after the forward; return the evidence of requests that want a report.

        Raises the fault, if any, that an op of this step met. `take_fallen` tells requests whose algorithm failed.
        """
        if self._fault is not None:
            raise self._fault
        evidence: dict[str, list[Evidence]] = {}
        if self._rows and self._used_lanes > 1:
            last = np.cumsum(self._geometry.counts) - 1
            self.state.advance(self.lanes, torch.from_numpy(last), torch.from_numpy(self._numbers))
            evidence = self._evidence(last)
        self._end_step()
        return evidence

    def take_fallen(self) -> dict[str, str]:
        """Requests whose steering failed since the last call, with what happened."""
        if self._device_op is not None:
            self.book.faults |= dict.fromkeys(self._device_op.take_faults(), _OUT_OF_RANGE)
        if not self.book.faults and not self._spoiled:
            return {}
        faults, self.book.faults = self.book.faults, {}
        spoiled, self._spoiled = self._spoiled, {}
        fallen = {}
        for request_id, live in self._live.items():
            if live.number in spoiled:
                fallen[request_id] = spoiled[live.number]
            for slot in live.slots:
                if slot in faults:
                    fallen[request_id] = faults[slot]
        return fallen

    def _evidence(self, last: NDArray[np.int64]) -> dict[str, list[Evidence]]:
        """By request, what its gates saw at the rows that may produce a token: its last one, and before that as many
        as it has drafts."""
        geometry = self._geometry
        wanted = [
            (request_id, int(last[index]), geometry.drafts.get(request_id, 0))
            for index, request_id in enumerate(geometry.request_ids)
            if self._numbers[index] and self._wants_evidence(request_id)
        ]
        if not wanted:
            return {}
        lanes = self.lanes
        rows = torch.tensor([row for _, end, drafts in wanted for row in range(end - drafts, end + 1)])
        columns = (lanes.position, lanes.look, lanes.score, lanes.fired, lanes.weight[:, 1:])
        seen = iter(zip(*(column[rows].tolist() for column in columns), strict=True))
        return {request_id: [Evidence(*next(seen)) for _ in range(drafts + 1)] for request_id, _, drafts in wanted}

    def _wants_evidence(self, request_id: str) -> bool:
        live = self._live.get(request_id)
        return live is not None and (live.plan.report != "none" or any(map(carries, live.plan.gates)))

    def _end_step(self) -> None:
        """Between steps every site is the identity: dummy, profile and warm-up runs must see no steering."""
        self._rows = 0
        if self._device_op is not None:
            self._device_op.open(0)
        self._fault = None
        self._reach = self._looks = None
        self._spread = []
        self._used_lanes = 1
        self._attenuated = self._locked = False
        self._active = self._probed = self._visited = self._step_needs_value = self._idle
        self._step_rank = self._no_rank
        self._numbers = np.zeros(0, dtype=np.int64)
        self._geometry = StepGeometry([], self._numbers, self._numbers)

    def abandon_step(self) -> list[str]:
        """Give a step up after a fault of ours: no row is steered; returns the steered requests that were in it."""
        requests = [name for name in self._geometry.request_ids if self._live.get(name) is not None]
        self.take_fallen()
        self._end_step()
        self.lanes.clear(0, self.lanes.slot.shape[0])
        return requests


_OUT_OF_RANGE = "The steered row left the range of the model's numbers. Use smaller numbers."
