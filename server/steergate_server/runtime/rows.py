"""The static slot of each row of a request: by phase where its clauses know nothing else, by row otherwise."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from steergate_server.runtime.selection import PHASES, Selection


class RowSlots:
    """Slots by row. `rows` answers for any; `by_phase` [PHASES] int32 where no clause knows more than the phase, else 0
    (`exact`).

    A generated row whose slot depends on its token is answered on the device, by `conditioned`: under asynchronous
    scheduling the host does not know the token yet.
    """

    def __init__(self, selection: Selection, slot_of: Mapping[int, int], *, exact: bool, device: torch.device) -> None:
        self.exact = exact
        masks = sorted(slot_of)
        slots = [slot_of[mask] for mask in masks]
        self.depends_on_token = bool(len(selection.tokens))
        self._masks, self._slots = np.asarray(masks, dtype=np.int64), np.asarray(slots, dtype=np.int32)
        self._prompt = self._lookup(selection.prompt)
        self._generated = self._lookup(selection.certain) if not self.depends_on_token else np.zeros(1, dtype=np.int32)
        self.by_phase = np.zeros(PHASES, dtype=np.int32)
        if not exact:
            length = len(self._prompt)
            self.by_phase[:] = (self._prompt[0] if length > 1 else 0, self._prompt[-1], self._generated[0])
        if self.depends_on_token:
            self._device = [
                torch.from_numpy(array).to(device)
                for array in (
                    selection.certain, selection.possible, selection.tokens, selection.included, selection.excluded,
                    self._masks, self._slots,
                )
            ]  # fmt: skip

    def rows(self, start: int, count: int) -> NDArray[np.int32]:
        """Slots of the rows `start` to `start + count`; those that depend on their token are 0."""
        at = np.arange(start, start + count)
        length = len(self._prompt)
        later = np.minimum(np.maximum(at - length, 0), len(self._generated) - 1)
        found: NDArray[np.int32] = np.where(
            at < length, self._prompt[np.minimum(at, length - 1)], self._generated[later]
        )
        return found

    def conditioned(self, positions: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Slots [n] int32 of generated positions [n] (0 is the first), by their input tokens [n], on the device."""
        certain, possible, named, included, excluded, masks, slots = self._device
        at = positions.clamp(max=len(certain) - 1)
        index = torch.searchsorted(named, tokens).clamp(max=len(named) - 1)
        known = named[index] == tokens
        zero = torch.zeros_like(certain[at])
        mask = certain[at] | (possible[at] & torch.where(known, included[index], zero))
        mask = mask & ~torch.where(known, excluded[index], zero)
        return slots[torch.searchsorted(masks, mask)]

    def _lookup(self, masks: NDArray[np.int64]) -> NDArray[np.int32]:
        found: NDArray[np.int32] = self._slots[np.searchsorted(self._masks, masks)]
        return found
