"""The tables of all sites of one width: what each slot means at each of them.

`[sites, slots]` each, zero for "no effect". They name rows of one pool, or hold a number or two themselves.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import islice

import torch

from steergate_server.graph.affine import SiteChange
from steergate_server.graph.pools import CapacityError, Pool


class SiteTables:
    """Tables of the families that the declared algorithms need, for `sites` sites and `slots` slots.

    bias: pool entry of b. reads, writes [.., max_rank]: pool entries of the pairs (p, q) of x + (x.p) q. forget
    float32: 1 - a. clamp: pool entry of u; bounds [.., 3] float32: low, high, strength. normalize bool. `rank`, on
    the host: of each (site, slot) that is more than a bias.
    """

    def __init__(
        self, sites: int, slots: int, pool: Pool, families: Sequence[str], max_rank: int, device: torch.device
    ) -> None:
        def table(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.zeros((sites, slots, *shape), dtype=dtype, device=device)

        self.pool = pool
        self.bias = table()
        ranked = bool({"projection", "lowrank"} & set(families))
        self.max_rank = max_rank if ranked else 0
        self.reads = table(self.max_rank) if ranked else None
        self.writes = table(self.max_rank) if ranked else None
        self.forget = table(dtype=torch.float32) if "replace" in families else None
        self.clamp = table() if "clamp" in families else None
        self.bounds = table(3, dtype=torch.float32) if "clamp" in families else None
        self.normalize = table(dtype=torch.bool)
        self.rank: dict[tuple[int, int], int] = {}
        self._held: dict[tuple[int, int], list[int]] = {}

    def write(self, slot: int, changes: Sequence[tuple[int, Hashable, SiteChange]]) -> None:
        """Make a slot mean a change at each of some sites: (site, key that stands for the change's content, change).
        Nothing is held if it raises.

        Raises CapacityError where the pool is full or a rank does not fit, OverflowError as `Pool.acquire_all`.
        """
        wanted: list[tuple[Hashable, torch.Tensor]] = []
        for _, key, change in changes:
            affine = change.affine
            if affine.rank > self.max_rank:
                raise CapacityError(f"rank {affine.rank} exceeds the tables' rank {self.max_rank}")
            wanted.append(((key, "bias"), affine.bias))
            wanted += [((key, f"read{term}"), row) for term, row in enumerate(affine.reads)] if affine.rank else ()
            wanted += [((key, f"write{term}"), row) for term, row in enumerate(affine.writes)] if affine.rank else ()
            if change.clamp is not None:
                wanted.append(((key, "clamp"), change.clamp.direction))
        entries = iter(self.pool.acquire_all(wanted))
        biases = []
        for site, _, change in changes:
            rank = change.affine.rank
            held = list(islice(entries, 1 + 2 * rank + (change.clamp is not None)))
            self._held[site, slot] = held
            biases.append(held[0])
            if rank > 0 or change.affine.keep != 1.0 or change.clamp is not None or change.normalize:
                self.rank[site, slot] = rank
                self._write_complex(site, slot, change, held)
        sites = torch.tensor([site for site, _, _ in changes])
        self.bias[sites, slot] = torch.tensor(biases, dtype=torch.int32, device=self.bias.device)

    def _write_complex(self, site: int, slot: int, change: SiteChange, held: Sequence[int]) -> None:
        """What is more than a bias; held: the entries of the bias, the reads, the writes and the clamp."""
        affine = change.affine
        if self.reads is not None and self.writes is not None:
            pairs = torch.tensor(held[1 : 1 + 2 * affine.rank], dtype=torch.int32).view(2, -1)
            self.reads[site, slot, : affine.rank], self.writes[site, slot, : affine.rank] = pairs
        if self.forget is not None:
            self.forget[site, slot] = 1.0 - affine.keep
        if self.clamp is not None and self.bounds is not None and change.clamp is not None:
            self.clamp[site, slot] = held[-1]
            bounds = (change.clamp.low, change.clamp.high, change.clamp.strength)
            self.bounds[site, slot] = torch.tensor(bounds, dtype=torch.float32)
        self.normalize[site, slot] = change.normalize

    def clear(self, site: int, slot: int) -> None:
        """Make a slot mean nothing at a site again, and give its rows back."""
        self.bias[site, slot] = 0
        if self.rank.pop((site, slot), None) is not None:
            for table in (self.reads, self.writes, self.forget, self.clamp, self.bounds, self.normalize):
                if table is not None:
                    table[site, slot] = 0
        for entry in self._held.pop((site, slot), ()):
            self.pool.release(entry)


class RouterTables:
    """Tables of the MoE routers: what a slot does to the logits of each layer's E experts.

    plan [sites, slots, 4] float32: mode, lambda, top-k, epsilon. raised, lowered int32: pool entries of expert masks.
    draw [sites, slots, 2] int64: seed, layer. `active` on the host: the slot does anything there.
    """

    def __init__(self, sites: int, slots: int, pool: Pool, device: torch.device) -> None:
        self.pool = pool
        self.plan = torch.zeros((sites, slots, 4), dtype=torch.float32, device=device)
        self.raised = torch.zeros((sites, slots), dtype=torch.int32, device=device)
        self.lowered = torch.zeros((sites, slots), dtype=torch.int32, device=device)
        self.draw = torch.zeros((sites, slots, 2), dtype=torch.int64, device=device)
        self.active = torch.zeros((sites, slots), dtype=torch.bool, device=device)

    def write(self, site: int, slot: int, key: Hashable, tables: dict[str, torch.Tensor | None]) -> None:
        """Make a slot mean a lowered router payload at a site. Raises CapacityError where the pool is full."""
        raised, lowered = tables["moe_raise"], tables["moe_lower"]
        plan, draw = tables["moe_plan"], tables["moe_draw"]
        assert raised is not None
        assert lowered is not None
        assert plan is not None
        assert draw is not None
        up, down = self.pool.acquire_all([((key, "raised"), raised), ((key, "lowered"), lowered)])
        self.raised[site, slot], self.lowered[site, slot] = up, down
        self.plan[site, slot], self.draw[site, slot] = plan, draw
        self.active[site, slot] = True

    def clear(self, site: int, slot: int) -> None:
        """Make a slot mean nothing at a site again, and give its rows back."""
        self.pool.release(int(self.raised[site, slot]))
        self.pool.release(int(self.lowered[site, slot]))
        for table in (self.plan, self.raised, self.lowered, self.draw, self.active):
            table[site, slot] = 0
