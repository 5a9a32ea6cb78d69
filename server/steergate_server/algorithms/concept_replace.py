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
        return self._finish(hidden_state, rows + params["scale_factor"] * (rows @ read).unsqueeze(-1) * write)

    @staticmethod
    def graph_lower(payload: dict[str, Any], scale: float) -> dict[str, torch.Tensor | None]:
        """x + (x.p) q with p = h1 / |h1| and q = s (h2 - h1) / |h1|, both `[width]`."""
        read, write = _pair(payload)
        return {"projection_in": read, "projection_out": scale * write}


def _pair(payload: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """h1 / |h1| and (h2 - h1) / |h1|, float32 `[width]`. Raises ValueError for an h1 of zeros.

    Shared out evenly: h1 / (h1.h1) would leave float32's range for a short h1, and float16's for a long one.
    """
    h1, h2 = payload["h1"].double(), payload["h2"].double()
    norm = h1.norm()
    if not bool(norm > 0):
        raise ValueError("h1 is zero: there is no concept to take out")
    return (h1 / norm).float(), ((h2 - h1) / norm).float()
