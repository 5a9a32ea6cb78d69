"""linear: an affine map in place of the row. T(x) = s (W x + b)."""

from __future__ import annotations

from typing import Any

import torch

from steergate_server.algorithms.base import BaseSteerVectorAlgorithm
from steergate_server.algorithms.registry import register_algorithm


@register_algorithm("linear")
class LinearAlgorithm(BaseSteerVectorAlgorithm):
    """Maps every selected row. Payload: `{"weight": W [width, width], "bias": b [width] or absent}`."""

    def _transform(self, hidden_state: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        """Rows `[num_positions, width]`, computed in float32."""
        bias = params.get("bias")
        mapped = torch.nn.functional.linear(
            hidden_state.float(), params["weight"].float(), None if bias is None else bias.float()
        )
        scaled: torch.Tensor = params["scale_factor"] * mapped
        return scaled.to(hidden_state.dtype)

    @classmethod
    def graph_payload_problem(cls, request: Any = None) -> str | None:  # noqa: ARG003 - the same for every request
        """A full matrix is no table row."""
        return "a full W [width, width] does not lower into the graph"
