"""erase: take a direction out. With u = v / |v|, T(x) = x - s (x.u) u: 1 removes the component, 2 mirrors it."""

from __future__ import annotations

from typing import Any

import torch

from steergate_server.algorithms.base import BaseSteerVectorAlgorithm
from steergate_server.algorithms.registry import register_algorithm
from steergate_server.algorithms.vectors import unit


@register_algorithm("erase")
class EraseAlgorithm(BaseSteerVectorAlgorithm):
    """Removes a share of each row's component along a direction. Payload: `{"direction": v [width]}`, v not zero."""

    separate_scale = True
    graph_family = "projection"

    def _transform(self, hidden_state: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        """Rows `[num_positions, width]`, computed in float32."""
        rows, u = hidden_state.float(), unit(params["direction"])
        return self._finish(hidden_state, rows - params["scale_factor"] * (rows @ u).unsqueeze(-1) * u)

    @staticmethod
    def graph_lower(payload: dict[str, Any], scale: float) -> dict[str, torch.Tensor | None]:
        """x + (x.p) q with p = u and q = -s u, both `[width]`."""
        u = unit(payload["direction"])
        return {"projection_in": u, "projection_out": -scale * u}
