"""attention_add: add a direction to the concatenated head outputs. T(o) = o + s v, before the output projection."""

from __future__ import annotations

from steergate_server.algorithms.direct import DirectAlgorithm
from steergate_server.algorithms.registry import register_algorithm


@register_algorithm("attention_add")
class AttentionAddAlgorithm(DirectAlgorithm):
    """The addition of `direct` on attention heads. Payload: v `[heads * head_size]`, all ranks' heads."""
