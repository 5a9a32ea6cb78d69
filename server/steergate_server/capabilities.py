"""What each algorithm takes: payload kind, native file kind, parameters, component."""

from msgspec import Struct

__all__ = ["ALGORITHM_CAPABILITIES", "AlgorithmCapabilities"]


class AlgorithmCapabilities(Struct, frozen=True):
    """What one algorithm takes.

    Args:
        payload_kind: The payload kind that it works with; None for an algorithm that lives on `params` alone.
        source: The native file kind that its payload may come from: `gguf`, `directory`, `json` or `none`.
        normalize: Whether a request may ask for rows to be rescaled to their norm before the change.
        params: The keys that a request's `params` may have.
        target_component: What it works on: `hidden_states`, `attention_heads` or `router_logits`.
    """

    payload_kind: str | None
    source: str
    normalize: bool = False
    params: tuple[str, ...] = ()
    target_component: str = "hidden_states"


ALGORITHM_CAPABILITIES: dict[str, AlgorithmCapabilities] = {
    "direct": AlgorithmCapabilities("direction", "gguf", normalize=True),
    "attention_add": AlgorithmCapabilities("direction", "gguf", target_component="attention_heads"),
    "erase": AlgorithmCapabilities("direction", "gguf", normalize=True),
    "replace": AlgorithmCapabilities("direction", "gguf", normalize=True),
    "concept_replace": AlgorithmCapabilities("concept_pair", "directory", normalize=True),
    "linear": AlgorithmCapabilities("linear", "none"),
    "lm_steer": AlgorithmCapabilities("lowrank", "none"),
    "loreft": AlgorithmCapabilities("reft", "none"),
    "clamp": AlgorithmCapabilities("direction", "gguf", params=("min", "max", "value")),
    "moe_router": AlgorithmCapabilities(
        "router",
        "json",
        params=("expert_ids", "activate_ids", "deactivate_ids", "mode", "lambda", "topk", "epsilon", "seed"),
        target_component="router_logits",
    ),
}
"""By name. Third-party algorithms add theirs when their entry point is loaded."""
