"""Persistent pools of payload rows, and the slots that stand for what a request does.

A pool is one tensor `[entries, width]` shared by all sites of a width; entry 0 is zero and stands for "no effect". Rows
are content-addressed and counted, so memory follows the vectors that are in use. A slot is a number that rows carry;
the tables of each site say what it means there (tables.py). Slot 0 is "none".
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from math import isfinite

import torch


class CapacityError(RuntimeError):
    """A pool or the slot table has no room for what a request needs."""


class Pool:
    """Content-addressed rows `[entries, width]` in `dtype` on `device`, allocated once and never re-assigned."""

    def __init__(self, entries: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.rows = torch.zeros((entries, width), dtype=dtype, device=device)
        self._free = list(range(entries - 1, 0, -1))
        self._entry: dict[Hashable, int] = {}
        self._holders: dict[int, int] = {}
        self._key: dict[int, Hashable] = {}

    @property
    def capacity(self) -> int:
        """Rows that can be in use at once."""
        return self.rows.shape[0] - 1

    @property
    def used(self) -> int:
        """Rows in use."""
        return len(self._entry)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self.rows.shape[1] * self.rows.element_size()

    def acquire(self, key: Hashable, make: Callable[[], torch.Tensor]) -> int:
        """As `acquire_all` for a single row, which is made only where it is new."""
        return self.acquire_all([(key, self.rows[0] if key in self._entry else make())])[0]

    def acquire_all(self, wanted: Sequence[tuple[Hashable, torch.Tensor]]) -> list[int]:
        """The entries of rows `[width]`, each known by its key; new ones are filled. Counts one holder for each; a row
        of zeros is entry 0, which has none.

        Raises CapacityError where not enough entries are free, OverflowError where a number does not fit the pool's
        dtype; nothing is held then.
        """
        fresh = {key: row for key, row in wanted if key not in self._entry}
        if fresh:
            self._fill(list(fresh), torch.stack(list(fresh.values())).to(self.rows.dtype))
        entries = [self._entry.get(key, 0) for key, _ in wanted]
        for entry in entries:
            if entry:
                self._holders[entry] += 1
        return entries

    def _fill(self, keys: list[Hashable], rows: torch.Tensor) -> None:
        """Take entries for rows [n, width] that are not zero, and copy all of them at once."""
        lows, highs = (bound.tolist() for bound in rows.aminmax(dim=1))
        if not all(isfinite(low) and isfinite(high) for low, high in zip(lows, highs, strict=True)):
            raise OverflowError(f"A scaled vector exceeds the range of {self.rows.dtype}")
        there = [at for at, (low, high) in enumerate(zip(lows, highs, strict=True)) if low != 0.0 or high != 0.0]
        if not there:
            return
        if len(there) > len(self._free):
            raise CapacityError(f"The payload pool is full: {self.used} of {self.capacity} rows are in use")
        entries = [self._free.pop() for _ in there]
        device = self.rows.device
        kept = rows if len(there) == len(keys) else rows[there]
        self.rows.index_copy_(0, torch.tensor(entries, device=device), kept.to(device))
        for at, entry in zip(there, entries, strict=True):
            self._entry[keys[at]], self._key[entry], self._holders[entry] = entry, keys[at], 0

    def release(self, entry: int) -> None:
        """Give one hold back. The row is zeroed and freed with its last holder. Entry 0 is nobody's."""
        if entry == 0:
            return
        self._holders[entry] -= 1
        if self._holders[entry] == 0:
            del self._holders[entry], self._entry[self._key.pop(entry)]
            self.rows[entry].zero_()
            self._free.append(entry)


class Slots:
    """Content-addressed slot numbers 1 .. count - 1, counted by their holders."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, 0, -1))
        self._slot: dict[Hashable, int] = {}
        self._key: dict[int, Hashable] = {}
        self._holders: dict[int, int] = {}

    @property
    def used(self) -> int:
        """Slots in use."""
        return len(self._slot)

    def acquire(self, key: Hashable, build: Callable[[int], None]) -> int:
        """The slot of `key`; a new one is filled by `build(slot)`, which undoes itself if it raises. Counts one holder.

        Raises CapacityError where no slot is free.
        """
        slot = self._slot.get(key)
        if slot is None:
            if not self._free:
                raise CapacityError(f"All {self.count - 1} steering slots are in use")
            build(self._free[-1])
            slot = self._free.pop()
            self._slot[key], self._key[slot], self._holders[slot] = slot, key, 0
        self._holders[slot] += 1
        return slot

    def release(self, slot: int, clear: Callable[[int], None]) -> None:
        """Give one hold back; `clear(slot)` runs with the last one."""
        self._holders[slot] -= 1
        if self._holders[slot] == 0:
            clear(slot)
            del self._holders[slot], self._slot[self._key.pop(slot)]
            self._free.append(slot)
