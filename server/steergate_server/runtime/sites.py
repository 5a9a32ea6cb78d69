"""The places in a model where steering reads and writes, and the op that stands at each.

Where they are is found by structure (`blocks.py`) and proven by a trial (`rehearsal.py`). A block's residual stream is
one tensor, or two that are to be summed. Every op steers one tensor in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from steergate_server.runtime.blocks import Block, IsAttention, UnrecognisedModelError, parts_of
from steergate_server.runtime.rehearsal import SameEverywhere, Ways, rehearse
from steergate_server.runtime.stage import call_of, first_tensor, forward_parameters, rows_of, summands
from steergate_server.schema.hooks import HOOKS

SiteOp = Callable[[torch.Tensor, "torch.Tensor | None", int], None]
"""Steers `hidden [rows, width]` in place at a numbered site; `residual` is the other summand of the stream, if any."""


Share = Callable[[nn.Module], "tuple[int, int] | None"]
"""Over which ranks the rows that a module is given are split: (this rank, ranks). None: that is not known."""


class Site(NamedTuple):
    """One place where steering reads or writes. `layer` is the model's own 0-based block number.

    `width`: elements of a complete row. `part`: where the rank's own elements start in it and end, if rows are split
    over ranks there.
    """

    layer: int
    hook: str
    width: int
    part: tuple[int, int] | None = None

    @property
    def own_width(self) -> int:
        """Elements of a row on this rank."""
        return self.width if self.part is None else self.part[1] - self.part[0]

    def __str__(self) -> str:
        return f"{self.layer}:{self.hook}"


def attach_sites(
    stack: nn.ModuleList,
    hooks: Sequence[str],
    width: int,
    is_attention: IsAttention,
    is_missing: Callable[[nn.Module], bool],
    op: SiteOp,
    run: Callable[[], object],
    share: Share = lambda _: (0, 1),
    same: SameEverywhere = lambda _: True,
) -> list[Site]:
    """Place `op` at every declared hook of every block of this rank; return the sites in execution order.

    width: of the residual stream. The op's third argument is the site's place in the list. `run` runs one small forward
    of the model, not compiled: the blocks are tried out in it. Must come before the model is compiled: the module
    hooks are traced into the graph. `share` and `same` are for models that are split over ranks, each of which calls
    this function: a hook at which ranks hold other rows is none, but for attention's heads. Raises
    UnrecognisedModelError for a block that is not understood, and for a hook that no block has.
    """
    layers = [layer for layer, block in enumerate(stack) if not is_missing(block)]
    blocks = [parts_of(stack[layer], is_attention) for layer in layers]
    ways = rehearse(blocks, width, run, same)
    placed = [
        (site, block, way)
        for layer, block, way in zip(layers, blocks, ways, strict=True)
        for hook in sorted(hooks, key=HOOKS.index)
        if hook in way.hooks and (site := _site(layer, hook, way.hooks[hook], block, share)) is not None
    ]
    for hook in hooks:
        if not any(site.hook == hook for site, _, _ in placed):
            has = ", ".join(known for known in HOOKS if any(known in way.hooks for way in ways))
            raise UnrecognisedModelError(
                f"{type(blocks[0].module).__name__} has no place for hook {hook!r}; leave it out of --steer-hooks. "
                f"It has {has}."
            )
    for number, (site, block, way) in enumerate(placed):
        _ATTACH[site.hook](block, way, _numbered(op, number))
    return [site for site, _, _ in placed]


def _site(layer: int, hook: str, width: int, block: Block, share: Share) -> Site | None:
    """A site at which this rank has rows of some width; None where it is not known what rows they are a part of."""
    if hook != "attn_heads":
        return Site(layer, hook, width)
    assert block.output_projection is not None
    split = share(block.output_projection)
    if split is None:
        return None
    rank, ranks = split
    return Site(layer, hook, width * ranks, None if ranks == 1 else (rank * width, (rank + 1) * width))


_Op = Callable[[torch.Tensor, "torch.Tensor | None"], None]
"""The op of one site."""


def _numbered(op: SiteOp, number: int) -> _Op:
    def steer(hidden: torch.Tensor, residual: torch.Tensor | None) -> None:
        op(hidden, residual, number)

    return steer


def _stream(hidden: torch.Tensor, residual: object, op: _Op) -> None:
    op(rows_of(hidden), rows_of(residual) if isinstance(residual, torch.Tensor) else None)


def _pre_attn(block: Block, ways: Ways, op: _Op) -> None:
    parameters = forward_parameters(block.module)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        call = call_of(parameters, args, kwargs)
        _stream(call[ways.stream], call.get(ways.residual) if ways.residual else None, op)

    block.module.register_forward_pre_hook(before, with_kwargs=True)


def _post_block(block: Block, ways: Ways, op: _Op) -> None:
    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001 - torch's signature
        _stream(first_tensor(output), output[1] if ways.residual else None, op)

    block.module.register_forward_hook(after)


def _post_attn(block: Block, ways: Ways, op: _Op) -> None:
    assert ways.post_attn is not None

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stream = summands(args, kwargs)
        assert stream is not None
        _stream(*stream, op)

    block.module.get_submodule(ways.post_attn).register_forward_pre_hook(before, with_kwargs=True)


def _input_of(module: nn.Module | None, op: _Op, *, copy: bool = False) -> None:
    assert module is not None

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        given = args[0] if args else next(iter(kwargs.values()))
        if not copy:
            op(rows_of(given), None)
            return None
        given = given.clone()
        op(rows_of(given), None)
        return ((given, *args[1:]), kwargs) if args else (args, {**kwargs, next(iter(kwargs)): given})

    module.register_forward_pre_hook(before, with_kwargs=True)


def _output_of(module: nn.Module | None, op: _Op) -> None:
    assert module is not None

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001 - torch's signature
        op(rows_of(first_tensor(output)), None)

    module.register_forward_hook(after)


_ATTACH: dict[str, Callable[[Block, Ways, _Op], None]] = {
    "pre_attn": _pre_attn,
    "attn_heads": lambda block, _, op: _input_of(block.output_projection, op),
    "post_attn": _post_attn,
    "mlp_in": lambda block, ways, op: _input_of(block.mlp_first, op, copy=ways.copies_mlp_input),
    "router_logits": lambda block, _, op: _output_of(block.router, op),
    "mlp_out": lambda block, _, op: _output_of(block.mlp_last, op),
    "post_block": _post_block,
}
