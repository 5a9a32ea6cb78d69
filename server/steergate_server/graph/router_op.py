"""The op of a router's site without a question to the host: what `kernels.router_change` does, over all rows.

In PyTorch, some sixty small kernels, which a captured graph can hold. They run at every step, steered or not.
"""

from __future__ import annotations

import torch

from steergate_server.graph.kernels import in_range, router_change
from steergate_server.graph.lanes import GateTable, Lanes
from steergate_server.graph.tables import RouterTables


def steer_router(
    logits: torch.Tensor,
    count: torch.Tensor,
    lanes: Lanes,
    gates: GateTable,
    touches: torch.Tensor,
    tables: RouterTables,
    site: int,
    locked: torch.Tensor | None,
    fault: torch.Tensor,
) -> None:
    """Steer `logits` [n, E] in place.

    count [1]: rows of the step. touches [slots] bool: what each slot does anything at this site. site: the router's
    number in its tables. locked [rows] int32: slots that come last, unattenuated. fault [slots] int32: counted up for
    the slots of rows that would leave the range, which stay as they were.
    """
    rows = logits.shape[0]
    real = torch.arange(rows, device=logits.device) < count
    slots, positions = lanes.slot[:rows].long(), lanes.position[:rows]
    before = logits.float()
    damp = gates.damp[lanes.request[:rows].long()]
    kept = torch.prod(1.0 - damp * lanes.weight[:rows, 1:], dim=1)
    after, acts = _routed(before, slots[:, 0], positions, touches, tables, site, kept)
    if locked is not None:
        last = locked[:rows].long()
        after, acts_last = _routed(after, last, positions, touches, tables, site, torch.ones_like(kept))
        acts = acts | acts_last
        slots = torch.cat((slots, torch.where(slots.any(dim=1), 0, last).unsqueeze(1)), dim=1)
    acts = acts & real
    changed = after.to(logits.dtype)
    spoiled = acts & ~in_range(changed) & in_range(logits)
    logits.copy_(torch.where((acts & ~spoiled).unsqueeze(1), changed, logits))
    blamed = spoiled.unsqueeze(1) & (slots != 0)
    fault.scatter_add_(0, slots.flatten(), blamed.flatten().to(fault.dtype))


def _routed(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    touches: torch.Tensor,
    tables: RouterTables,
    site: int,
    kept: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [n, E] float32 as slots [n] change them, times kept [n], and whether they do anything [n]."""
    acts = touches[slots]
    change = router_change(logits, slots, site, tables, positions) * kept.unsqueeze(1)
    return torch.where(acts.unsqueeze(1), logits + change, logits), acts
