"""Slots on an engine process: what a set of static vectors does at each site, in tables or as prepared algorithms."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from steergate_server.algorithms.base import BaseSteerVectorAlgorithm
from steergate_server.algorithms.registry import create_algorithm, get_algorithm, works_on_parts
from steergate_server.graph.affine import Lowered, NotLowerableError, SiteChange, compose
from steergate_server.graph.kernels import added_rows, router_change, table_change
from steergate_server.graph.pools import Pool, Slots
from steergate_server.graph.tables import RouterTables, SiteTables
from steergate_server.runtime.capacity import Capacity
from steergate_server.runtime.config import EngineConfig
from steergate_server.runtime.payloads import PayloadCache
from steergate_server.runtime.plan import PlannedVector, SiteName
from steergate_server.runtime.sites import Site
from steergate_server.schema.errors import SteeringError
from steergate_server.schema.hooks import HOOK_COMPONENTS

AtSites = Mapping[SiteName, Sequence[PlannedVector]]


class _AlgorithmFaultError(RuntimeError):
    """An algorithm raised, or gave back rows that are of another shape or not finite."""


class SlotBook:
    """All slots of an engine process, and the tables that give them their meaning at every site."""

    def __init__(
        self,
        config: EngineConfig,
        sites: Sequence[Site],
        payloads: PayloadCache,
        slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.in_graph = config.graph_mode == "in_graph"
        self.slots = Slots(slots)
        self._sites = list(sites)
        self._number = {(site.hook, site.layer): number for number, site in enumerate(sites)}
        self._payloads = payloads
        self._tables: dict[tuple[str, int], SiteTables | RouterTables] = {}
        self._local: list[tuple[SiteTables | RouterTables, int]] = []
        self._build_tables(config, slots, dtype, device)
        # By site and slot: whether anything is done. On the host: at which sites a slot in use does anything.
        self.touches = torch.zeros((len(sites), slots), dtype=torch.bool, device=device)
        self._touched: dict[int, list[int]] = {}
        self._programs: dict[tuple[int, int], list[BaseSteerVectorAlgorithm]] = {}
        self.faults: dict[int, str] = {}
        """Slots whose algorithms failed since the controller last looked, with what happened."""

    def _build_tables(self, config: EngineConfig, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        groups: dict[tuple[str, int], list[int]] = {}
        for number, site in enumerate(self._sites):
            groups.setdefault((HOOK_COMPONENTS[site.hook], site.own_width), []).append(number)
        families = [family for name in config.algorithms if (family := get_algorithm(name).graph_family) is not None]
        share = config.memory_mib * 2**20 // len(groups)
        places: dict[int, tuple[SiteTables | RouterTables, int]] = {}
        for (component, width), numbers in groups.items():
            kind = torch.float32 if component == "router_logits" else dtype
            # No more rows than every slot could want at every site: a bias, a clamp and a pair for each rank.
            wanted = 1 + slots * len(numbers) * (2 + 2 * config.graph_max_rank)
            pool = Pool(max(2, min(share // (width * kind.itemsize), wanted)), width, kind, device)
            tables: SiteTables | RouterTables
            if component == "router_logits":
                tables = RouterTables(len(numbers), slots, pool, device)
            else:
                tables = SiteTables(len(numbers), slots, pool, families, config.graph_max_rank, device)
            self._tables[component, width] = tables
            places |= {number: (tables, local) for local, number in enumerate(numbers)}
        self._local = [places[number] for number in range(len(self._sites))]

    # Slots ------------------------------------------------------------------------------------------------------

    def acquire(self, at_sites: AtSites, *, in_tables: bool = False) -> int:
        """The slot that does this at these sites. Counts one holder.

        in_tables: keep it in the tables whatever the graph mode; gates' vectors are added from there. Raises
        CapacityError, OverflowError, SteeringError (`not_lowerable`); nothing is held then.
        """
        content = tuple(
            sorted((self._number[site], tuple(v.content for v in found)) for site, found in at_sites.items())
        )
        in_tables = in_tables or self.in_graph
        return self.slots.acquire((in_tables, content), lambda slot: self._build(slot, content, at_sites, in_tables))

    def release(self, slot: int) -> None:
        """Give one hold of a slot back."""
        if slot:
            self.slots.release(slot, self._clear)

    def _build(self, slot: int, content: tuple[tuple[int, Hashable], ...], at_sites: AtSites, in_tables: bool) -> None:
        touched = self._touched[slot] = []
        # By tables, what is written to them: all at once, since every write to a device has its price.
        changes: dict[int, list[tuple[int, Hashable, SiteChange]]] = {}
        try:
            for key, site in zip(content, sorted(at_sites, key=self._number.__getitem__), strict=True):
                number, vectors = key[0], at_sites[site]
                whole, (tables, local) = self._sites[number], self._local[number]
                payloads = [self._payloads.layer(vector, site, whole.width) for vector in vectors]
                if not in_tables:
                    self._programs[number, slot] = [
                        _prepared(vector, payload, whole.part)
                        for vector, payload in zip(vectors, payloads, strict=True)
                    ]
                elif isinstance(tables, RouterTables):
                    tables.write(local, slot, key, _router_tables(vectors, payloads))
                else:
                    change = _site_change(vectors, payloads, whole)
                    changes.setdefault(id(tables), []).append((number, key, change))
                    continue
                touched.append(number)
            for several in changes.values():
                places = [self._local[number] for number, _, _ in several]
                tables = places[0][0]
                assert isinstance(tables, SiteTables)
                touched += [number for number, _, _ in several]  # before: a write may fail halfway
                tables.write(
                    slot, [(local, key, change) for (_, local), (_, key, change) in zip(places, several, strict=True)]
                )
            self.touches[:, slot] = torch.from_numpy(self.sites_of(slot))
        except BaseException:
            self._clear(slot)
            raise

    def _clear(self, slot: int) -> None:
        for number in self._touched.pop(slot):
            tables, local = self._local[number]
            tables.clear(local, slot)
            self._programs.pop((number, slot), None)
        self.touches[:, slot] = False
        # The slot's next holder is not to blame.
        self.faults.pop(slot, None)

    # What a slot is at a site -----------------------------------------------------------------------------------

    def sites_of(self, slot: int) -> NDArray[np.bool_]:
        """By site: whether the slot does anything there."""
        found = np.zeros(len(self._sites), dtype=bool)
        found[self._touched[slot]] = True
        return found

    def needs_value(self, slot: int) -> NDArray[np.bool_]:
        """By site: whether the slot's change there depends on the row."""
        found = np.zeros(len(self._sites), dtype=bool)
        for number in self._touched[slot]:
            tables, local = self._local[number]
            in_program = (number, slot) in self._programs
            found[number] = in_program or isinstance(tables, RouterTables) or (local, slot) in tables.rank
        return found

    def ranks(self, slot: int) -> NDArray[np.int64]:
        """By site: the rank of the slot's change."""
        found = np.zeros(len(self._sites), dtype=np.int64)
        for number in self._touched[slot]:
            tables, local = self._local[number]
            found[number] = tables.rank.get((local, slot), 0) if isinstance(tables, SiteTables) else 0
        return found

    @property
    def places(self) -> list[tuple[SiteTables | RouterTables, int]]:
        """By site: its tables, and its number in them."""
        return self._local

    def added(self, site: int, entries: torch.Tensor) -> torch.Tensor:
        """What slots that are no more than a bias at a site add there, [n, width] float32, a copy; entries [n]: of
        their rows in the pool."""
        tables = self._local[site][0]
        assert isinstance(tables, SiteTables)
        return added_rows(entries, tables)

    def change(
        self, site: int, slots: torch.Tensor, value: torch.Tensor, positions: torch.Tensor, rank: int
    ) -> torch.Tensor:
        """T(x) - x [n, width] float32 of slots [n] at a site.

        value: complete rows [n, width] float32. positions [n]: absolute. Where an algorithm fails, its slot's rows are
        left as they are and the slot is noted in `faults`.
        """
        tables, local = self._local[site]
        if not self.in_graph:
            return self._run_programs(site, slots, value, positions)
        if isinstance(tables, RouterTables):
            return _on_active(value, tables.active[local][slots], slots, positions, local, tables)
        return table_change(value, slots, local, tables, rank)

    def _run_programs(
        self, site: int, slots: torch.Tensor, value: torch.Tensor, positions: torch.Tensor
    ) -> torch.Tensor:
        change = torch.zeros_like(value)
        for slot in set(slots.tolist()):
            program = self._programs.get((site, slot))
            if program is not None:
                rows = (slots == slot).nonzero(as_tuple=True)[0]
                try:
                    change[rows] = _run(program, value[rows], positions[rows]) - value[rows]
                except _AlgorithmFaultError as fault:
                    self.faults[slot] = str(fault)
        return change

    @property
    def capacity(self) -> Capacity:
        """Slots and pool rows that requests can hold."""
        rows = {component: tables.pool.capacity for (component, _), tables in self._tables.items()}
        return Capacity(self.slots.count - 1, rows)

    @property
    def pool_used(self) -> int:
        """Bytes of the pools that are in use."""
        return sum(tables.pool.used * tables.pool.row_bytes for tables in self._tables.values())

    @property
    def pool_capacity(self) -> int:
        """Bytes of the pools."""
        return sum(tables.pool.capacity * tables.pool.row_bytes for tables in self._tables.values())


