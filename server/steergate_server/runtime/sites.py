"""Finds the places in a model where steering reads and writes, by structure rather than by class name.

A decoder stack is a ModuleList whose children hold an attention layer. A block's residual stream is its `hidden_states`
and `residual`, summed, where the model hands the two on apart. Every op steers one tensor in place.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from steergate_server.schema.hooks import HOOKS

SiteOp = Callable[[torch.Tensor, "torch.Tensor | None", int], None]
"""Steers `hidden [rows, width]` in place at a numbered site; `residual` is the other summand of the stream, if any."""

IsAttention = Callable[[nn.Module], bool]
"""Tells the layers that attend from other modules."""

_MLP_NAMES = ("mlp", "block_sparse_moe", "feed_forward", "ffn", "moe")
_OUTPUT_NAMES = ("o_proj", "out_proj", "c_proj", "dense", "wo")
_ROUTER_NAMES = ("gate", "router")
_SECOND_NORM_NAMES = ("pre_feedforward_layernorm", "post_attention_layernorm", "ln_2", "ffn_norm")
"""Names of parts, most specific first. Gemma's `post_attention_layernorm` comes before the addition, so its
`pre_feedforward_layernorm` is the norm that sees the sum."""


class Site(NamedTuple):
    """One place where steering reads or writes. `layer` is the model's own 0-based block number."""

    layer: int
    hook: str
    width: int

    def __str__(self) -> str:
        return f"{self.layer}:{self.hook}"


class UnrecognisedModelError(RuntimeError):
    """The model has no decoder stack, or no place for a declared hook."""


def find_decoder_stack(model: nn.Module, is_attention: IsAttention) -> nn.ModuleList:
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


class Block(NamedTuple):
    """One decoder block and its parts, None where it has no such part."""

    module: nn.Module
    attention: nn.Module | None
    output_projection: nn.Module | None
    second_norm: nn.Module | None
    mlp: nn.Module | None
    router: nn.Module | None


def parts_of(block: nn.Module, is_attention: IsAttention) -> Block:
    """The parts of a decoder block.

    Attention and MLP must be sequential for the second norm to see the residual stream between them: in a block that
    runs them side by side there is no such norm.
    """
    children = dict(block.named_children())
    attention = next((child for child in children.values() if any(map(is_attention, child.modules()))), None)
    mlp = _named(children, _MLP_NAMES)
    inner = dict(attention.named_children()) if attention is not None else {}
    if attention is not None and not any(name in inner for name in _OUTPUT_NAMES):
        # Some models wrap their attention once more.
        inner = {name: module for child in inner.values() for name, module in child.named_children()} | inner
    return Block(
        module=block,
        attention=attention,
        output_projection=_named(inner, _OUTPUT_NAMES),
        second_norm=_named(children, _SECOND_NORM_NAMES),
        mlp=mlp,
        router=_named(dict(mlp.named_children()), _ROUTER_NAMES) if mlp is not None else None,
    )


def attach_sites(
    stack: nn.ModuleList,
    hooks: Sequence[str],
    width: int,
    is_attention: IsAttention,
    is_missing: Callable[[nn.Module], bool],
    op: SiteOp,
) -> list[Site]:
    """Place `op` at every declared hook of every block of this rank; return the sites in execution order.

    width: of the residual stream. The op's third argument is the site's place in the list. Must run before the model is
    compiled: the module hooks are traced into the graph. Raises UnrecognisedModelError for a hook that no block has.
    """
    blocks = {layer: parts_of(block, is_attention) for layer, block in enumerate(stack) if not is_missing(block)}
    placed = [
        (Site(layer, hook, place.width or width), place)
        for layer, block in blocks.items()
        for hook in sorted(hooks, key=HOOKS.index)
        if (place := _PLACES[hook](block)) is not None
    ]
    for hook in hooks:
        if not any(site.hook == hook for site, _ in placed):
            kind = type(stack[0]).__name__
            raise UnrecognisedModelError(f"{kind} has no place for hook {hook!r}; leave it out of --steer-hooks")
    for number, (_, place) in enumerate(placed):
        place.attach(op, number)
    return [site for site, _ in placed]


class _Place(NamedTuple):
    """Where an op can be attached; `width` is 0 for that of the residual stream."""

    attach: Callable[[SiteOp, int], None]
    width: int = 0


def _pre_attn(block: Block) -> _Place | None:
    parameters = _forward_parameters(block.module)
    if "hidden_states" not in parameters:
        return None

    def attach(op: SiteOp, number: int) -> None:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            arguments = {**dict(zip(parameters, args, strict=False)), **kwargs}
            op(arguments["hidden_states"], arguments.get("residual"), number)

        block.module.register_forward_pre_hook(before, with_kwargs=True)

    return _Place(attach)


def _post_block(block: Block) -> _Place | None:
    split = "residual" in _forward_parameters(block.module)

    def attach(op: SiteOp, number: int) -> None:
        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001 - torch's signature
            if split:
                op(output[0], output[1], number)
            else:
                op(_first(output), None, number)

        block.module.register_forward_hook(after)

    return _Place(attach)


def _post_attn(block: Block) -> _Place | None:
    norm = block.second_norm
    if norm is None:
        return None

    def attach(op: SiteOp, number: int) -> None:
        def before(_: nn.Module, args: tuple[Any, ...]) -> None:
            op(args[0], args[1] if len(args) > 1 else None, number)

        norm.register_forward_pre_hook(before)

    return _Place(attach)


def _input_of(module: nn.Module | None, width: int = 0) -> _Place | None:
    if module is None:
        return None

    def attach(op: SiteOp, number: int) -> None:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            op(args[0] if args else next(iter(kwargs.values())), None, number)

        module.register_forward_pre_hook(before, with_kwargs=True)

    return _Place(attach, width)


def _output_of(module: nn.Module | None, width: int = 0) -> _Place | None:
    if module is None:
        return None

    def attach(op: SiteOp, number: int) -> None:
        def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001 - torch's signature
            op(_first(output), None, number)

        module.register_forward_hook(after)

    return _Place(attach, width)


def _attn_heads(block: Block) -> _Place | None:
    projection = block.output_projection
    return _input_of(projection, int(getattr(projection, "input_size", 0)))


def _router_logits(block: Block) -> _Place | None:
    router = block.router
    return _output_of(router, int(getattr(router, "output_size", 0)))


_PLACES: dict[str, Callable[[Block], _Place | None]] = {
    "pre_attn": _pre_attn,
    "attn_heads": _attn_heads,
    "post_attn": _post_attn,
    "mlp_in": lambda block: _input_of(block.mlp),
    "router_logits": _router_logits,
    "mlp_out": lambda block: _output_of(block.mlp),
    "post_block": _post_block,
}


def _named(modules: dict[str, nn.Module], names: Sequence[str]) -> nn.Module | None:
    return next((modules[name] for name in names if name in modules), None)


def _first(output: Any) -> torch.Tensor:
    tensor: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def _forward_parameters(module: nn.Module) -> list[str]:
    return list(inspect.signature(module.forward).parameters)
