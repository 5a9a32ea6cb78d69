"""What the op of a site does, in PyTorch: score the gates that probe here, then steer.

The order is the specification's (gates.md): a probe reads the value before any steering at its own site and after all
steering at earlier ones; then the static change applies, times its attenuation; then the gates' vectors are added.
"""

from __future__ import annotations

import torch

from steergate_server.algorithms.base import BaseSteerVectorAlgorithm
from steergate_server.algorithms.moe_router import route, router_rows
from steergate_server.graph.lanes import BELOW, COSINE, LASTING, SOFT, GateTable, Lanes
from steergate_server.graph.tables import RouterTables, SiteTables

_FLOAT_MAX = torch.finfo(torch.float32).max


def score_gates(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    site: int,
    rows: int,
    lanes: Lanes,
    gates: GateTable,
    probes: torch.Tensor,
) -> None:
    """Score every (row, gate) that looks at this site; write `score`, `fired` and the lanes' weights.

    hidden, residual: [>= rows, width]; the value probed is their sum, in float32. probes: [entries, width] float32.
    """
    request = lanes.request[:rows].long()
    looking = lanes.look[:rows] & (gates.site[request] == site)
    row, gate = looking.nonzero(as_tuple=True)
    if row.numel() == 0:
        return
    owner = request[row]
    mode = gates.mode[owner, gate]
    score = _score(complete(hidden, residual, row), probes[gates.probe[owner, gate].long()], (mode & COSINE) != 0)
    # Compared in float64: the threshold keeps the value that the client wrote.
    margin = score.double() - gates.threshold[owner, gate]
    margin = torch.where((mode & BELOW) != 0, -margin, margin).nan_to_num(nan=-float("inf"))
    fired = (margin > 0) | lanes.forced[row, gate]
    argument = gates.sharpness[owner, gate] * margin.clamp(-_FLOAT_MAX, _FLOAT_MAX).float()
    weight = lanes.weight[row, gate + 1]
    weight = torch.where((mode & SOFT) != 0, torch.sigmoid(argument), weight)
    weight = torch.where(((mode & LASTING) != 0) & fired, torch.ones_like(weight), weight)
    lanes.weight[row, gate + 1] = weight
    lanes.score[row, gate] = score
    lanes.fired[row, gate] = fired


def complete(hidden: torch.Tensor, residual: torch.Tensor | None, rows: torch.Tensor | slice) -> torch.Tensor:
    """Complete rows [n, width] in float32: the sum, where a model hands the stream on in two parts."""
    value = hidden[rows].float()
    return value if residual is None else value + residual[rows].float()


def _score(value: torch.Tensor, probe: torch.Tensor, cosine: torch.Tensor) -> torch.Tensor:
    """Dot products [n] of float32 rows [n, width]; where `cosine` [n], divided by both norms, 0 for a zero row."""
    dot = (value * probe).sum(dim=-1)
    if not bool(cosine.any()):
        return dot
    # In float64: the norms of finite float32 rows neither overflow nor vanish there.
    norms = value.double().norm(dim=-1) * probe.double().norm(dim=-1)
    exact = (value.double() * probe.double()).sum(dim=-1)
    ratio = torch.where(norms > 0, exact / norms.clamp_min(1e-300), torch.zeros_like(exact)).float()
    return torch.where(cosine, ratio, dot)


def table_change(
    value: torch.Tensor | None, slots: torch.Tensor, site: int, tables: SiteTables, rank: int
) -> torch.Tensor:
    """T(x) - x [n, width] float32 of the slots [n] at a site, from the tables.

    value: complete rows [n, width] float32; None promises that every slot is no more than a bias there. rank: the
    largest rank of any of the slots.
    """
    pool = tables.pool.rows
    change = pool[tables.bias[site][slots].long()].float()
    if value is None:
        return change
    if tables.forget is not None:
        change = change - tables.forget[site][slots].unsqueeze(1) * value
    if tables.reads is not None and tables.writes is not None:
        reads, writes = tables.reads[site][slots].long(), tables.writes[site][slots].long()
        for term in range(rank):
            component = (value * pool[reads[:, term]].float()).sum(dim=1, keepdim=True)
            change = change + component * pool[writes[:, term]].float()
    if tables.clamp is not None and tables.bounds is not None:
        change = change + _clamp(
            value + change, pool[tables.clamp[site][slots].long()].float(), tables.bounds[site][slots]
        )
    keeps_norm = tables.normalize[site][slots]
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
    """The share of the static change that attenuating gates leave, [n] float32, for some rows of the step [n]."""
    damp = gates.damp[lanes.request[rows].long()][:, : used_lanes - 1]
    return torch.prod(1.0 - damp * lanes.weight[rows, 1:used_lanes], dim=1)


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
