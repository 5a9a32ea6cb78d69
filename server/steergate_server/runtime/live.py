"""The live requests of an engine process: what each has installed, laid out by phase for the steps to read.

Every table has one row for each request number; number 0 is "no request" and stays empty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from steergate_server.graph.lanes import GateTable
from steergate_server.graph.pools import CapacityError, Pool
from steergate_server.runtime.gates import CERTAIN, added_vectors, carries, gate_bits, gate_phases
from steergate_server.runtime.payloads import PayloadCache
from steergate_server.runtime.plan import Plan, PlannedGate, SiteName, Stack
from steergate_server.runtime.rows import RowSlots
from steergate_server.runtime.selection import GENERATED, PHASES, PROMPT_END, is_phase_only, select
from steergate_server.runtime.slots import AtSites, SlotBook
from steergate_server.schema.errors import SteeringError


class LiveRequest(NamedTuple):
    """A live request: our number for it, its plan, and what it holds."""

    number: int
    plan: Plan
    slots: list[int]
    probes: list[int]


class ExactRows(NamedTuple):
    """A request's static slots where they must be laid out row by row: its own ones, and the locked default's."""

    own: RowSlots | None
    locked: RowSlots | None


class LiveRequests:
    """Installs plans and takes them down again. `lanes`: gate lanes of a request, that of the bridge included."""

    def __init__(
        self,
        numbers: int,
        lanes: int,
        site_number: dict[SiteName, int],
        book: SlotBook,
        probes: Pool,
        payloads: PayloadCache,
        device: torch.device,
    ) -> None:
        self.gates = GateTable(numbers, lanes, device)
        self._device = device
        self._site_number = site_number
        self._book = book
        self._probes = probes
        self._payloads = payloads
        self._live: dict[str, LiveRequest] = {}
        self._free_numbers = list(range(numbers - 1, 0, -1))
        self.prompt_length = np.zeros(numbers, dtype=np.int64)
        self.slot_by_phase = np.zeros((numbers, PHASES, 1 + lanes), dtype=np.int32)
        self.locked_by_phase = np.zeros((numbers, PHASES), dtype=np.int32)
        self.source_by_phase = np.zeros((numbers, PHASES, lanes), dtype=np.int8)
        self.look_by_phase = np.zeros((numbers, PHASES, lanes), dtype=bool)
        self.exact_rows: dict[int, ExactRows] = {}
        self.lane_count = np.zeros(numbers, dtype=np.int64)
        self.damping = np.zeros(numbers, dtype=bool)
        self.has_locked = np.zeros(numbers, dtype=bool)
        # Some gate's firings matter to later rows; what its gates see is wanted by the scheduler's books.
        self.carries, self.watched = np.zeros(numbers, dtype=bool), np.zeros(numbers, dtype=bool)
        self.version = 0
        """Changes with every request that comes, goes or resumes."""
        # By site: it acts there, it probes there, it needs the complete row there, and the rank of its change.
        shape = (numbers, len(site_number))
        self.touches, self.probing = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=bool)
        self.needs_value, self.rank = np.zeros(shape, dtype=bool), np.zeros(shape, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._live)

    def get(self, request_id: str) -> LiveRequest | None:
        """A live request, or None for one without steering."""
        return self._live.get(request_id)

    def numbers(self, request_ids: Sequence[str]) -> NDArray[np.int64]:
        """Our number of each request, 0 for one without steering."""
        if not self._live:
            return np.zeros(len(request_ids), dtype=np.int64)
        found = (self._live.get(request_id) for request_id in request_ids)
        return np.array([0 if live is None else live.number for live in found], dtype=np.int64)

    @property
    def gate_total(self) -> int:
        """Gates of all live requests; a bridge is none."""
        return sum(len(live.plan.gates) for live in self._live.values())

    def items(self) -> list[tuple[str, LiveRequest]]:
        """All live requests by id."""
        return list(self._live.items())

    def add(self, request_id: str, plan: Plan, prompt: Sequence[int], max_length: int) -> None:
        """Install a plan for a request with a prompt of token ids and at most `max_length` rows in all.

        Raises SteeringError where it cannot be installed exactly; nothing is held then.
        """
        if request_id in self._live:
            raise ValueError(f"request {request_id} is live already")
        number = self._free_numbers[-1]
        self._payloads.hold(plan.digests)
        live = LiveRequest(number, plan, [], [])
        try:
            self._install(live, prompt, max_length)
        except BaseException as error:
            self._clear(live)
            if isinstance(error, CapacityError):
                raise SteeringError("over_capacity", f"{error}. Send the request again later.") from error
            if isinstance(error, OverflowError):
                raise SteeringError("out_of_range", f"{error}. Use a smaller scale or strength.") from error
            raise
        self._free_numbers.pop()
        self._live[request_id] = live
        self.version += 1

    def finish(self, request_id: str) -> LiveRequest | None:
        """Release everything that a request held. Unknown ids are requests without steering."""
        live = self._live.pop(request_id, None)
        if live is not None:
            self._clear(live)
            self._free_numbers.append(live.number)
            self.version += 1
        return live

    def _clear(self, live: LiveRequest) -> None:
        number = live.number
        for table in (
            self.prompt_length, self.slot_by_phase, self.locked_by_phase, self.source_by_phase, self.look_by_phase,
            self.lane_count, self.damping, self.has_locked, self.carries, self.watched,
            self.touches, self.probing, self.needs_value, self.rank,
        ):  # fmt: skip
            table[number] = 0
        self.exact_rows.pop(number, None)
        self.gates.clear(number)
        for slot in live.slots:
            self._book.release(slot)
        for entry in live.probes:
            self._probes.release(entry)
        self._payloads.release(live.plan.digests)

    def _install(self, live: LiveRequest, prompt: Sequence[int], max_length: int) -> None:
        number, plan = live.number, live.plan
        own, locked = (self._install_stack(live, stack, prompt, max_length) for stack in plan.stacks)
        if own is not None:
            self.slot_by_phase[number, :, 0] = own.by_phase
        if locked is not None:
            self.locked_by_phase[number] = locked.by_phase
            self.has_locked[number] = True
        exact = ExactRows(own if own and own.exact else None, locked if locked and locked.exact else None)
        if exact.own or exact.locked:
            self.exact_rows[number] = exact
        for lane, gate in enumerate(plan.gates):
            self._install_gate(live, lane, gate)
        if plan.bridge:
            self._install_bridge(live, len(plan.gates))
        self.prompt_length[number] = len(prompt)
        self.lane_count[number] = len(plan.gates) + bool(plan.bridge)
        self.carries[number] = any(map(carries, plan.gates))
        self.watched[number] = self.lane_count[number] and (self.carries[number] or plan.report != "none")

    def _install_stack(
        self, live: LiveRequest, stack: Stack, prompt: Sequence[int], max_length: int
    ) -> RowSlots | None:
        clauses = stack.clauses
        if not clauses:
            return None
        selection = select(clauses, prompt, max_length)
        slot_of = {0: 0}
        for mask in selection.distinct():
            slot_of[mask] = self._book.acquire(stack.at_sites(mask))
            self._hold(live, slot_of[mask])
        return RowSlots(selection, slot_of, exact=not all(map(is_phase_only, clauses)), device=self._device)

    def _hold(self, live: LiveRequest, slot: int) -> None:
        live.slots.append(slot)
        number = live.number
        self.touches[number] |= self._book.sites_of(slot)
        self.needs_value[number] |= self._book.needs_value(slot)
        self.rank[number] = np.maximum(self.rank[number], self._book.ranks(slot))

    def _install_gate(self, live: LiveRequest, lane: int, gate: PlannedGate) -> None:
        number, phases = live.number, gate_phases(gate)
        if gate.apply == "add":
            self._add_vectors(live, lane, phases.reach, added_vectors([gate]))
        elif gate.apply == "attenuate":
            self._attenuate(number, lane, gate.keep)
        self.source_by_phase[number, :, lane] = phases.source
        self.look_by_phase[number, :, lane] = phases.look
        if gate.when == "probe":
            self._install_probe(live, lane, gate)

    def _install_bridge(self, live: LiveRequest, lane: int) -> None:
        """What earlier turns latched acts at every answer row: all additions in one slot, all attenuations in one
        factor."""
        number, phases = live.number, [PROMPT_END, GENERATED]
        adding = [gate for gate in live.plan.bridge if gate.apply == "add"]
        if adding:
            self._add_vectors(live, lane, phases, added_vectors(adding))
        kept = math.prod(gate.keep for gate in live.plan.bridge if gate.apply == "attenuate")
        if kept != 1.0:
            self._attenuate(number, lane, kept)
        self.source_by_phase[number, phases, lane] = CERTAIN

    def _add_vectors(self, live: LiveRequest, lane: int, phases: list[int], at_sites: AtSites) -> None:
        slot = self._book.acquire(at_sites, in_tables=True)
        live.slots.append(slot)
        self.touches[live.number] |= self._book.sites_of(slot)
        self.slot_by_phase[live.number, phases, lane + 1] = slot

    def _attenuate(self, number: int, lane: int, keep: float) -> None:
        self.gates.damp[number, lane] = 1.0 - keep
        self.damping[number] = True

    def _install_probe(self, live: LiveRequest, lane: int, gate: PlannedGate) -> None:
        assert gate.probe_digest is not None
        assert gate.probe_site is not None
        digest, name = gate.probe_digest, gate.probe_site
        entry = self._probes.acquire((digest, name), lambda: self._payloads.row(digest, name))
        live.probes.append(entry)
        number, site = live.number, self._site_number[name]
        self.probing[number, site] = True
        self.gates.site[number, lane] = site
        self.gates.probe[number, lane] = entry
        self.gates.threshold[number, lane] = gate.threshold
        self.gates.sharpness[number, lane] = min(gate.sharpness, torch.finfo(torch.float32).max)
        self.gates.mode[number, lane] = gate_bits(gate)
