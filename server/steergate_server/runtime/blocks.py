"""Finds a model's decoder stack and the parts of its blocks, by structure and by the names that parts commonly have.

What a part is taken for here is a guess: `rehearsal.py` proves it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import nn

IsAttention = Callable[[nn.Module], bool]
"""Tells the layers of a decoder that attend from other modules."""

_MLP_NAMES = ("mlp", "block_sparse_moe", "feed_forward", "ffn", "moe")
_MLP_ENDS = ("fc1", "fc2")
"""First and last layer of an MLP that is spread over its block, as OPT has it."""
_OUTPUT_NAMES = ("o_proj", "out_proj", "c_proj", "dense", "wo")
_ROUTER_NAMES = ("gate", "router")


class UnrecognisedModelError(RuntimeError):
    """The model has no decoder stack that we can steer exactly, or no place for a declared hook."""


def find_decoder_stack(model: nn.Module, is_attention: IsAttention) -> nn.ModuleList:
    """The ModuleList of decoder blocks. Raises UnrecognisedModelError with one line that says why there is none.

    model: the language model alone, where it is a part of something larger. Lists inside a block don't count. Lists
    that share their blocks with a longer one (a view of its first half) are that one.
    """
    stacks = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and any(map(is_attention, module.modules()))
    }
    outer = {
        name: module for name, module in stacks.items() if not any(name.startswith(f"{other}.") for other in stacks)
    }
    whole = {
        name: module for name, module in outer.items() if not any(set(module) < set(other) for other in outer.values())
    }
    kind = type(model).__name__
    if not whole:
        raise UnrecognisedModelError(
            f"{kind}: no ModuleList whose children hold a decoder's attention layer; steering cannot be placed"
        )
    if len(whole) > 1:
        found = ", ".join(f"{name} ({len(module)} blocks)" for name, module in whole.items())
        raise UnrecognisedModelError(f"{kind}: several stacks could be the decoder: {found}; steering cannot be placed")
    (stack,) = whole.values()
    if len(set(stack)) < len(stack):
        raise UnrecognisedModelError(f"{kind}: one block stands at several layers, which cannot be steered apart")
    return stack


class Block(NamedTuple):
    """One decoder block and its parts, None where it has no such part. An MLP may be one module or several."""

    module: nn.Module
    output_projection: nn.Module | None
    mlp_first: nn.Module | None
    mlp_last: nn.Module | None
    router: nn.Module | None


def parts_of(block: nn.Module, is_attention: IsAttention) -> Block:
    """The parts of a decoder block. One with several attention layers keeps them to itself."""
    children = dict(block.named_children())
    attending = [child for child in children.values() if any(map(is_attention, child.modules()))]
    if sum(map(is_attention, block.modules())) > 1:
        return Block(block, None, None, None, None)
    projection = _projection(children, attending[0], is_attention) if attending else None
    mlp = _named(children, _MLP_NAMES)
    router = None
    if mlp is not None:
        inner = dict(mlp.named_children())
        router = _named(inner, _ROUTER_NAMES) if any("expert" in name for name in inner) else None
    first, last = (mlp, mlp) if mlp is not None else (_named(children, (name,)) for name in _MLP_ENDS)
    return Block(block, projection, first, last, router)


def _projection(children: dict[str, nn.Module], attention: nn.Module, is_attention: IsAttention) -> nn.Module | None:
    if is_attention(attention):  # the block itself holds what is around the attention layer
        return _named(children, _OUTPUT_NAMES)
    inner = dict(attention.named_children())
    found = _named(inner, _OUTPUT_NAMES)
    if found is None:  # some models wrap their attention once more
        found = _named(
            {name: module for child in inner.values() for name, module in child.named_children()}, _OUTPUT_NAMES
        )
    return found


def _named(modules: dict[str, nn.Module], names: Sequence[str]) -> nn.Module | None:
    return next((modules[name] for name in names if name in modules), None)
