"""How a step is laid out: what its requests do at which site. Steps in which the same requests go on generating share
one layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from steergate_server.graph.kernels import Looks
from steergate_server.runtime.gates import Sources
from steergate_server.runtime.geometry import StepGeometry
from steergate_server.runtime.live import LiveRequests
from steergate_server.runtime.reach import StepReach
from steergate_server.runtime.selection import GENERATED


class Spread(NamedTuple):
    """A request of the step whose static slots are laid out row by row: its rows' place, and where they start."""

    number: int
    at: int
    length: int
    start: int


class StepLayout:
    """What is known of a step on the host once its requests are known, and what its ops look up but once.

    By request: our `numbers`, and the row at which each is `first`. By row: the `request`'s number, `position`,
    `phase`. By site: `probed`, `active`, `visited` (either), `needs_value`, `rank`. `spread`: requests whose static
    slots are laid out row by row. `used_lanes`: static steering's, and those of the most gates that a request has.
    `attenuated`, `locked`: some request is attenuated, has a locked default. `carries`: some gate's firings matter to
    later rows. `last`, `last_request`: of the steered requests, their last rows and their numbers, on the device.
    `watched`: requests by id whose books want to know what their gates see, with their last rows.
    """

    def __init__(
        self, geometry: StepGeometry, numbers: NDArray[np.int64], live: LiveRequests, device: torch.device
    ) -> None:
        self.request_ids = geometry.request_ids
        self.numbers = numbers
        self.rows = geometry.rows
        self.version = live.version
        self.request = np.repeat(numbers, geometry.counts)
        self.first = np.concatenate(([0], np.cumsum(geometry.counts)[:-1]))
        self.position = np.arange(self.rows) + np.repeat(geometry.starts - self.first, geometry.counts)
        end = live.prompt_length[self.request] - 1
        self.phase = (self.position >= end).astype(np.int64) + (self.position > end)
        self.spread = [
            Spread(number, int(self.first[index]), int(geometry.counts[index]), int(geometry.starts[index]))
            for index, number in enumerate(numbers.tolist())
            if number in live.exact_rows
        ]
        active, probed = np.any(live.touches[numbers], axis=0), np.any(live.probing[numbers], axis=0)
        self.active: list[bool] = active.tolist()
        self.probed: list[bool] = probed.tolist()
        self.visited: list[bool] = (active | probed).tolist()
        self.needs_value: list[bool] = np.any(live.needs_value[numbers], axis=0).tolist()
        self.rank: list[int] = np.max(live.rank[numbers], axis=0).tolist()
        self.used_lanes = 1 + int(live.lane_count[numbers].max())
        self.attenuated = bool(live.damping[numbers].any())
        self.locked = bool(live.has_locked[numbers].any())
        self.carries = bool(live.carries[numbers].any())
        last = self.first + geometry.counts - 1
        self.watched = [
            (geometry.request_ids[index], int(last[index])) for index in live.watched[numbers].nonzero()[0].tolist()
        ]
        steered = numbers > 0
        self.last = torch.from_numpy(last[steered]).to(device)
        self.last_request = torch.from_numpy(numbers[steered]).to(device)
        self.replays = False
        """Some live request has a history to follow, so that firings may be forced."""
        self.sources: Sources | None = None
        self.reach: StepReach | None = None
        self.looks: dict[int, Looks] | None = None
        self._starts_at = live.prompt_length[numbers]
        self._may_go_on = geometry.one_row_each and not self.spread and bool((self.phase == GENERATED).all())
        self._kept: dict[tuple[str, int], list[torch.Tensor]] = {}
        self._room = _MOST_KEPT_BYTES if self._may_go_on else 0

    def goes_on_as(self, geometry: StepGeometry, live: LiveRequests) -> bool:
        """Whether a next step has this same layout: the same requests, each at one generated row, and nothing that
        they hold has changed."""
        return (
            self._may_go_on
            and live.version == self.version
            and geometry.request_ids == self.request_ids
            and geometry.one_row_each
            and bool((geometry.starts >= self._starts_at).all())
        )

    def gathered(self, what: str, site: int, gather: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
        """Rows of the pools that the ops of a site need, the same in every step of this layout: kept while there is
        room. Nobody may write to them."""
        kept = self._kept.get((what, site))
        if kept is None:
            kept = gather()
            size = sum(rows.numel() * rows.element_size() for rows in kept)
            if size <= self._room:
                self._room -= size
                self._kept[what, site] = kept
        return kept


_MOST_KEPT_BYTES = 32 * 2**20
