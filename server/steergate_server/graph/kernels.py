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

    `row`, `gate`, `probe` (entry of the probe pool) int64; `threshold` float64, `sharpness` float32; `soft`, `lasting`,
    `below`, `cosine`, `forced` bool; `weight` float32: that of the lane before the site. `cosines`: whether any of them
    is a cosine.
    """

    row: torch.Tensor
    gate: torch.Tensor
    probe: torch.Tensor
    threshold: torch.Tensor
    sharpness: torch.Tensor
    soft: torch.Tensor
    lasting: torch.Tensor
    below: torch.Tensor
    cosine: torch.Tensor
    forced: torch.Tensor
    weight: torch.Tensor
    cosines: bool


def looks_by_site(rows: int, lanes: Lanes, gates: GateTable) -> dict[int, Looks]:
    """Who looks where in a step of so many rows, gathered once for all sites: a look at each would cost more."""
    request = lanes.request[:rows].long()
    site = gates.site[request]
    row, gate = (lanes.look[:rows] & (site >= 0)).nonzero(as_tuple=True)
    at = site[row, gate]
    found = {}
    for number in set(at.tolist()):
        here = at == number
        mine, lane = row[here], gate[here]
        owner = request[mine]
        mode = gates.mode[owner, lane]
        cosine = (mode & COSINE) != 0
        found[number] = Looks(
            row=mine,
            gate=lane,
            probe=gates.probe[owner, lane].long(),
            threshold=gates.threshold[owner, lane],
            sharpness=gates.sharpness[owner, lane],
            soft=(mode & SOFT) != 0,
            lasting=(mode & LASTING) != 0,
            below=(mode & BELOW) != 0,
            cosine=cosine,
            forced=lanes.forced[mine, lane],
            weight=lanes.weight[mine, lane + 1],
            cosines=bool(cosine.any()),
        )
    return found


def score_gates(
    hidden: torch.Tensor, residual: torch.Tensor | None, looks: Looks, lanes: Lanes, probes: torch.Tensor
) -> None:
    """Score every (row, gate) that looks at this site; write `score`, `fired` and the lanes' weights.

    hidden, residual: [>= rows, width]; the value probed is their sum, in float32. probes: [entries, width] float32.
    """
    row, gate = looks.row, looks.gate
    score = _score(complete(hidden, residual, row), probes[looks.probe], looks)
    # Compared in float64: the threshold keeps the value that the client wrote.
    margin = score.double() - looks.threshold
    margin = torch.where(looks.below, -margin, margin).nan_to_num(nan=-float("inf"))
    fired = (margin > 0) | looks.forced
    argument = looks.sharpness * margin.clamp(-_FLOAT_MAX, _FLOAT_MAX).float()
    weight = torch.where(looks.soft, torch.sigmoid(argument), looks.weight)
    lanes.weight[row, gate + 1] = weight.masked_fill(looks.lasting & fired, 1.0)
    lanes.score[row, gate] = score
    lanes.fired[row, gate] = fired


def complete(hidden: torch.Tensor, residual: torch.Tensor | None, rows: torch.Tensor | slice) -> torch.Tensor:
    """Complete rows [n, width] in float32: the sum, where a model hands the stream on in two parts."""
    value = hidden[rows].float()
    return value if residual is None else value + residual[rows].float()


def _score(value: torch.Tensor, probe: torch.Tensor, looks: Looks) -> torch.Tensor:
    """Dot products [n] of float32 rows [n, width]; a cosine is divided by both norms, and 0 for a zero row."""
    dot = (value * probe).sum(dim=-1)
    if not looks.cosines:
        return dot
    # In float64: the norms of finite float32 rows neither overflow nor vanish there.
    norms = value.double().norm(dim=-1) * probe.double().norm(dim=-1)
    exact = (value.double() * probe.double()).sum(dim=-1)
    ratio = torch.where(norms > 0, exact / norms.clamp_min(1e-300), torch.zeros_like(exact)).float()
    return torch.where(looks.cosine, ratio, dot)


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
