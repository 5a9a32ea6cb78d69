"""Which rows of a step anything acts on, looked up once for all sites: slots are settled before the first op."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Reach(NamedTuple):
    """The rows at which anything acts at a site, a slice where it is all of them; and theirs: slots and whether each
    acts [n, lanes], absolute positions [n]."""

    rows: torch.Tensor | slice
    slots: torch.Tensor
    touched: torch.Tensor
    positions: torch.Tensor


class StepReach:
    """The reach of every site in one step.

    touches [sites, slots] bool: whether a slot acts at a site. slots [rows, lanes] int64 and positions [rows]: of the
    step's rows.
    """

    def __init__(self, touches: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor) -> None:
        self._slots, self._positions = slots, positions
        self._touched = touches[:, slots]
        self._acts = self._touched.any(dim=2)
        self._everywhere: list[bool] = self._acts.all(dim=1).tolist()

    def at(self, site: int) -> Reach:
        """The rows of a site. Where they are all rows, nothing is copied: what is read through the slice is a view."""
        touched = self._touched[site]
        if self._everywhere[site]:
            return Reach(slice(0, len(self._slots)), self._slots, touched, self._positions)
        rows = self._acts[site].nonzero(as_tuple=True)[0]
        return Reach(rows, self._slots[rows], touched[rows], self._positions[rows])
