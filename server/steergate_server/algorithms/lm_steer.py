"""lm_steer: a low-rank map beside the row. T(x) = x + s (x P1) P2^T (LM-Steer, Han et al. 2023)."""

from __future__ import annotations

from typing import Any

import torch

from steergate_server.algorithms.base import BaseSteerVectorAlgorithm
from steergate_server.algorithms.registry import register_algorithm


@register_algorithm("lm_steer")
class LmSteerAlgorithm(BaseSteerVectorAlgorithm):
    """Adds a low-rank map of the row. Payload: `{"projector1": P1 [width, r], "projector2": P2 [width, r]}`."""

    graph_family = "lowrank"

    def _transform(self, hidden_state: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        """Rows `[num_positions, width]`, computed in float32."""
        rows = hidden_state.float()
        moved = (rows @ params["projector1"].float()) @ params["projector2"].float().T
        changed: torch.Tensor = rows + params["scale_factor"] * moved
        return changed.to(hidden_state.dtype)

    @staticmethod
    def graph_lower(payload: dict[str, Any], scale: float) -> dict[str, torch.Tensor | None]:
        """x + (x A) B with A^T = P1^T and B = s P2^T, both as rows `[r, width]`."""
        return {
            "lowrank_in": payload["projector1"].float().T,
            "lowrank_out": scale * payload["projector2"].float().T,
            "lowrank_bias": None,
        }

    @staticmethod
    def wire_rank(wire: Any) -> int | None:
        """r, the second dimension of P1."""
        return int(wire.projector1.shape[1])
