"""A test aid: what was applied, by step and site."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from steergate_server.runtime.geometry import StepGeometry
from steergate_server.runtime.sites import Site


class Applied(NamedTuple):
    """One lane of one row at one site: its pool entry was added with this weight."""

    step: int
    site: str
    request_id: str
    position: int
    lane: int
    slot: int
    weight: float


class Trace:
    """Collects `Applied` records until they are taken."""

    def __init__(self) -> None:
        self._records: list[Applied] = []
        self._step = 0
        self._owner: list[str] = []
        self._position: NDArray[np.int64] = np.zeros(0, dtype=np.int64)

    def begin(self, geometry: StepGeometry, position: NDArray[np.int64]) -> None:
        """A step starts; position [rows] is each row's absolute position."""
        self._step += 1
        self._owner = [
            request_id
            for request_id, count in zip(geometry.request_ids, geometry.counts.tolist(), strict=True)
            for _ in range(count)
        ]
        self._position = position

    def record(
        self, site: Site, rows: torch.Tensor, slots: torch.Tensor, touched: torch.Tensor, weight: torch.Tensor
    ) -> None:
        """rows [n]: rows of the step; slots, touched, weight [n, lanes]: what was applied to them at a site."""
        for at, lane in touched.nonzero().tolist():
            row = int(rows[at])
            self._records.append(
                Applied(
                    self._step,
                    str(site),
                    self._owner[row],
                    int(self._position[row]),
                    lane,
                    int(slots[at, lane]),
                    float(weight[at, lane]),
                )
            )

    def take(self) -> list[Applied]:
        """The records so far; they are forgotten."""
        records, self._records = self._records, []
        return records
