"""Capacity: how many slots and pool rows a request needs, how many an engine has, and who waits.

The scheduler counts before the worker installs. It counts at most what the worker will use: equal content is shared,
and of a composed change the largest possible number of rows is taken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

from steergate_server.algorithms.registry import get_algorithm
from steergate_server.runtime.gates import added_vectors
from steergate_server.runtime.plan import Plan, PlannedVector, SiteName
from steergate_server.schema.hooks import HOOK_COMPONENTS


class Capacity(NamedTuple):
    """What an engine process has: slots, and pool rows by component."""

    slots: int
    rows: dict[str, int]

    @property
    def slots_per_request(self) -> int:
        """How many of the slots one request may have: a share, so that it cannot keep everybody else waiting."""
        return min(self.slots, max(64, self.slots // 4))


class Demand(NamedTuple):
    """What a request needs: the slots by their content, and pool rows by (component, content) with their number."""

    slots: frozenset[Hashable]
    rows: Mapping[tuple[str, Hashable], int]


def shortage(slots: int, rows: Mapping[str, int], capacity: Capacity) -> str | None:
    """What of an engine's capacity is exceeded, in words, or None."""
    if slots > capacity.slots:
        return f"{slots} steering slots are needed, this server has {capacity.slots}"
    for component, count in rows.items():
        available = capacity.rows.get(component, 0)
        if count > available:
            return f"{count} payload rows for {component} are needed, this server's pool has {available}"
    return None


def rows_by_component(rows: Mapping[tuple[str, Hashable], int]) -> Counter[str]:
    """Pool rows summed by component."""
    total: Counter[str] = Counter()
    for (component, _), count in rows.items():
        total[component] += count
    return total


def demand_of(plan: Plan, masks: Sequence[Sequence[int]], *, in_graph: bool) -> Demand:
    """What a plan needs, given the sets of vectors that rows select, for each of its stacks.

    in_graph: static vectors live in tables, not in programs. Gates' vectors always do, so that where programs are used
    a gate shares no slot with static vectors of equal content.
    """
    slots: set[Hashable] = set()
    rows: dict[tuple[str, Hashable], int] = {}
    for stack, of_stack in zip(plan.stacks, masks, strict=True):
        for mask in of_stack:
            content, needed = _needs(stack.at_sites(mask))
            slots.add((in_graph, content))
            if in_graph:
                rows |= needed
    for gates in [*([gate] for gate in plan.gates), plan.bridge]:
        at_sites = added_vectors(gate for gate in gates if gate.apply == "add")
        if at_sites:
            content, needed = _needs(at_sites)
            slots.add((True, content))
            rows |= needed
    return Demand(frozenset(slots), rows)


def _needs(at_sites: Mapping[SiteName, Sequence[PlannedVector]]) -> tuple[Hashable, dict[tuple[str, Hashable], int]]:
    """What a slot is known by, and the pool rows that it needs."""
    # Most sites have the very same vectors, which are looked at once.
    seen: dict[int, tuple[Hashable, int]] = {}
    slot: list[Hashable] = []
    rows: dict[tuple[str, Hashable], int] = {}
    for site in sorted(at_sites):
        vectors = at_sites[site]
        known = seen.get(id(vectors))
        if known is None:
            known = seen[id(vectors)] = tuple(vector.content for vector in vectors), _row_count(vectors)
        at_site = (site, known[0])
        slot.append(at_site)
        rows[HOOK_COMPONENTS[site[0]], at_site] = known[1]
    return tuple(slot), rows


def _row_count(vectors: Sequence[PlannedVector]) -> int:
    """The most pool rows that vectors can need at one site: a bias, a pair for each rank, a clamp, a router's masks."""
    families = [get_algorithm(vector.algorithm).graph_family for vector in vectors]
    if families == ["moe_gate"]:
        return 2
    rank = sum(
        {"projection": 1, "lowrank": vector.rank}.get(family or "", 0)
        for family, vector in zip(families, vectors, strict=True)
    )
    affine = any(family in ("additive", "replace", "lowrank") for family in families) or len(vectors) > 1
    return int(affine) + 2 * rank + families.count("clamp")


class Ledger:
    """What live requests have reserved of an engine's capacity. A reservation lasts until the request ends."""

    def __init__(self) -> None:
        self._reserved: dict[str, Demand] = {}
        self._slots: Counter[Hashable] = Counter()
        self._rows: Counter[tuple[str, Hashable]] = Counter()
        self._row_counts: dict[tuple[str, Hashable], int] = {}
        self._total: Counter[str] = Counter()

    def holds(self, request_id: str) -> bool:
        """Whether a request has a reservation."""
        return request_id in self._reserved

    @property
    def empty(self) -> bool:
        """Whether nothing is reserved."""
        return not self._reserved

    def fits(self, demand: Demand, capacity: Capacity) -> bool:
        """Whether a demand fits beside what is reserved."""
        slots = len(self._slots) + sum(key not in self._slots for key in demand.slots)
        new = rows_by_component({row: count for row, count in demand.rows.items() if row not in self._rows})
        return shortage(slots, self._total + new, capacity) is None

    def needs_new(self, demand: Demand) -> bool:
        """Whether a demand needs anything that is not there already."""
        return any(key not in self._slots for key in demand.slots) or any(key not in self._rows for key in demand.rows)

    def reserve(self, request_id: str, demand: Demand) -> None:
        """Reserve a request's demand."""
        self._reserved[request_id] = demand
        self._slots.update(demand.slots)
        for row, count in demand.rows.items():
            if row not in self._rows:
                self._row_counts[row] = count
                self._total[row[0]] += count
            self._rows[row] += 1

    def release(self, request_id: str) -> None:
        """Give a request's reservation back, if it has one."""
        demand = self._reserved.pop(request_id, None)
        if demand is None:
            return
        for key in demand.slots:
            self._slots[key] -= 1
            if not self._slots[key]:
                del self._slots[key]
        for row in demand.rows:
            self._rows[row] -= 1
            if not self._rows[row]:
                self._total[row[0]] -= self._row_counts.pop(row)
                del self._rows[row]