def _site_change(vectors: Sequence[PlannedVector], payloads: Sequence[Any], site: Site) -> SiteChange:
    """What vectors, in order, do at a site. Raises SteeringError (`not_lowerable`)."""
    parts = [
        Lowered(_family(vector), _lowered(vector, payload, site.part), vector.normalize)
        for vector, payload in zip(vectors, payloads, strict=True)
    ]
    try:
        return compose(parts, site.own_width)
    except NotLowerableError as error:
        raise SteeringError("not_lowerable", str(error)) from None


def _router_tables(vectors: Sequence[PlannedVector], payloads: Sequence[Any]) -> dict[str, torch.Tensor | None]:
    for vector in vectors:
        _family(vector)
    if len(vectors) > 1:
        raise SteeringError("not_lowerable", "two router vectors at the same site have no closed form")
    return _lowered(vectors[0], payloads[0], None)


def _family(vector: PlannedVector) -> str:
    family = get_algorithm(vector.algorithm).graph_family
    if family is None:
        raise SteeringError("not_lowerable", f"algorithm `{vector.algorithm}` does not lower into the graph")
    return family


def _lowered(vector: PlannedVector, payload: Any, part: tuple[int, int] | None) -> dict[str, torch.Tensor | None]:
    """The tables of a vector at a site, or of the part of its rows that lies on this rank."""
    algorithm = get_algorithm(vector.algorithm)
    if part is not None and not works_on_parts(vector.algorithm, normalize=vector.normalize):
        raise SteeringError("hook_not_allowed", f"algorithm `{vector.algorithm}` needs complete rows")
    tables = algorithm.graph_lower(payload, vector.scale)
    if part is None:
        return tables
    return {name: None if table is None else table[slice(*part)] for name, table in tables.items()}


