"""Persistent pools of payload rows, and the slots that point into them.

A pool is one tensor `[entries, width]` shared by all sites; entry 0 is zero and stands for "no effect". Rows are
content-addressed and counted, so memory follows the vectors that are in use. A slot is a column of the per-site index:
for each site it names the pool entry that applies there. Slot 0 is "none".
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping

import torch


class CapacityError(RuntimeError):
    """A pool or the slot index has no room for what a request needs."""


class Pool:
    """Content-addressed rows `[entries, width]` in `dtype` on `device`, allocated once and never re-assigned."""

    def __init__(self, name: str, entries: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.name = name
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

    def acquire(self, key: Hashable, make: Callable[[], torch.Tensor]) -> int:
        """The entry that holds the row of `key`, filled by `make() -> [width]` if it is new. Counts one holder.

        Raises CapacityError where no entry is free.
        """
        entry = self._entry.get(key)
        if entry is None:
            if not self._free:
                raise CapacityError(f"the {self.name} pool is full: {self.capacity} rows are in use")
            row = make().to(self.rows.dtype)
            if not bool(torch.isfinite(row).all()):
                raise OverflowError(f"a {self.name} row exceeds the range of {self.rows.dtype}")
            entry = self._free.pop()
            self.rows[entry].copy_(row)
            self._entry[key], self._key[entry], self._holders[entry] = entry, key, 0
        self._holders[entry] += 1
        return entry

    def release(self, entry: int) -> None:
        """Give one hold back. The row is zeroed and freed with its last holder."""
        self._holders[entry] -= 1
        if self._holders[entry] == 0:
            del self._holders[entry], self._entry[self._key.pop(entry)]
            self.rows[entry].zero_()
            self._free.append(entry)


class SlotIndex:
    """`table [sites, slots]` int32: the pool entry that a slot applies at a site. Column 0 is zero."""

    def __init__(self, sites: int, slots: int, pool: Pool, device: torch.device) -> None:
        self.table = torch.zeros((sites, slots), dtype=torch.int32, device=device)
        self._pool = pool
        self._free = list(range(slots - 1, 0, -1))
        self._slot: dict[Hashable, int] = {}
        self._key: dict[int, Hashable] = {}
        self._holders: dict[int, int] = {}
        self._entries: dict[int, list[int]] = {}

    @property
    def used(self) -> int:
        """Slots in use."""
        return len(self._slot)

    def acquire(self, key: Hashable, rows: Mapping[int, tuple[Hashable, Callable[[], torch.Tensor]]]) -> int:
        """The slot of `key`; if new, its column is built from `rows`: site number -> (row key, row maker).

        Counts one holder. Raises CapacityError where no slot or pool entry is free; nothing is held then.
        """
        slot = self._slot.get(key)
        if slot is None:
            if not self._free:
                raise CapacityError(f"all {self.table.shape[1] - 1} steering slots are in use")
            entries = self._acquire_entries(rows)
            slot = self._free.pop()
            for site, entry in zip(rows, entries, strict=True):
                self.table[site, slot] = entry
            self._slot[key], self._key[slot] = slot, key
            self._entries[slot], self._holders[slot] = entries, 0
        self._holders[slot] += 1
        return slot

    def _acquire_entries(self, rows: Mapping[int, tuple[Hashable, Callable[[], torch.Tensor]]]) -> list[int]:
        entries: list[int] = []
        try:
            for key, make in rows.values():
                entries.append(self._pool.acquire(key, make))
        except BaseException:
            for entry in entries:
                self._pool.release(entry)
            raise
        return entries

    def release(self, slot: int) -> None:
        """Give one hold back. The column is zeroed and its entries are released with its last holder."""
        if slot == 0:
            return
        self._holders[slot] -= 1
        if self._holders[slot] == 0:
            self.table[:, slot] = 0
            for entry in self._entries.pop(slot):
                self._pool.release(entry)
            del self._holders[slot], self._slot[self._key.pop(slot)]
            self._free.append(slot)
