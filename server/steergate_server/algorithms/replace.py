"""replace: put a direction in place of the row. T(x) = s v."""

from __future__ import annotations

import torch

from steergate_server.algorithms.base import BaseSteerVectorAlgorithm
from steergate_server.algorithms.registry import register_algorithm


@register_algorithm("replace")
class ReplaceAlgorithm(BaseSteerVectorAlgorithm):
    """Overwrites every selected row with the scaled direction. Payload: v `[width]`."""

    graph_family = "replace"

    def _transform(self, hidden_state: torch.Tensor, params: torch.Tensor) -> torch.Tensor:
        """Rows `[num_positions, width]`, each the scaled direction."""
        return self._finish(hidden_state, params.float().expand_as(hidden_state).clone())

    @staticmethod
    def graph_lower(payload: torch.Tensor, scale: float) -> dict[str, torch.Tensor | None]:
        """The row that takes the place of x: the scaled direction `[width]`."""
        return {"replace": payload * scale}