def _prepared(vector: PlannedVector, payload: Any, part: tuple[int, int] | None) -> BaseSteerVectorAlgorithm:
    if part is not None:
        addition = create_algorithm("direct")
        addition.set_payload(_lowered(vector, payload, part)["additive"])
        return addition
    algorithm = create_algorithm(vector.algorithm, normalize=vector.normalize)
    algorithm.set_payload(payload, vector.scale)
    return algorithm


def _run(program: Sequence[BaseSteerVectorAlgorithm], value: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Run prepared algorithms in order over complete rows [n, width] float32."""
    for algorithm in program:
        name = type(algorithm).__name__
        params = {**algorithm.payload, "positions": positions} if algorithm.needs_positions else algorithm.payload
        try:
            result = algorithm._transform(value, params)
        except Exception as error:
            raise _AlgorithmFaultError(f"{name} raised {type(error).__name__}") from error
        if not isinstance(result, torch.Tensor) or result.shape != value.shape:
            raise _AlgorithmFaultError(f"{name} gave back another shape than it got")
        if not bool(torch.isfinite(result).all()):
            raise _AlgorithmFaultError(f"{name} gave back numbers that are not finite")
        value = result.float()
    return value


def _on_active(
    value: torch.Tensor,
    active: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    site: int,
    tables: RouterTables,
) -> torch.Tensor:
    """The change of a router's rows; rows whose slot is not active there have none."""
    rows = active.nonzero(as_tuple=True)[0]
    change = torch.zeros_like(value)
    if not len(rows):
        return change
    change[rows] = router_change(value[rows], slots[rows], site, tables, positions[rows])
    return change
