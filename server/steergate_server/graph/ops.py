"""The in-graph operator: one call for each site, opaque to the compiler.

`steergate::steer(hidden!, residual?, site)` steers `hidden` in place. The persistent tensors behind it are reached
through the bound engine rather than passed in: every op writes `hidden`, which orders the ops among themselves and
keeps any of them from being removed, and a graph that holds nothing but a site number can be cached and loaded by
another process.
"""

from __future__ import annotations

from typing import Protocol

import torch


class SteeringEngine(Protocol):
    """What the operator calls."""

    def steer(self, hidden: torch.Tensor, residual: torch.Tensor | None, site: int) -> None:
        """Steer `hidden` [rows, width] in place at a numbered site."""


_bound: SteeringEngine | None = None


def bind(engine: SteeringEngine | None) -> None:
    """Make `engine` the one that the operator of this process calls; None makes every site the identity."""
    global _bound
    _bound = engine


def _steer(hidden: torch.Tensor, residual: torch.Tensor | None, site: int) -> None:
    if _bound is not None:
        _bound.steer(hidden, residual, site)


def _steer_fake(hidden: torch.Tensor, residual: torch.Tensor | None, site: int) -> None:
    """Shape propagation: nothing is returned and no shape changes."""


# Defined through torch.library's plain, untyped interface: `custom_op` adds a Python layer to every call.
_library = torch.library.Library("steergate", "DEF")
_library.define(
    "steer(Tensor(a!) hidden, Tensor? residual, int site) -> ()", tags=(torch.Tag.needs_fixed_stride_order,)
)
for _backend in ("CPU", "CUDA"):
    _library.impl("steer", _steer, _backend)
_library.impl("steer", _steer_fake, "Meta")


def steer(hidden: torch.Tensor, residual: torch.Tensor | None, site: int) -> None:
    """Call the operator: `hidden` [rows, width] is steered in place, `residual` is the stream's other summand."""
    torch.ops.steergate.steer(hidden, residual, site)
