"""Learns how a model's blocks handle their residual stream by running them, before anything is steered.

Names do not tell. Some models pass a `residual` on that is to be added, some pass one on that nobody reads; a
`post_attention_layernorm` sees the stream, or what attention adds to it; an MLP may be given the stream itself, so that
writing to its input would write to the stream. So one forward is recorded, and a block of every kind is played again
with changed inputs and with its parts' outputs held fixed: what changes then is what steering there would change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from steergate_server.runtime.blocks import Block, UnrecognisedModelError
from steergate_server.runtime.stage import Call, Edit, Stage, Take, name_of, record, rows_of

TOLERANCE = 0.05
"""Share of a change that rounding may make, in 16-bit dtypes too."""

LOUD = 64.0
"""Size of a change that must leave a trace wherever it is read at all, under the smallest weights, in 16 bits."""

SameEverywhere = Callable[[torch.Tensor], bool]
"""Whether rows `[rows, width]` are the same numbers on all ranks of a split model. All ranks ask, and hear the same."""


class Ways(NamedTuple):
    """How blocks of one kind are steered.

    `stream`: the parameter that takes the residual stream. `residual`: the one that takes its other summand, if the two
    travel apart; the block's output is such a pair then, too. `hooks`: the hooks that a block has a place for, with the
    width of their rows. `post_attn`: name of the child whose input is the stream between attention and MLP.
    `copies_mlp_input`: somebody else reads the tensor that the MLP is given, so steering must not write to it.
    """

    stream: str
    residual: str | None
    hooks: dict[str, int]
    post_attn: str | None
    copies_mlp_input: bool


def rehearse(
    blocks: Sequence[Block], width: int, run: Callable[[], object], same: SameEverywhere = lambda _: True
) -> list[Ways]:
    """How each of the blocks is steered, in order. `run`: one small forward of the model, not compiled.

    width: of the residual stream. Raises UnrecognisedModelError with one line for a block that is not understood.
    """
    calls = record(blocks, run)
    players = {_kind(block.module): _Player(block, call, width) for block, call in zip(blocks, calls, strict=True)}
    known = {kind: player.learn(same) for kind, player in players.items() if player.attends}
    residuals = {ways.residual for ways in known.values()}
    if len(residuals) != 1:
        why = "some take a residual to add, others do not" if residuals else "none has an attention layer of its own"
        raise UnrecognisedModelError(f"{name_of(blocks[0])}: its blocks are not understood: {why}")
    (residual,) = residuals
    known |= {kind: player.as_the_others(residual) for kind, player in players.items() if not player.attends}
    return [known[_kind(block.module)] for block in blocks]


def _kind(module: nn.Module) -> tuple[Any, ...]:
    return tuple((name, type(inner)) for name, inner in module.named_modules())


class _Player:
    """Plays one block."""

    def __init__(self, block: Block, call: Call, width: int) -> None:
        self._stage = Stage(block, call, width)
        template = self._stage.template
        generator = torch.Generator().manual_seed(7)

        def noise() -> torch.Tensor:
            drawn = torch.randn(template.shape, generator=generator)
            return drawn.to(device=template.device, dtype=template.dtype)

        self._hidden, self._residual, self._change = noise(), noise(), noise()
        self._attended, self._attended_otherwise, self._computed = (rows_of(noise()) for _ in range(3))
        with torch.no_grad():
            order = self._play([]).order
        # A part that is passed by, or used twice, is none that can be steered.
        self._block = Block(
            block.module, *(part if part is not None and order.count(part) == 1 else None for part in block[1:])
        )

    @property
    def attends(self) -> bool:
        """Whether the output of the block's attention can be held fixed, so that plays can be compared."""
        return self._block.output_projection is not None

    def as_the_others(self, residual: str | None) -> Ways:
        """Ways of a block that mixes rows by other means than attention: its ends alone, in its stack's manner."""
        width = self._hidden.shape[-1]
        residual = residual if self._stage.takes_residual else None
        return Ways(
            self._stage.stream, residual, {"pre_attn": width, "post_block": width}, None, copies_mlp_input=False
        )

    def learn(self, same: SameEverywhere) -> Ways:
        """Find out everything. Raises UnrecognisedModelError where the stream itself is not understood."""
        with torch.no_grad():
            ways = self._learn()
            return ways._replace(hooks=self._whole(ways.hooks, same))

    def _learn(self) -> Ways:
        block = self._block
        summed = self._stage.takes_residual and self._sums_residual()
        fixed = [*self._fix_attention(self._attended), *self._fix_mlp()]
        plain, moved = self._play(fixed), self._play(fixed, hidden=self._hidden + self._change)
        if not self._changes(plain, moved):
            raise UnrecognisedModelError(f"{name_of(block)}: what its blocks are given as stream has no effect on them")
        hooks = {"pre_attn": self._change.shape[-1], "post_block": self._change.shape[-1]}
        # Without this, other parts than attention and the MLP add to the stream, or a norm is in its way.
        additive = self._carried(self._out(plain, summed), self._out(moved, summed))
        post_attn = self._between(plain, moved, summed) if additive else None
        if post_attn is not None:
            hooks["post_attn"] = hooks["pre_attn"]
        if additive:
            hooks |= dict.fromkeys(self._mlp_hooks(), hooks["pre_attn"])
        return Ways(
            self._stage.stream,
            "residual" if summed else None,
            hooks | self._inner_hooks(),
            post_attn,
            self._mlp_input_is_shared(plain, fixed) if "mlp_in" in hooks else False,
        )

    def _whole(self, hooks: dict[str, int], same: SameEverywhere) -> dict[str, int]:
        """The hooks whose rows are complete on every rank. A part of attention's heads is all that a rank needs."""
        places: dict[str, tuple[nn.Module | None, Literal["input", "output"]]] = {
            "mlp_in": (self._block.mlp_first, "input"),
            "router_logits": (self._block.router, "output"),
            "mlp_out": (self._block.mlp_last, "output"),
        }
        found: dict[str, torch.Tensor] = {}
        edits = [
            Edit(module, side, partial(_keep, found, hook))
            for hook, (module, side) in places.items()
            if hook in hooks and module is not None
        ]
        out = self._play([*self._fix_attention(self._attended), *edits]).output
        if not all(same(part.float()) for part in out):  # what one rank hears all hear
            raise UnrecognisedModelError(f"{name_of(self._block)}: ranks do not hold the same residual stream")
        incomplete = {hook for hook in places if hook in found and not same(found[hook])}
        return {hook: width for hook, width in hooks.items() if hook not in incomplete}

    # What is asked ----------------------------------------------------------------------------------------------

    def _sums_residual(self) -> bool:
        """Whether the stream is `hidden + residual`: it does not matter then which of the two is changed."""
        fixed = [*self._fix_attention(self._attended), *self._fix_mlp()]
        plain = torch.cat(self._play(fixed).output)
        one = torch.cat(self._play(fixed, hidden=self._hidden + self._change).output)
        other = torch.cat(self._play(fixed, residual=self._residual + self._change).output)
        if _near(one, other, one - plain):
            return True
        if torch.equal(other, plain):
            return False  # handed on, and never read
        raise UnrecognisedModelError(
            f"{name_of(self._block)}: `residual` is read, but is not a summand of the residual stream"
        )

    def _between(self, plain: Take, moved: Take, summed: bool) -> str | None:
        """The child that is given the stream after attention was added, such that writing to it is carried on."""
        first, projection = self._block.mlp_first, self._block.output_projection
        if first is None or projection is None:
            return None
        attended = self._play([*self._fix_attention(self._attended_otherwise), *self._fix_mlp()])
        for module in plain.order[: plain.order.index(first) + 1]:
            name = next((name for name, child in self._stage.children.items() if child is module), None)
            if name is None or name not in plain.given:
                continue
            given = plain.given[name]
            if not self._carried(given, moved.given[name]) or torch.equal(given, attended.given[name]):
                continue
            written = self._play(
                [
                    *self._fix_attention(self._attended),
                    *self._fix_mlp(),
                    Edit(module, "input", lambda rows: rows.add_(rows_of(self._change))),
                ]
            )
            if self._carried(self._out(plain, summed), self._out(written, summed)):
                return name
        return None

    def _mlp_hooks(self) -> Iterator[str]:
        """The hooks of the MLP at which writing has an effect."""
        first, last = self._block.mlp_first, self._block.mlp_last
        if first is None or last is None:
            return
        attention = self._fix_attention(self._attended)
        plain = self._play(attention)
        for hook, edit in (
            ("mlp_in", Edit(first, "input", self._loud)),
            ("mlp_out", Edit(last, "output", self._loud)),
        ):
            if self._changes(plain, self._play([*attention, edit])):
                yield hook

    def _mlp_input_is_shared(self, plain: Take, fixed: Sequence[Edit]) -> bool:
        """Whether writing to the MLP's input would change more than the MLP."""
        first, projection = self._block.mlp_first, self._block.output_projection
        assert first is not None
        if projection is None or plain.order.index(projection) > plain.order.index(first):
            return True  # attention is yet to come, and may read the same tensor
        return self._changes(plain, self._play([*fixed, Edit(first, "input", self._loud)]))

    def _inner_hooks(self) -> dict[str, int]:
        """The hooks inside attention and inside a mixture of experts, with the width of their rows."""
        hooks: dict[str, int] = {}
        projection, router = self._block.output_projection, self._block.router
        if projection is not None:
            width = self._width_at(projection, "input")
            silent = self._play([*self._fix_mlp(), Edit(projection, "input", lambda rows: rows.zero_())])
            spoken = self._play([*self._fix_mlp(), Edit(projection, "input", self._replace)])
            if width and self._changes(silent, spoken):
                hooks["attn_heads"] = width
        if router is not None:
            width = self._width_at(router, "output")
            attention = self._fix_attention(self._attended)
            spoken = self._play([*attention, Edit(router, "output", self._loud)])
            if width > 1 and self._changes(self._play(attention), spoken):
                hooks["router_logits"] = width
        return hooks

    def _width_at(self, module: nn.Module, side: Literal["input", "output"]) -> int:
        """Elements per row at a module, 0 where it is not given the step's rows."""
        seen: list[torch.Size] = []
        self._play([*self._fix_attention(self._attended), Edit(module, side, lambda rows: seen.append(rows.shape))])
        count = rows_of(self._hidden).shape[0]
        return seen[0][1] if len(seen) == 1 and len(seen[0]) == 2 and seen[0][0] == count else 0

    # How it is asked --------------------------------------------------------------------------------------------

    def _fix_attention(self, rows: torch.Tensor) -> list[Edit]:
        """Outside a step, attention layers return whatever lay in memory."""
        projection = self._block.output_projection
        return [] if projection is None else [Edit(projection, "output", lambda found: found.copy_(rows))]

    def _fix_mlp(self) -> list[Edit]:
        last = self._block.mlp_last
        return [] if last is None else [Edit(last, "output", lambda found: found.copy_(self._computed))]

    @staticmethod
    def _loud(rows: torch.Tensor) -> None:
        rows.add_(_noise_like(rows), alpha=LOUD)

    @staticmethod
    def _replace(rows: torch.Tensor) -> None:
        rows.copy_(_noise_like(rows)).mul_(LOUD)

    @staticmethod
    def _changes(one: Take, other: Take) -> bool:
        return not all(torch.equal(a, b) for a, b in zip(one.output, other.output, strict=True))

    def _out(self, take: Take, summed: bool) -> torch.Tensor:
        """The stream that the block returned."""
        return take.output[0] + take.output[1] if summed else take.output[0]

    def _carried(self, before: torch.Tensor, after: torch.Tensor) -> bool:
        """Whether a stream has changed by a multiple of what was added to it."""
        change = rows_of(self._change).double()
        share = float(((after - before) * change).sum() / change.square().sum())
        return abs(share) > TOLERANCE and _near(after - before, share * change, share * change)

    def _play(
        self, edits: Sequence[Edit], hidden: torch.Tensor | None = None, residual: torch.Tensor | None = None
    ) -> Take:
        return self._stage.play(
            edits, self._hidden if hidden is None else hidden, self._residual if residual is None else residual
        )


def _keep(found: dict[str, torch.Tensor], hook: str, rows: torch.Tensor) -> None:
    found[hook] = rows.clone()


def _noise_like(rows: torch.Tensor) -> torch.Tensor:
    drawn = torch.randn(rows.shape, generator=torch.Generator().manual_seed(8))
    return drawn.to(device=rows.device, dtype=rows.dtype)


def _near(one: torch.Tensor, other: torch.Tensor, change: torch.Tensor) -> bool:
    return bool((one - other).norm() <= TOLERANCE * change.norm())
