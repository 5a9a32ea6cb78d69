"""The hooks of a decoder block: their execution order, the component each belongs to, who may use them."""

from typing import Literal, NamedTuple

__all__ = ["GATE_STEERED_HOOKS", "HOOKS", "HOOK_COMPONENTS", "PROBED_HOOKS", "Component", "site_name", "site_order"]

Component = Literal["hidden_states", "attention_heads", "router_logits"]


class _Hook(NamedTuple):
    name: str
    component: Component
    gates: bool
    """Whether gates may probe the hook and steer it."""


_TABLE = (
    _Hook("pre_attn", "hidden_states", gates=True),
    _Hook("attn_heads", "attention_heads", gates=False),
    _Hook("post_attn", "hidden_states", gates=True),
    _Hook("mlp_in", "hidden_states", gates=True),
    _Hook("router_logits", "router_logits", gates=False),
    _Hook("mlp_out", "hidden_states", gates=True),
    _Hook("post_block", "hidden_states", gates=True),
)

HOOKS: tuple[str, ...] = tuple(hook.name for hook in _TABLE)
"""Every hook, in the order in which one decoder block runs them."""

HOOK_COMPONENTS: dict[str, Component] = {hook.name: hook.component for hook in _TABLE}
"""The model component that a hook's value belongs to."""

PROBED_HOOKS: frozenset[str] = frozenset(hook.name for hook in _TABLE if hook.gates)
"""The hooks that a probe may read."""

GATE_STEERED_HOOKS: frozenset[str] = frozenset(hook.name for hook in _TABLE if hook.gates)
"""The hooks that a gate's `add` may write."""

_RANK = {name: rank for rank, name in enumerate(HOOKS)}


def site_order(hook: str, layer: int) -> tuple[int, int]:
    """Return the sort key of a site: sites that run earlier sort first.

    Raises:
        KeyError: `hook` is none of `HOOKS`.
    """
    return layer, _RANK[hook]


def site_name(hook: str, layer: int) -> str:
    """Write a site as people read it: `12:post_block`."""
    return f"{layer}:{hook}"
