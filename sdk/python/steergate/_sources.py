"""What a builder may be given as a vector, and how each becomes a source on the wire."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeAlias

from ._arrays import Array, is_array, numbers
from ._generated.errors import PathPart, format_path
from ._generated.models import (
    ConceptPairPayload,
    DirectionPayload,
    InlinePayload,
    InlineVec,
    LinearPayload,
    LowRankPayload,
    NamedVec,
    ReftPayload,
    RouterPayload,
)
from .errors import InvalidSteering, InvalidVectors
from .vectors import VectorSet

__all__ = ["AnyPayload", "Layers", "Source", "StaticSource", "as_layers", "gate_source", "inline"]

Layers: TypeAlias = int | Iterable[int] | None
"""One layer, several, or all that there are."""

Source: TypeAlias = str | VectorSet | Array | NamedVec | InlineVec
"""What a gate takes as a vector: a registered name, a `VectorSet`, an array, or a wire struct as it is."""

AnyPayload: TypeAlias = (
    DirectionPayload | LinearPayload | LowRankPayload | ReftPayload | ConceptPairPayload | RouterPayload
)

StaticSource: TypeAlias = Source | AnyPayload | InlinePayload
"""What a static vector takes: the same, and payloads of every kind."""


def as_layers(layers: Any) -> list[int] | None:
    """Bring `layers=` into wire form. What is no number is left for decoding to refuse."""
    if layers is None or isinstance(layers, list):
        return layers
    several = isinstance(layers, Iterable) and not isinstance(layers, str | bytes)
    return list(layers) if several else [layers]


def gate_source(source: Source, layers: Layers, hook: str | None, *path: PathPart) -> NamedVec | InlineVec:
    """Turn what a builder was given into a source of a gate.

    Args:
        source: See `Source`.
        layers: Which layers of it; for an array, the layer of each row.
        hook: Which hook of it; for an array, the hook it belongs to.
        path: Where it stands, for `param`.

    Raises:
        InvalidSteering: The numbers are not in order, or the set has no such layer.
        TypeError: It is nothing that could be a vector.
    """
    picked = as_layers(layers)
    if isinstance(source, str):
        return NamedVec(name=source, layers=picked, hook=hook)
    if isinstance(source, NamedVec | InlineVec):
        if picked is not None or hook is not None:
            raise TypeError("a NamedVec or InlineVec says its own layers and hook; leave `layer`, `layers`, `hook` out")
        return source
    return InlineVec(packed=inline(source, picked, hook, *path).packed())


def inline(source: VectorSet | Array, layers: list[int] | None, hook: str | None, *path: PathPart) -> VectorSet:
    """Turn a set or an array into the set that is sent: only the rows that were asked for."""
    if not isinstance(source, VectorSet) and not is_array(source):
        given = type(source).__name__
        raise TypeError(f"a {given} is no vector; give a name, a VectorSet, an array, or a payload")
    try:
        if isinstance(source, VectorSet):
            return source if layers is None and hook is None else source.select(layers=layers, hook=hook)
        return _from_array(source, layers, hook or "post_block")
    except InvalidVectors as error:
        if error.code == "not_finite":
            path = (*path, "packed", hook or "post_block", "data")
        raise InvalidSteering(error.code, str(error), format_path(path)) from None


def _from_array(array: Array, layers: list[int] | None, hook: str) -> VectorSet:
    if layers is None:
        raise InvalidVectors("An array names no layer. Say which one it belongs to.", code="layers_required")
    given = numbers(array)
    rows = [given] if len(given.shape) == 1 else given.rows() if len(given.shape) == 2 else []
    if len(rows) != len(layers) or len(set(layers)) != len(layers):
        message = (
            f"An array of shape {list(given.shape)} was given for the layers {layers}. "
            "Give [width] for one layer, or [layers, width] for several, none of them twice."
        )
        raise InvalidVectors(message)
    return VectorSet({(hook, layer): row for layer, row in zip(layers, rows, strict=True)})
