"""What the op of a site does, in PyTorch: score the gates that probe here, then steer.

The order is the specification's (gates.md): a probe reads the value before any steering at its own site and after all
steering at earlier ones; then the static change applies, times its attenuation; then the gates' vectors are added.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from steergate_server.algorithms.base import BaseSteerVectorAlgorithm
from steergate_server.algorithms.moe_router import route, router_rows
from steergate_server.graph.lanes import BELOW, COSINE, LASTING, SOFT, GateTable, Lanes
from steergate_server.graph.tables import RouterTables, SiteTables

_FLOAT_MAX = torch.finfo(torch.float32).max


class Looks(NamedTuple):
    """Every (row, gate) [n] that looks at one site in a step, and what there is to know of each.

    `rows`: of the step, a slice where each looks exactly once, in order. `cell` int64: place of (row, gate) in the
    flattened `[rows, gates]` tensors of the lanes, `weight_cell` in their weights. `probe` int32: entry of the probe
    pool. `threshold` float64, `sharpness` float32. The rest is None where it holds for none: `below` float64, -1 for a
    gate that fires below its threshold, else 1; `soft` (`all_soft`: all of them), `lasting`, `cosine` bool.
    """

    rows: torch.Tensor | slice
    cell: torch.Tensor
    weight_cell: torch.Tensor
    probe: torch.Tensor
    threshold: torch.Tensor
    sharpness: torch.Tensor
    below: torch.Tensor | None
    soft: torch.Tensor | None
    lasting: torch.Tensor | None
    cosine: torch.Tensor | None
    all_soft: bool


def looks_by_site(rows: int, lanes: Lanes, gates: GateTable) -> dict[int, Looks]:
    """Who looks where in a step of so many rows, gathered once for all sites: a look at each would cost more."""
    request = lanes.request[:rows]
    site = gates.site.index_select(0, request)
    row, gate = (lanes.look[:rows] & (site >= 0)).nonzero(as_tuple=True)
    width = site.shape[1]
    at = site.flatten().index_select(0, row * width + gate)
    return {
        number: _looks((at == number).nonzero().flatten(), row, gate, rows, lanes, gates) for number in set(at.tolist())
    }


def _looks(
    here: torch.Tensor, row: torch.Tensor, gate: torch.Tensor, rows: int, lanes: Lanes, gates: GateTable
) -> Looks:
    """One site's looks: those at the places `here` of the step's `row` and `gate`."""
    row, gate = row.index_select(0, here), gate.index_select(0, here)
    width = lanes.look.shape[1]
    owner = lanes.request.index_select(0, row) * width + gate

    def of(table: torch.Tensor) -> torch.Tensor:
        return table.flatten().index_select(0, owner)

    mode = of(gates.mode)

    def having(bit: int) -> torch.Tensor | None:
        mask = (mode & bit) != 0
        return mask if bool(mask.any()) else None

    below, soft = having(BELOW), having(SOFT)
    every = len(row) == rows and bool((row == torch.arange(rows, device=row.device)).all())
    return Looks(
        rows=slice(0, rows) if every else row,
        cell=row * width + gate,
        weight_cell=row * (width + 1) + gate + 1,
        probe=of(gates.probe),
        threshold=of(gates.threshold),
        sharpness=of(gates.sharpness),
        below=None if below is None else 1.0 - 2.0 * below.double(),
        soft=soft,
        lasting=having(LASTING),
        cosine=having(COSINE),
        all_soft=soft is not None and bool(soft.all()),
    )


def score_gates(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    looks: Looks,
    lanes: Lanes,
    probes: torch.Tensor,
    *,
    forced: bool = True,
) -> None:
    """Score every (row, gate) that looks at this site; write `score`, `fired` and the lanes' weights.

    hidden, residual: [>= rows, width]; the value probed is their sum, in float32. probes [n, width] float32: that of
    each look. forced: False promises that no row is.
    """
    score = _score(complete(hidden, residual, looks.rows), probes, looks)
    # In float64, as the threshold is: it keeps the value that the client wrote.
    margin = score - looks.threshold
    if looks.below is not None:
        margin *= looks.below
    # NaN passes no threshold.
    fired = margin > 0
    if forced:
        fired |= lanes.flat_forced.index_select(0, looks.cell)
    weight = _weight(margin, fired, looks, lanes)
    if weight is not None:
        lanes.flat_weight.index_copy_(0, looks.weight_cell, weight)
    lanes.flat_score.index_copy_(0, looks.cell, score)
    lanes.flat_fired.index_copy_(0, looks.cell, fired)


def _weight(margin: torch.Tensor, fired: torch.Tensor, looks: Looks, lanes: Lanes) -> torch.Tensor | None:
    """The weight [n] float32 of each look from this site on; None where a firing changes none before the next row."""
    weight = None
    if looks.soft is not None:
        margin.nan_to_num_(nan=-float("inf")).clamp_(-_FLOAT_MAX, _FLOAT_MAX)
        weight = torch.sigmoid(looks.sharpness * margin.float())
        if not looks.all_soft:
            weight = torch.where(looks.soft, weight, lanes.flat_weight.index_select(0, looks.weight_cell))
    if looks.lasting is not None:
        before = lanes.flat_weight.index_select(0, looks.weight_cell) if weight is None else weight
        weight = before.masked_fill(looks.lasting & fired, 1.0)
    return weight


def complete(hidden: torch.Tensor, residual: torch.Tensor | None, rows: torch.Tensor | slice) -> torch.Tensor:
    """Complete rows [n, width] in float32: the sum, where a model hands the stream on in two parts."""
    value = rows_of(hidden, rows).float()
    return value if residual is None else value + rows_of(residual, rows).float()


def rows_of(tensor: torch.Tensor, rows: torch.Tensor | slice) -> torch.Tensor:
    """Rows [n, ...] of a tensor: a view for a slice, a copy for indices, by the quickest call there is."""
    return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)


def _score(value: torch.Tensor, probe: torch.Tensor, looks: Looks) -> torch.Tensor:
    """Dot products [n] of float32 rows [n, width]; a cosine is divided by both norms, and 0 for a zero row."""
    dot = (value * probe).sum(dim=-1)
    if looks.cosine is None:
        return dot
    # In float64: the norms of finite float32 rows neither overflow nor vanish there.
    norms = value.double().norm(dim=-1) * probe.double().norm(dim=-1)
    exact = (value.double() * probe.double()).sum(dim=-1)
    ratio = torch.where(norms > 0, exact / norms.clamp_min(1e-300), torch.zeros_like(exact)).float()
    return torch.where(looks.cosine, ratio, dot)


def added_rows(entries: torch.Tensor, tables: SiteTables) -> torch.Tensor:
    """Rows [n, width] float32 of the pool, by their entries [n]; a copy."""
    return tables.pool.rows.index_select(0, entries).float()


def table_change(value: torch.Tensor, slots: torch.Tensor, site: int, tables: SiteTables, rank: int) -> torch.Tensor:
    """T(x) - x [n, width] float32 of the slots [n] at a site, from the tables.

    value: complete rows [n, width] float32. rank: the largest rank of any of the slots.
    """

    def rows(table: torch.Tensor) -> torch.Tensor:
        """The pool rows that a table [all slots] of the site names for these slots."""
        return added_rows(table.index_select(0, slots), tables)

    change = rows(tables.bias[site])
    if tables.forget is not None:
        change = change - tables.forget[site].index_select(0, slots).unsqueeze(1) * value
    if tables.reads is not None and tables.writes is not None:
        for reads, writes in zip(
            tables.reads[site].unbind(1)[:rank], tables.writes[site].unbind(1)[:rank], strict=True
        ):
            component = (value * rows(reads)).sum(dim=1, keepdim=True)
            change = change + component * rows(writes)
    if tables.clamp is not None and tables.bounds is not None:
        change = change + _clamp(value + change, rows(tables.clamp[site]), tables.bounds[site].index_select(0, slots))
    keeps_norm = tables.normalize[site].index_select(0, slots)
    if bool(keeps_norm.any()):
        rescaled = BaseSteerVectorAlgorithm._renormalize(value, value + change) - value
        change = torch.where(keeps_norm.unsqueeze(1), rescaled, change)
    return change


def _clamp(value: torch.Tensor, direction: torch.Tensor, bounds: torch.Tensor) -> torch.Tensor:
    """The change [n, width] of clamping rows along directions [n, width]; bounds [n, 3], strength 0 for none."""
    component = (value * direction).sum(dim=1)
    low, high, strength = bounds.unbind(dim=1)
    excess = torch.minimum(torch.maximum(component, low), high) - component
    return (strength * excess).unsqueeze(1) * direction


def router_change(
    logits: torch.Tensor, slots: torch.Tensor, site: int, tables: RouterTables, positions: torch.Tensor
) -> torch.Tensor:
    """T(z) - z [n, E] float32 of the slots [n] at a router, all of which are active there. logits: [n, E] float32."""
    pool = tables.pool.rows
    rows = router_rows(
        tables.plan[site][slots],
        pool[tables.raised[site][slots].long()],
        pool[tables.lowered[site][slots].long()],
        tables.draw[site][slots],
        positions,
    )
    return route(logits, rows) - logits


def kept_share(rows: torch.Tensor | slice, lanes: Lanes, gates: GateTable, used_lanes: int) -> torch.Tensor:
    """The share of the static change that attenuating gates leave, [n, 1] float32, for some rows of the step [n]."""
    damp = gates.damp.index_select(0, rows_of(lanes.request, rows))[:, : used_lanes - 1]
    return torch.prod(1.0 - damp * rows_of(lanes.weight, rows)[:, 1:used_lanes], dim=1, keepdim=True)


def in_range(rows: torch.Tensor) -> torch.Tensor:
    """Whether each row [n] is finite and leaves later layers room to add to it."""
    # NaN compares as False.
    return (rows.abs() <= range_limit(rows.dtype)).all(dim=1)


def all_in_range(rows: torch.Tensor) -> bool:
    """Whether every row is so, in one pass over them: every steered row of every site is looked at."""
    if not rows.numel():
        return True
    low, high = rows.aminmax()
    limit = range_limit(rows.dtype)
    # Both are NaN if any number is.
    return -limit <= float(low) and float(high) <= limit


def range_limit(dtype: torch.dtype) -> float:
    """The largest magnitude that a steered row may hold. float16 has no room to give."""
    largest = torch.finfo(dtype).max
    return largest if dtype == torch.float16 else largest / 16
