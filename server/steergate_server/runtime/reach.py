"""Which rows of a step anything acts on, looked up once for all sites: slots are settled before the first op."""

from __future__ import annotations

from typing import NamedTuple

import torch

from steergate_server.graph.tables import RouterTables, SiteTables


class Reach(NamedTuple):
    """The rows at which anything acts at a site, a slice where it is all of them; and theirs: slots and whether each
    acts [n, lanes], and by lane the pool entries [n] of what the slots add there (none at a router)."""

    rows: torch.Tensor | slice
    slots: torch.Tensor
    touched: torch.Tensor
    entries: tuple[torch.Tensor, ...]


class StepReach:
    """The reach of every site in one step.

    touches [sites, slots] bool: whether a slot acts at a site. slots [rows, lanes] int64: of the step's rows.
    """

    def __init__(self, touches: torch.Tensor, slots: torch.Tensor) -> None:
        self._slots = slots
        self._touched = touches.index_select(1, slots.flatten()).view(-1, *slots.shape)
        self._acts = self._touched.any(dim=2)
        self._everywhere: list[bool] = self._acts.all(dim=1).tolist()
        self._found: dict[int, Reach] = {}

    def at(self, site: int, tables: SiteTables | RouterTables, local: int) -> Reach:
        """The rows of a site; tables, local: where it stands in them. Looked up once."""
        found = self._found.get(site)
        if found is None:
            found = self._found[site] = self._look_up(site, tables, local)
        return found

    def _look_up(self, site: int, tables: SiteTables | RouterTables, local: int) -> Reach:
        rows: torch.Tensor | slice = slice(0, len(self._slots))
        slots, touched = self._slots, self._touched[site]
        if not self._everywhere[site]:
            rows = self._acts[site].nonzero(as_tuple=True)[0]
            slots, touched = slots.index_select(0, rows), touched.index_select(0, rows)
        if isinstance(tables, RouterTables):
            return Reach(rows, slots, touched, ())
        by_lane = slots.t().flatten()
        entries = tables.bias[local].index_select(0, by_lane).view(slots.shape[1], -1).unbind(0)
        return Reach(rows, slots, touched, entries)
