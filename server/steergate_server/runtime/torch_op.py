"""The op of a site in PyTorch. It goes by what the host knows of the step (step.py) and skips what nobody asks for;
the op for CUDA (graph/triton_op.py) must not."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from steergate_server.graph.kernels import (
    all_in_range,
    complete,
    in_range,
    kept_share,
    looks_by_site,
    rows_of,
    score_gates,
)
from steergate_server.graph.lanes import GateTable, Lanes
from steergate_server.graph.pools import Pool
from steergate_server.runtime.reach import Reach, StepReach
from steergate_server.runtime.sites import Site
from steergate_server.runtime.slots import SlotBook
from steergate_server.runtime.step import StepLayout
from steergate_server.runtime.trace import Trace


class TorchOp:
    """Steers the sites of one engine process. `trace` takes down what was applied, if it is wanted."""

    def __init__(
        self,
        sites: Sequence[Site],
        book: SlotBook,
        lanes: Lanes,
        gates: GateTable,
        probes: Pool,
        trace: Trace | None,
    ) -> None:
        self._sites = sites
        self._book, self._lanes, self._gates, self._probes, self._trace = book, lanes, gates, probes, trace
        self.spoiled: set[int] = set()
        """Numbers of the requests that had a row which would have left the range and was left as it was."""

    def steer(self, step: StepLayout, hidden: torch.Tensor, residual: torch.Tensor | None, site: int) -> None:
        """Score the gates that probe at a site, then steer `hidden` [rows, width] in place."""
        if step.probed[site]:
            self._probe(step, hidden, residual, site)
        if step.active[site]:
            self._change(step, hidden, residual, site)

    def _probe(self, step: StepLayout, hidden: torch.Tensor, residual: torch.Tensor | None, site: int) -> None:
        if step.looks is None:
            step.looks = looks_by_site(step.rows, self._lanes, self._gates)
        looks = step.looks.get(site)
        if looks is not None:
            (probes,) = step.gathered("probes", site, lambda: [self._probes.rows.index_select(0, looks.probe)])
            score_gates(hidden, residual, looks, self._lanes, probes, forced=step.replays)

    def _change(self, step: StepLayout, hidden: torch.Tensor, residual: torch.Tensor | None, site: int) -> None:
        reach = self._reach(step, site)
        rows = reach.rows
        if not len(reach.slots):
            return
        before = rows_of(hidden, rows)
        weight = self._weights(step, rows)
        if step.needs_value[site]:
            change = self._computed_change(step, site, complete(hidden, residual, rows), reach, weight)
        else:
            change = self._added_change(step, site, reach, weight)
        changed = (before + change).to(hidden.dtype)
        if not all_in_range(changed):
            changed = self._refuse_overflow(before, changed, rows)
        if isinstance(rows, slice):
            before.copy_(changed)
        else:
            hidden.index_copy_(0, rows, changed)
        if self._trace is not None:
            self._record(self._trace, step, site, reach, weight)

    def _weights(self, step: StepLayout, rows: torch.Tensor | slice) -> torch.Tensor | None:
        """What each lane of the rows counts for [n, lanes]; None where there are no gates, so that static steering
        counts in full. Not to be written to."""
        if step.used_lanes == 1:
            return None
        weight = rows_of(self._lanes.weight, rows)[:, : step.used_lanes]
        if not step.attenuated:
            return weight
        return torch.cat((kept_share(rows, self._lanes, self._gates, step.used_lanes), weight[:, 1:]), dim=1)

    def _added_change(self, step: StepLayout, site: int, reach: Reach, weight: torch.Tensor | None) -> torch.Tensor:
        """The change [n, width] float32 where every slot is no more than a bias. Not to be written to."""
        added = step.gathered("added", site, lambda: [self._book.added(site, lane) for lane in reach.entries])
        change = _gated(step, added[0], added[1 : step.used_lanes], weight)
        return change + added[-1] if step.locked else change

    def _computed_change(
        self, step: StepLayout, site: int, value: torch.Tensor, reach: Reach, weight: torch.Tensor | None
    ) -> torch.Tensor:
        """The change [n, width] float32 where a static one depends on the complete rows `value` [n, width]."""
        book, used, rank = self._book, step.used_lanes, step.rank[site]
        positions = rows_of(self._lanes.position, reach.rows)
        # At a router there are no entries: gates' vectors do not act there.
        added = step.gathered("added", site, lambda: [book.added(site, lane) for lane in reach.entries[1:used]])
        change = _gated(step, book.change(site, reach.slots[:, 0], value, positions, rank), added, weight)
        if not step.locked:
            return change
        return change + book.change(site, reach.slots[:, used], value + change, positions, rank)

    def _record(self, trace: Trace, step: StepLayout, site: int, reach: Reach, weight: torch.Tensor | None) -> None:
        if weight is None:
            weight = torch.ones(len(reach.slots), 1)
        weight = torch.nn.functional.pad(weight, (0, int(step.locked)), value=1.0)
        trace.record(self._sites[site], torch.arange(step.rows)[reach.rows], reach.slots, reach.touched, weight)

    def _reach(self, step: StepLayout, site: int) -> Reach:
        if step.reach is None:
            slots = self._lanes.slot[: step.rows, : step.used_lanes].long()
            if step.locked:
                slots = torch.cat((slots, self._lanes.locked[: step.rows].long().unsqueeze(1)), dim=1)
            step.reach = StepReach(self._book.touches, slots)
        return step.reach.at(site, *self._book.places[site])

    def _refuse_overflow(self, before: torch.Tensor, changed: torch.Tensor, rows: torch.Tensor | slice) -> torch.Tensor:
        """Leave values [n, width] that would leave the range as they were; fail the requests of those rows [n].

        Not only for their own sake: the keys and values of such a row would stay behind in freed KV blocks, where an
        attention that multiplies them by zero makes a neighbour's answer NaN, too.
        """
        spoiled = ~in_range(changed) & in_range(before)
        self.spoiled.update(self._lanes.request[rows][spoiled].tolist())
        return torch.where(spoiled.unsqueeze(1), before, changed)


def _gated(
    step: StepLayout, static: torch.Tensor, added: Sequence[torch.Tensor], weight: torch.Tensor | None
) -> torch.Tensor:
    """A static change [n, width], times what gates leave of it, and what they add: a row [n, width] for each lane."""
    if weight is None:
        return static
    change = static * weight[:, :1] if step.attenuated else static
    for lane, rows in enumerate(added, start=1):
        change = torch.addcmul(change, rows, weight[:, lane : lane + 1])
    return change
