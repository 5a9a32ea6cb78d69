"""moe_router: change the logits of E experts before top-k. The modes are algorithms.md's.

`soft_random` draws its experts from a counter generator keyed by (seed, layer, absolute position), so that the draw is
the same on every rank, when a row is computed again, and for everyone who shares a prefix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from steergate_server.algorithms.base import BaseSteerVectorAlgorithm
from steergate_server.algorithms.registry import register_algorithm

MODES = ("activate", "deactivate", "soft", "soft_topk", "soft_random")


class RouterRows(NamedTuple):
    """What is done to each of n rows of logits.

    `mode` [n] int64: place in MODES. `strength` [n] float32: lambda. `topk` [n] int64. `epsilon` [n] float32.
    `raised`, `lowered` [n, E] bool: activated (or meant by a soft mode) and deactivated experts. `seed`, `layer`,
    `position` [n] int64.
    """

    mode: torch.Tensor
    strength: torch.Tensor
    topk: torch.Tensor
    epsilon: torch.Tensor
    raised: torch.Tensor
    lowered: torch.Tensor
    seed: torch.Tensor
    layer: torch.Tensor
    position: torch.Tensor


def route(logits: torch.Tensor, rows: RouterRows) -> torch.Tensor:
    """Changed logits [n, E] float32 of logits [n, E] float32."""
    mode = rows.mode.unsqueeze(1)
    toggled = _toggle(logits, rows)
    boost = rows.strength.unsqueeze(1) * logits.std(dim=1, keepdim=True)
    chosen = rows.raised
    chosen = torch.where(mode == MODES.index("soft_topk"), chosen & ~_in_top(logits, rows.topk), chosen)
    chosen = torch.where(mode == MODES.index("soft_random"), _drawn(rows), chosen)
    softened = torch.where(chosen, logits + boost, logits)
    return torch.where(mode <= MODES.index("deactivate"), toggled, softened)


def _toggle(logits: torch.Tensor, rows: RouterRows) -> torch.Tensor:
    normal = torch.log_softmax(logits, dim=1)
    epsilon = rows.epsilon.unsqueeze(1)
    high, low = normal.amax(dim=1, keepdim=True) + epsilon, normal.amin(dim=1, keepdim=True) - epsilon
    # Deactivation is last, so it wins.
    return torch.where(rows.lowered, low, torch.where(rows.raised, high, normal))


def _in_top(logits: torch.Tensor, topk: torch.Tensor) -> torch.Tensor:
    """Whether each logit [n, E] is among the row's topk [n] largest; of equal ones the lower index is."""
    order = logits.argsort(dim=1, descending=True, stable=True)
    return _ranks(order) < topk.unsqueeze(1)


def _ranks(order: torch.Tensor) -> torch.Tensor:
    """The place of each index in its row of an order [n, E]."""
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places.contiguous())


def _drawn(rows: RouterRows) -> torch.Tensor:
    """Random distinct experts [n, E], as many in each row as `raised` names."""
    experts = torch.arange(rows.raised.shape[1], device=rows.raised.device).unsqueeze(0)
    state = _mix(rows.seed.unsqueeze(1))
    for part in (rows.layer.unsqueeze(1), rows.position.unsqueeze(1), experts):
        state = _mix(state ^ _mix(part + 0x1F83D9AB))
    order = state.argsort(dim=1, stable=True)
    return _ranks(order) < rows.raised.sum(dim=1, keepdim=True)


def _mix(value: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64 (Steele et al. 2014) on int64, whose products wrap."""
    value = value + -7046029254386353131  # 0x9E3779B97F4A7C15
    value = (value ^ _shift(value, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    value = (value ^ _shift(value, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return value ^ _shift(value, 31)


def _shift(value: torch.Tensor, bits: int) -> torch.Tensor:
    """A logical right shift; torch's is arithmetic."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


@register_algorithm("moe_router")
class MoeRouterAlgorithm(BaseSteerVectorAlgorithm):
    """Raises, lowers or biases experts. Payload: one layer's settings, with `layer` and `positions` [num_positions]."""

    graph_family = "moe_gate"
    needs_positions = True

    def _transform(self, hidden_state: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        """Rows of logits `[num_positions, experts]`, computed in float32."""
        count, experts = hidden_state.shape
        tables = self.graph_lower({**params, "experts": experts}, 1.0)
        positions = torch.as_tensor(params["positions"])
        keys = ("moe_plan", "moe_raise", "moe_lower", "moe_draw")
        plan, raised, lowered, draw = (_repeated(tables[key], count) for key in keys)
        rows = router_rows(plan, raised, lowered, draw, positions)
        return route(hidden_state.float(), rows).to(hidden_state.dtype)

    @staticmethod
    def graph_lower(payload: dict[str, Any], scale: float) -> dict[str, torch.Tensor | None]:  # noqa: ARG004 - no scale
        """Settings as numbers: (mode, lambda, top-k, epsilon), masks over the payload's `experts`, (seed, layer)."""
        plan = [MODES.index(payload["mode"]), payload["lambda"], payload["topk"], payload["epsilon"]]
        raised, lowered = expert_sides(payload)
        return {
            "moe_plan": torch.tensor(plan, dtype=torch.float32),
            "moe_raise": _mask(raised, payload["experts"]),
            "moe_lower": _mask(lowered, payload["experts"]),
            "moe_draw": torch.tensor([payload["seed"], payload["layer"]], dtype=torch.int64),
        }


def expert_sides(settings: Mapping[str, Any]) -> tuple[list[int], list[int]]:
    """Experts that are raised and lowered: `expert_ids` go to the side that the mode names."""
    raised, lowered = list(settings["activate_ids"]), list(settings["deactivate_ids"])
    (lowered if settings["mode"] == "deactivate" else raised).extend(settings["expert_ids"])
    return raised, lowered


def router_rows(
    plan: torch.Tensor, raised: torch.Tensor, lowered: torch.Tensor, draw: torch.Tensor, positions: torch.Tensor
) -> RouterRows:
    """RouterRows of table rows: plan [n, 4], raised, lowered [n, E], draw [n, 2], and absolute positions [n]."""
    return RouterRows(
        mode=plan[:, 0].long(),
        strength=plan[:, 1],
        topk=plan[:, 2].long(),
        epsilon=plan[:, 3],
        raised=raised > 0,
        lowered=lowered > 0,
        seed=draw[:, 0],
        layer=draw[:, 1],
        position=positions,
    )


def _mask(experts: Sequence[int], count: int) -> torch.Tensor:
    mask = torch.zeros(count)
    mask[list(experts)] = 1.0
    return mask


def _repeated(row: torch.Tensor | None, count: int) -> torch.Tensor:
    assert row is not None
    return row.expand(count, -1)
