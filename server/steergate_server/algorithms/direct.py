"""direct: add a direction. T(x) = x + s v."""

from __future__ import annotations

import torch

from steergate_server.algorithms.base import BaseSteerVectorAlgorithm
from steergate_server.algorithms.registry import register_algorithm


@register_algorithm("direct")
class DirectAlgorithm(BaseSteerVectorAlgorithm):
    """Adds the scaled direction to every selected row."""

    graph_family = "additive"

    def _transform(self, hidden_state: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
        """Rows `[num_positions, width]` plus the scaled direction `[width]`, added in float32."""
        return self._finish(hidden_state, hidden_state.float() + params.float())

    @staticmethod
    def graph_lower(payload: torch.Tensor, scale: float) -> dict[str, torch.Tensor | None]:
        """The additive family's row: the scaled direction `[width]`."""
        return {"additive": payload * scale}
