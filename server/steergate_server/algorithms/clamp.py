"""clamp: bound a row's component. With u = v / |v| and p = x.u, T(x) = x + s (clip(p, min, max) - p) u."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from steergate_server.algorithms.base import BaseSteerVectorAlgorithm
from steergate_server.algorithms.registry import register_algorithm
from steergate_server.algorithms.vectors import unit


@register_algorithm("clamp")
class ClampAlgorithm(BaseSteerVectorAlgorithm):
    """Holds each row's component along a direction within bounds, 0 < s <= 1.

    Payload: `{"direction": v [width], "min": float, "max": float}`, or `"value"` for both bounds; v not zero.
    """

    separate_scale = True
    graph_family = "clamp"

    def _transform(self, hidden_state: torch.Tensor, params: dict[str, Any]) -> torch.Tensor:
        """Rows `[num_positions, width]`, computed in float32."""
        rows, u = hidden_state.float(), unit(params["direction"])
        low, high = bounds(params)
        component = rows @ u
        excess = component.clamp(low, high) - component
        bounded: torch.Tensor = rows + params["scale_factor"] * excess.unsqueeze(-1) * u
        return bounded.to(hidden_state.dtype)

    @staticmethod
    def graph_lower(payload: dict[str, Any], scale: float) -> dict[str, torch.Tensor | None]:
        """The unit direction `[width]`, and (low, high, strength) `[3]`."""
        low, high = bounds(payload)
        return {
            "clamp_direction": unit(payload["direction"]),
            "clamp_bounds": torch.tensor([low, high, scale], dtype=torch.float32),
        }


def bounds(params: Mapping[str, Any]) -> tuple[float, float]:
    """(low, high) of a clamp's parameters; a missing one is infinite. `value` pins both.

    Raises ValueError where there is no bound, `value` stands beside another, or min exceeds max.
    """
    value, low, high = (params.get(name) for name in ("value", "min", "max"))
    if value is not None:
        if low is not None or high is not None:
            raise ValueError("'value' pins both bounds; leave 'min' and 'max' out")
        return float(value), float(value)
    if low is None and high is None:
        raise ValueError("clamp needs a bound: 'min', 'max' or 'value'")
    found = (-math.inf if low is None else float(low), math.inf if high is None else float(high))
    if found[0] > found[1]:
        raise ValueError(f"min {found[0]} exceeds max {found[1]}")
    return found
