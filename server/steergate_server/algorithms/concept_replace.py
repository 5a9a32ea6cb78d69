"""concept_replace: swap a concept. With c = (x.h1) / (h1.h1), T(x) = x + s c (h2 - h1): takes h1 out, puts h2 in."""

from __future__ import annotations

from typing import Any

import torch

from steergate_server.algorithms.base import BaseSteerVectorAlgorithm
from steergate_server.algorithms.registry import register_algorithm


@register_algorithm("concept_replace")
class ConceptReplaceAlgorithm(BaseSteerVectorAlgorithm):
    """Exchanges one direction for another. Payload: `{"h1": [width], "h2": [width]}`, h1 not zero."""

    graph_family = "projection"

    def _transform(self, hidden_state: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        """Rows `[num_positions, width]`, computed in float32."""
        rows = hidden_state.float()
        read, write = _pair(params)
        changed = (rows + params["scale_factor"] * (rows @ read).unsqueeze(-1) * write).to(hidden_state.dtype)
        return self._renormalize(hidden_state, changed) if self.normalize else changed

    @staticmethod
    def graph_lower(payload: dict[str, Any], scale: float) -> dict[str, torch.Tensor | None]:
        """x + (x.p) q with p = h1 / (h1.h1) and q = s (h2 - h1), both `[width]`."""
        read, write = _pair(payload)
        return {"projection_in": read, "projection_out": scale * write}


def _pair(payload: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """h1 / (h1.h1) and h2 - h1, float32 `[width]`. Raises ValueError for an h1 of zeros."""
    h1, h2 = payload["h1"].double(), payload["h2"].double()
    square = h1 @ h1
    if not bool(square > 0):
        raise ValueError("h1 is zero: there is no concept to take out")
    return (h1 / square).float(), (h2 - h1).float()
