"""Records one forward of a model, and plays single blocks of it again, with other inputs and with edits inside."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from steergate_server.runtime.blocks import Block, UnrecognisedModelError

Call = dict[str, Any]
"""The arguments of one call of a block, by parameter."""

Write = Callable[[torch.Tensor], object]
"""Changes rows `[rows, width]` in place."""


def rows_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor `[rows, width]`, or `[1, rows, width]` as Hugging Face's blocks have it, as a view `[rows, width]`."""
    return tensor.squeeze(0) if tensor.dim() == 3 else tensor


def first_tensor(output: Any) -> torch.Tensor:
    """A module's output, or the first of several."""
    tensor: torch.Tensor = output[0] if isinstance(output, (tuple, list)) else output
    return tensor


def call_of(parameters: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
    """Arguments by parameter."""
    return {**dict(zip(parameters, args, strict=False)), **kwargs}


def forward_parameters(module: nn.Module) -> list[str]:
    """Names of the parameters of a module's forward, in order."""
    return list(inspect.signature(module.forward).parameters)


def summands(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """The stream that a norm is given, to add up if it is two; None where there is none."""
    first, second, *_ = (*args, *kwargs.values(), None, None)
    if not isinstance(first, torch.Tensor):
        return None
    return first, second if isinstance(second, torch.Tensor) and second.shape == first.shape else None


def record(blocks: Sequence[Block], run: Callable[[], object]) -> list[Call]:
    """The arguments of each block's call in one forward."""
    calls: list[Call] = [{} for _ in blocks]

    def note(number: int) -> Callable[..., None]:
        parameters = forward_parameters(blocks[number].module)

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls[number].update(call_of(parameters, args, kwargs))

        return before

    handles = [
        block.module.register_forward_pre_hook(note(number), with_kwargs=True) for number, block in enumerate(blocks)
    ]
    try:
        run()
    except Exception as error:
        raise UnrecognisedModelError(f"{name_of(blocks[0])}: a trial forward failed: {_in_a_line(error)}") from error
    finally:
        for handle in handles:
            handle.remove()
    for number, call in enumerate(calls):
        if not call:
            raise UnrecognisedModelError(f"{name_of(blocks[number])}: the forward does not run block {number}")
    return calls


def name_of(block: Block) -> str:
    """The class of a block, for messages."""
    return type(block.module).__name__


class Edit(NamedTuple):
    """A change of the rows that a module is given or returns."""

    module: nn.Module
    side: Literal["input", "output"]
    write: Write


class Take(NamedTuple):
    """What one play showed: the tensors that the block returned, what its children were given (both float64), and the
    modules in the order in which they were called."""

    output: list[torch.Tensor]
    given: dict[str, torch.Tensor]
    order: list[nn.Module]


class Stage:
    """One block, ready to be played with any residual stream `[rows, width]` of the recorded shape and dtype."""

    def __init__(self, block: Block, call: Call, width: int) -> None:
        self.block = block
        self._call = call
        self.stream = self._stream_parameter(width)
        self.takes_residual = "residual" in forward_parameters(block.module)
        self.children = dict(block.module.named_children())
        self._modules = {*self.children.values(), *(part for part in block[1:] if part is not None)}

    @property
    def template(self) -> torch.Tensor:
        """The residual stream as it was recorded."""
        tensor: torch.Tensor = self._call[self.stream]
        return tensor

    def _stream_parameter(self, width: int) -> str:
        """The parameter that takes the stream. Nobody else may be given the same tensor: it is written to."""
        floats = {
            name: value
            for name, value in self._call.items()
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        }
        name = "hidden_states" if "hidden_states" in floats else next(iter(floats), None)
        if name is None:
            raise UnrecognisedModelError(f"{name_of(self.block)}: its blocks are given no residual stream")
        shape = floats[name].shape
        if not (shape[-1] == width and (len(shape) == 2 or (len(shape) == 3 and shape[0] == 1))):
            raise UnrecognisedModelError(
                f"{name_of(self.block)}: blocks are given `{name}` of shape {list(shape)}, not rows of width {width}"
            )
        twins = [other for other, value in floats.items() if value.data_ptr() == floats[name].data_ptr()]
        if twins != [name]:
            raise UnrecognisedModelError(
                f"{name_of(self.block)}: blocks are given one tensor as {' and '.join(f'`{twin}`' for twin in twins)}, "
                "so steering one would steer the other"
            )
        return name

    def play(self, edits: Sequence[Edit], hidden: torch.Tensor, residual: torch.Tensor) -> Take:
        """Run the block under edits. Raises UnrecognisedModelError where that fails."""
        call = {**self._call, self.stream: hidden.clone()}
        if self.takes_residual:
            call["residual"] = residual.clone()
        given: dict[str, torch.Tensor] = {}
        order: list[nn.Module] = []
        with ExitStack() as hooks:
            for name, child in self.children.items():
                hooks.enter_context(
                    _hook(child.register_forward_pre_hook(_witness(name, given, hidden.shape), with_kwargs=True))
                )
            for module in self._modules:
                hooks.enter_context(_hook(module.register_forward_pre_hook(lambda module, _: order.append(module))))
            for edit in edits:
                hooks.enter_context(_hook(_register(edit)))
            try:
                returned = self._call_block(call)
            except Exception as error:
                raise UnrecognisedModelError(
                    f"{name_of(self.block)}: a block could not be tried out: {_in_a_line(error)}"
                ) from error
        parts = returned if isinstance(returned, (tuple, list)) else (returned,)
        streams = [part for part in parts if isinstance(part, torch.Tensor) and part.shape == hidden.shape]
        if not streams or streams[0] is not parts[0]:
            raise UnrecognisedModelError(f"{name_of(self.block)}: its blocks do not return a residual stream first")
        return Take([rows_of(part).double() for part in streams], given, order)

    def _call_block(self, call: Call) -> Any:
        """Call the block by name, but for parameters that can only be given by place."""
        by_place = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL
        parameters = inspect.signature(self.block.module.forward).parameters
        args = [call[name] for name, parameter in parameters.items() if parameter.kind in by_place and name in call]
        kwargs = {
            name: value
            for name, value in call.items()
            if name not in parameters or parameters[name].kind not in by_place
        }
        return self.block.module(*args, **kwargs)


def _in_a_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


@contextmanager
def _hook(handle: RemovableHandle) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


def _witness(name: str, given: dict[str, torch.Tensor], shape: torch.Size) -> Callable[..., None]:
    """A hook that notes the stream that a module is given, if it is one of this shape."""

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stream = summands(args, kwargs)
        if stream is not None and stream[0].shape == shape:
            first, second = stream
            # A sum of its own: the module may write to what it is given.
            given[name] = rows_of(first).double() + (0.0 if second is None else rows_of(second).double())

    return before


def _register(edit: Edit) -> RemovableHandle:
    if edit.side == "input":

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            edit.write(rows_of(args[0] if args else next(iter(kwargs.values()))))

        return edit.module.register_forward_pre_hook(before, with_kwargs=True)

    def after(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001 - torch's signature
        edit.write(rows_of(first_tensor(output)))

    return edit.module.register_forward_hook(after)
