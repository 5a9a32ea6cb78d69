"""What the op of a site does, in PyTorch: score the gates that probe here, then steer.

The order is the specification's (gates.md): a probe reads the value before any steering at its own site and after all
steering at earlier ones; then the static change applies, times its attenuation; then the gates' vectors are added.
"""

from __future__ import annotations

import torch

from steergate_server.graph.lanes import BELOW, COSINE, LASTING, SOFT, GateTable, Lanes

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
    value = hidden[row].float()
    if residual is not None:
        value = value + residual[row].float()
    mode = gates.mode[owner, gate]
    score = _score(value, probes[gates.probe[owner, gate].long()], (mode & COSINE) != 0)
    # Compared in float64: the threshold keeps the value that the client wrote.
    margin = score.double() - gates.threshold[owner, gate]
    margin = torch.where((mode & BELOW) != 0, -margin, margin).nan_to_num(nan=-float("inf"))
    fired = margin > 0
    argument = gates.sharpness[owner, gate] * margin.clamp(-_FLOAT_MAX, _FLOAT_MAX).float()
    weight = lanes.weight[row, gate + 1]
    weight = torch.where((mode & SOFT) != 0, torch.sigmoid(argument), weight)
    weight = torch.where(((mode & LASTING) != 0) & fired, torch.ones_like(weight), weight)
    lanes.weight[row, gate + 1] = weight
    lanes.score[row, gate] = score
    lanes.fired[row, gate] = fired


def _score(value: torch.Tensor, probe: torch.Tensor, cosine: torch.Tensor) -> torch.Tensor:
    """Dot products [n] of float32 rows [n, width]; where `cosine` [n], divided by both norms, 0 for a zero row."""
    dot = (value * probe).sum(dim=-1)
    if not bool(cosine.any()):
        return dot
    norms = value.norm(dim=-1) * probe.norm(dim=-1)
    ratio = torch.where(norms > 0, dot / norms.clamp_min(torch.finfo(torch.float32).tiny), torch.zeros_like(dot))
    return torch.where(cosine, ratio, dot)


def add_lanes(
    hidden: torch.Tensor,
    rows: int,
    lanes: Lanes,
    gates: GateTable,
    entries: torch.Tensor,
    pool: torch.Tensor,
    used_lanes: int,
    attenuated: bool,
) -> torch.Tensor:
    """Add every lane's pool row, times its weight, to `hidden` [>= rows, width] in place; return the weights used.

    entries: [rows, 1 + gates] int64 pool entries at this site. Sums are taken in float32 and rounded once. Rows whose
    entries are all 0 are not touched.
    """
    weight = lanes.weight[:rows, :used_lanes]
    if attenuated:
        damp = gates.damp[lanes.request[:rows].long()][:, : used_lanes - 1]
        kept = torch.prod(1.0 - damp * weight[:, 1:], dim=1)
        weight = torch.cat((weight[:, :1] * kept.unsqueeze(1), weight[:, 1:]), dim=1)
    active = (entries != 0).any(dim=1).nonzero(as_tuple=True)[0]
    change = torch.zeros((active.numel(), hidden.shape[1]), dtype=torch.float32, device=hidden.device)
    for lane in range(used_lanes):
        change.addcmul_(pool[entries[active, lane]].float(), weight[active, lane].unsqueeze(1))
    hidden[active] = (hidden[active].float() + change).to(hidden.dtype)
    return weight
