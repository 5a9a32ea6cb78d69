"""Finds the places in a model where steering reads and writes, by structure rather than by class name.

A decoder stack is a ModuleList whose children hold an attention layer. A block's residual stream is its `hidden_states`
and `residual`, summed, where the model hands the two on apart.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from steergate_server.schema.hooks import HOOKS

SUPPORTED_HOOKS = ("pre_attn", "post_block")
"""The hooks that this version can place an op at."""

SiteOp = Callable[[torch.Tensor, "torch.Tensor | None", int], None]
"""Steers `hidden [rows, width]` in place at a numbered site; `residual` is the other summand of the stream, if any."""


class Site(NamedTuple):
    """One place where steering reads or writes. `layer` is the model's own 0-based block number."""

    layer: int
    hook: str
    width: int

    def __str__(self) -> str:
        return f"{self.layer}:{self.hook}"


class UnrecognisedModelError(RuntimeError):
    """The model has no decoder stack that steering can be placed in."""


def execution_order(sites: Sequence[Site]) -> list[Site]:
    """Sites in the order in which a forward pass meets them."""
    return sorted(sites, key=lambda site: (site.layer, HOOKS.index(site.hook)))


def find_decoder_stack(model: nn.Module, is_attention: Callable[[nn.Module], bool]) -> nn.ModuleList:
    """The ModuleList of decoder blocks. Raises UnrecognisedModelError with one line that says why.

    With several candidates (an encoder beside the decoder, experts inside a block), the outermost stack with the most
    blocks is the decoder.
    """
    stacks = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) > 0
        and any(any(is_attention(inner) for inner in child.modules()) for child in module)
    ]
    outer = [
        (name, module)
        for name, module in stacks
        if not any(name.startswith(f"{other}.") for other, _ in stacks if other != name)
    ]
    if not outer:
        raise UnrecognisedModelError(
            f"{type(model).__name__}: no ModuleList whose children hold an attention layer; steering cannot be placed"
        )
    return max(outer, key=lambda pair: len(pair[1]))[1]


def attach_sites(
    stack: nn.ModuleList, hooks: Sequence[str], width: int, is_missing: Callable[[nn.Module], bool], op: SiteOp
) -> list[Site]:
    """Place `op` at every declared hook of every block of this rank; return the sites in execution order.

    The op's third argument is the site's place in that list. Must run before the model is compiled: the module hooks
    are traced into the graph.
    """
    unknown = [hook for hook in hooks if hook not in SUPPORTED_HOOKS]
    if unknown:
        raise UnrecognisedModelError(
            f"hooks not supported yet: {', '.join(unknown)}; known: {', '.join(SUPPORTED_HOOKS)}"
        )
    blocks = {layer: block for layer, block in enumerate(stack) if not is_missing(block)}
    sites = execution_order([Site(layer, hook, width) for layer in blocks for hook in hooks])
    for number, site in enumerate(sites):
        _ATTACH[site.hook](blocks[site.layer], op, number)
    return sites


def _attach_pre_attn(block: nn.Module, op: SiteOp, number: int) -> None:
    parameters = _forward_parameters(block)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = {**dict(zip(parameters, args, strict=False)), **kwargs}
        op(arguments["hidden_states"], arguments.get("residual"), number)

    if "hidden_states" not in parameters:
        raise UnrecognisedModelError(f"{type(block).__name__}.forward has no argument named hidden_states")
    block.register_forward_pre_hook(before, with_kwargs=True)


def _attach_post_block(block: nn.Module, op: SiteOp, number: int) -> None:
    split = "residual" in _forward_parameters(block)

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001 - torch's signature
        if split:
            op(output[0], output[1], number)
        else:
            op(output[0] if isinstance(output, tuple) else output, None, number)

    block.register_forward_hook(after)


def _forward_parameters(module: nn.Module) -> list[str]:
    return list(inspect.signature(module.forward).parameters)


_ATTACH: dict[str, Callable[[nn.Module, SiteOp, int], None]] = {
    "pre_attn": _attach_pre_attn,
    "post_block": _attach_post_block,
}


def sites_by_layer(sites: Sequence[Site]) -> Iterator[tuple[int, list[Site]]]:
    """Sites grouped by layer, in order."""
    for layer in sorted({site.layer for site in sites}):
        yield layer, [site for site in sites if site.layer == layer]
