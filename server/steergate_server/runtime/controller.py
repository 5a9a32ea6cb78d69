"""The controller of one engine process: admits plans, lays each step's steering out, and answers the ops of its sites.

It knows nothing of vLLM. A runner tells it which requests were added and finished, the geometry of each step, and when
the forward is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from steergate_server.graph.lanes import Lanes
from steergate_server.graph.pools import Pool
from steergate_server.registry.spool import Spool
from steergate_server.runtime.config import EngineConfig
from steergate_server.runtime.gates import GateState, sources_of
from steergate_server.runtime.geometry import StepGeometry
from steergate_server.runtime.history import History, replay
from steergate_server.runtime.live import LiveRequests
from steergate_server.runtime.payloads import PayloadCache
from steergate_server.runtime.plan import Plan
from steergate_server.runtime.sites import Site
from steergate_server.runtime.slots import SlotBook
from steergate_server.runtime.step import StepLayout
from steergate_server.runtime.torch_op import TorchOp
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
        self._op = TorchOp(self.sites, self.book, self.lanes, self.gates, self.probes, self.trace)
        self._device_op = self._build_device_op() if device.type == "cuda" and self.book.in_graph else None
        self._history: dict[int, tuple[Plan, History]] = {}
        self._fault: Exception | None = None
        self._geometry = _NO_ROWS
        # The layout of the step at hand, None between steps; and that of the last one, if the next may go on with it.
        self._step: StepLayout | None = None
        self._layout: StepLayout | None = None
        self._gates_laid = False
        self._high_water = 0

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
            self._layout = None
            self._history.pop(live.number, None)
            self.state.clear(live.number)
        if not self._live:
            self.lanes.clear(0, self._high_water)
            self._high_water = 0

    def resume(self, request_id: str, history: History) -> None:
        """A preempted request comes back: its rows are computed again, and its gates follow their history there."""
        live = self._live.get(request_id)
        if live is not None:
            self._live.version += 1
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
        """Lay out the lanes of a step. Nothing of an earlier step is left in them that an op would go by."""
        # Also where the step before was never ended.
        self._end_step()
        # First of all: whoever abandons a step that could not be laid out must know whose it was.
        self._geometry = geometry
        layout, self._layout = self._layout, None
        if layout is not None and layout.goes_on_as(geometry, self._live):
            layout.position = geometry.starts
            self.lanes.position[: layout.rows] = torch.from_numpy(geometry.starts)
        else:
            layout = self._lay_out(geometry)
            if layout is None:
                return
        if layout.sources is not None:
            self.lanes.weight[: layout.rows, 1:] = self.state.weights(layout.sources)
        layout.replays = bool(self._history)
        if layout.replays:
            self._lay_history(layout)
        else:
            self._layout = layout
        if self._device_op is not None:
            self._device_op.open(layout.rows)
        if self.trace is not None:
            self.trace.begin(geometry, layout.position)
        self._step = layout

    def _lay_out(self, geometry: StepGeometry) -> StepLayout | None:
        """Write the lanes of a step that does not simply go on; None where nothing in it is steered."""
        numbers = self._live.numbers(geometry.request_ids)
        rows = geometry.rows if numbers.any() else 0
        self.lanes.clear(rows, self._high_water)
        self._high_water = rows
        if not rows:
            return None
        layout, lanes = StepLayout(geometry, numbers, self._live, self._device), self.lanes
        self._lay_slots(layout)
        lanes.request[:rows] = torch.from_numpy(layout.request)
        lanes.position[:rows] = torch.from_numpy(layout.position)
        lanes.weight[:rows, 0] = 1.0
        # Also in the step after the last gate: nothing of it may be left in the lanes.
        if layout.used_lanes > 1 or self._gates_laid:
            self._gates_laid = layout.used_lanes > 1
            self._lay_gates(layout)
        return layout

    def _lay_slots(self, layout: StepLayout) -> None:
        """Lay out the slots of the step's rows, from the tables by phase and from the rows of exact clauses."""
        live, rows = self._live, layout.rows
        slots = live.slot_by_phase[layout.request, layout.phase]
        locked = live.locked_by_phase[layout.request, layout.phase]
        for number, at, count, start in layout.spread:
            exact = live.exact_rows[number]
            if exact.own is not None:
                slots[at : at + count, 0] = exact.own.rows(start, count)
            if exact.locked is not None:
                locked[at : at + count] = exact.locked.rows(start, count)
        self.lanes.slot[:rows] = torch.from_numpy(slots)
        self.lanes.locked[:rows] = torch.from_numpy(locked)

    def _lay_gates(self, layout: StepLayout) -> None:
        lanes, rows = self.lanes, layout.rows
        if layout.used_lanes > 1:
            source = self._live.source_by_phase[layout.request, layout.phase]
            layout.sources = sources_of(source, layout.request, layout.first, self._device)
        lanes.weight[:rows, 1:] = 0.0
        lanes.look[:rows] = torch.from_numpy(self._live.look_by_phase[layout.request, layout.phase])
        lanes.score[:rows] = float("nan")
        lanes.fired[:rows] = False
        lanes.forced[:rows] = False

    def _lay_history(self, layout: StepLayout) -> None:
        """Let the gates of resumed requests follow their history over the rows of this step that lie within it."""
        position = layout.position
        for index, number in enumerate(layout.numbers.tolist()):
            if number not in self._history:
                continue
            plan, history = self._history[number]
            at = slice(int(layout.first[index]), int(layout.first[index] + self._geometry.counts[index]))
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
        for number, at, count, start in self._step.spread if self._step is not None else ():
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
        step = self._step
        if step is None or not step.visited[site]:
            return
        try:
            self._op.steer(step, hidden, residual, site)
        except Exception as error:
            self._fault = error
            self._step = None

    def _steer_on_device(
        self, device_op: TritonOp, hidden: torch.Tensor, residual: torch.Tensor | None, site: int
    ) -> None:
        try:
            device_op.steer(hidden, residual, site)
        except Exception as error:
            # Between steps graphs are captured: one without the op would replay unsteered for ever.
            if self._step is None:
                raise
            self._fault = error

    def end_step(self) -> dict[str, list[Evidence]]:
        """Advance the gates' state after the forward; return the evidence of requests that want a report.

        Raises the fault, if any, that an op of this step met. `take_fallen` tells requests whose algorithm failed.
        """
        if self._fault is not None:
            raise self._fault
        evidence: dict[str, list[Evidence]] = {}
        step = self._step
        if step is not None and step.carries:
            self.state.advance(self.lanes, step.last, step.last_request)
        if step is not None and step.watched:
            evidence = self._evidence(step)
        self._end_step()
        return evidence

    def take_fallen(self) -> dict[str, str]:
        """Requests whose steering failed since the last call, with what happened."""
        if self._device_op is not None:
            self.book.faults |= dict.fromkeys(self._device_op.take_faults(), _OUT_OF_RANGE)
        if not self.book.faults and not self._op.spoiled:
            return {}
        faults, self.book.faults = self.book.faults, {}
        spoiled, self._op.spoiled = self._op.spoiled, set()
        fallen = {}
        for request_id, live in self._live.items():
            if live.number in spoiled:
                fallen[request_id] = _OUT_OF_RANGE
            for slot in live.slots:
                if slot in faults:
                    fallen[request_id] = faults[slot]
        return fallen

    def _evidence(self, step: StepLayout) -> dict[str, list[Evidence]]:
        """By watched request, what its gates saw at the rows that may produce a token: its last one, and before that as
        many as it has drafts."""
        drafts = self._geometry.drafts
        wanted = [(request_id, end, drafts.get(request_id, 0)) for request_id, end in step.watched]
        at = [row for _, end, before in wanted for row in range(end - before, end + 1)]
        rows = torch.tensor(at, device=self._device)
        lanes = self.lanes
        columns = (lanes.position, lanes.look, lanes.score, lanes.fired, lanes.weight[:, 1:])
        seen = iter(zip(*(column.index_select(0, rows).tolist() for column in columns), strict=True))
        return {request_id: [Evidence(*next(seen)) for _ in range(before + 1)] for request_id, _, before in wanted}

    def _end_step(self) -> None:
        """Between steps every site is the identity: dummy, profile and warm-up runs must see no steering."""
        if self._device_op is not None:
            self._device_op.open(0)
        self._step = self._fault = None
        self._geometry = _NO_ROWS

    def abandon_step(self) -> list[str]:
        """Give a step up after a fault of ours: no row is steered; returns the steered requests that were in it."""
        requests = [name for name in self._geometry.request_ids if self._live.get(name) is not None]
        self.take_fallen()
        self._end_step()
        self._layout = None
        self.lanes.clear(0, self.lanes.slot.shape[0])
        return requests


_NO_ROWS = StepGeometry([], np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64))

_OUT_OF_RANGE = "The steered row left the range of the model's numbers. Use smaller numbers."
