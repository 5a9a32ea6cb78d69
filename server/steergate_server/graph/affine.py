"""Closed-form composition of the static vectors of one slot at one site.

Every lowered algorithm but clamp is an affine map x -> a x + (x P) Q^T + b with a low rank. Two in sequence are one
more of the kind. With (a1, P1, Q1, b1) first:

    x1 = a1 x + (x P1) Q1^T + b1
    x2 = a2 x1 + (x1 P2) Q2^T + b2
       = a1 a2 x + (x P1) (a2 Q1)^T + (x (a1 P2 + P1 Q1^T P2)) Q2^T + a2 b1 + (b1 P2) Q2^T + b2
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch

Tables = Mapping[str, "torch.Tensor | None"]


class NotLowerableError(ValueError):
    """A sequence of vectors that has no closed form in the graph; the message is the reason."""


class Affine(NamedTuple):
    """x -> keep x + (x reads^T) writes + bias; reads, writes `[rank, width]` and bias `[width]` in float32."""

    keep: float
    reads: torch.Tensor
    writes: torch.Tensor
    bias: torch.Tensor

    @property
    def rank(self) -> int:
        """Number of (read, write) pairs."""
        return self.reads.shape[0]


class Clamp(NamedTuple):
    """x -> x + strength (clip(x.u, low, high) - x.u) u, u `[width]` of norm 1."""

    direction: torch.Tensor
    low: float
    high: float
    strength: float


class SiteChange(NamedTuple):
    """All that one slot does at one site: an affine map, then a clamp if there is one, then the old norm if asked."""

    affine: Affine
    clamp: Clamp | None = None
    normalize: bool = False


def identity(width: int) -> Affine:
    """The map that changes nothing."""
    none, zero = _nothing(width)
    return Affine(1.0, none, none, zero)


@lru_cache
def _nothing(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """No pairs `[0, width]` and no bias `[width]`. Nobody may write to them."""
    return torch.zeros((0, width)), torch.zeros(width)


def affine_of(family: str, tables: Tables, width: int) -> Affine:
    """The map that one lowered payload stands for. Raises NotLowerableError for families that are none."""
    none, zero = _nothing(width)
    if family == "additive":
        return Affine(1.0, none, none, _given(tables, "additive", zero))
    if family == "replace":
        return Affine(0.0, none, none, _given(tables, "replace", zero))
    if family == "projection":
        read, write = _given(tables, "projection_in", zero), _given(tables, "projection_out", zero)
        return Affine(1.0, read.unsqueeze(0), write.unsqueeze(0), zero)
    if family == "lowrank":
        reads, writes = _given(tables, "lowrank_in", none), _given(tables, "lowrank_out", none)
        return Affine(1.0, reads, writes, _given(tables, "lowrank_bias", zero))
    raise NotLowerableError(f"family {family!r} is no affine map")


def then(first: Affine, second: Affine) -> Affine:
    """One map after another as one map; sums in float64, rounded once."""
    p1, q1, b1 = first.reads.double(), first.writes.double(), first.bias.double()
    p2, q2, b2 = second.reads.double(), second.writes.double(), second.bias.double()
    reads = torch.cat((p1, first.keep * p2 + (p2 @ q1.T) @ p1))
    writes = torch.cat((second.keep * q1, q2))
    bias = second.keep * b1 + (p2 @ b1) @ q2 + b2
    return _trimmed(Affine(first.keep * second.keep, reads.float(), writes.float(), bias.float()))


def _trimmed(affine: Affine) -> Affine:
    """Without the pairs that do nothing, such as all that came before a replace."""
    if affine.rank == 0:
        return affine
    live = (affine.reads != 0).any(dim=1) & (affine.writes != 0).any(dim=1)
    return affine._replace(reads=affine.reads[live], writes=affine.writes[live])


def _given(tables: Tables, key: str, default: torch.Tensor) -> torch.Tensor:
    value = tables.get(key)
    return default if value is None else value.float()


class Lowered(NamedTuple):
    """One vector as its algorithm lowered it: its family, its tables at the site, and whether rows keep their norm."""

    family: str
    tables: Tables
    normalize: bool


def compose(vectors: list[Lowered], width: int) -> SiteChange:
    """What vectors, in order, do at a site. Raises NotLowerableError with the reason where there is no closed form.

    A clamp or a rescaling can only come last: what follows would have to see its result.
    """
    nothing = identity(width)
    change = SiteChange(nothing)
    for vector in vectors:
        if change.clamp is not None:
            raise NotLowerableError("a clamp before another vector has no closed form")
        if change.normalize:
            raise NotLowerableError("normalize before another vector has no closed form")
        if vector.family == "clamp":
            change = change._replace(clamp=_clamp_of(vector.tables), normalize=vector.normalize)
        else:
            own = affine_of(vector.family, vector.tables, width)
            affine = _trimmed(own) if change.affine is nothing else then(change.affine, own)
            if vector.normalize and len(vectors) > 1:
                # The norm to keep is that of the row as this vector sees it, not as the site got it.
                raise NotLowerableError("normalize beside another vector has no closed form")
            change = SiteChange(affine, normalize=vector.normalize)
    return change


def _clamp_of(tables: Tables) -> Clamp:
    direction, bounds = tables["clamp_direction"], tables["clamp_bounds"]
    assert direction is not None
    assert bounds is not None
    low, high, strength = bounds.tolist()
    return Clamp(direction.float(), low, high, strength)
