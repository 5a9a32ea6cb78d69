"""loreft: edit the row within a subspace. T(x) = x + s (W x + b - R^T x) R^T, R = rotate_layer [width, r] (LoReFT, Wu
et al. 2024)."""

from __future__ import annotations

from typing import Any

import torch

from steergate_server.algorithms.base import BaseSteerVectorAlgorithm
from steergate_server.algorithms.registry import register_algorithm


@register_algorithm("loreft")
class LoReftAlgorithm(BaseSteerVectorAlgorithm):
    """Moves the row's coordinates in a subspace to a learned target.

    Payload: `{"rotate_layer": R [width, r], "learned_source_weight": W [r, width], "learned_source_bias": b [r] or
    absent}`.
    """

    graph_family = "lowrank"

    def _transform(self, hidden_state: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        """Rows `[num_positions, width]`, computed in float32."""
        rows, rotate = hidden_state.float(), params["rotate_layer"].float()
        target = rows @ params["learned_source_weight"].float().T
        if params.get("learned_source_bias") is not None:
            target = target + params["learned_source_bias"].float()
        changed: torch.Tensor = rows + params["scale_factor"] * (target - rows @ rotate) @ rotate.T
        return changed.to(hidden_state.dtype)

    @staticmethod
    def graph_lower(payload: dict[str, Any], scale: float) -> dict[str, torch.Tensor | None]:
        """x + (x A) B + c: A^T = W - R^T and B = s R^T as rows `[r, width]`, c = s b R^T `[width]`."""
        rotate = payload["rotate_layer"].float()
        bias = payload.get("learned_source_bias")
        return {
            "lowrank_in": payload["learned_source_weight"].float() - rotate.T,
            "lowrank_out": scale * rotate.T,
            "lowrank_bias": None if bias is None else scale * (rotate @ bias.float()),
        }

    @staticmethod
    def wire_rank(wire: Any) -> int | None:
        """r, the second dimension of R."""
        return int(wire.rotate_layer.shape[1])
