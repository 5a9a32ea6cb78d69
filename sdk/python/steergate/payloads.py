"""Payloads of every kind, from arrays: what static vectors of other algorithms take as their source.

Router payloads need no arrays: build `RouterPayload(layers={"3": RouterLayer(...)})` as it is.
"""

from __future__ import annotations

from typing import TypeVar

from ._arrays import Array, numbers
from ._check import checked, raise_first
from ._generated.models import (
    ConceptPairPayload,
    DirectionPayload,
    LinearPayload,
    LowRankPayload,
    PackedTensor,
    ReftPayload,
    RouterLayer,
    RouterPayload,
)
from ._generated.rules_payload import check_payload
from ._sources import AnyPayload
from .errors import InvalidSteering, InvalidVectors
from .vectors import VectorSet

__all__ = [
    "ConceptPairPayload",
    "DirectionPayload",
    "LinearPayload",
    "LowRankPayload",
    "PackedTensor",
    "ReftPayload",
    "RouterLayer",
    "RouterPayload",
    "concept_pair",
    "linear",
    "lowrank",
    "reft",
]

P = TypeVar("P", bound=AnyPayload)


def linear(weight: Array, bias: Array | None = None) -> LinearPayload:
    """Make an affine map of the row, W x + b, for the algorithm `linear`.

    Args:
        weight: W, of shape [width, width].
        bias: b, of shape [width]; none if left out.

    Raises:
        InvalidSteering: The shapes do not fit, or not all numbers are finite.

    Examples:
        >>> from steergate import Steering, Where, payloads
        >>> turn = payloads.linear([[0.0, -1.0], [1.0, 0.0]])
        >>> Steering().vector(turn, algorithm="linear", layers=[3], where=Where.answer()).request.vectors[0].layers
        [3]
    """
    return _checked(
        LinearPayload(weight=_tensor("weight", weight), bias=None if bias is None else _tensor("bias", bias))
    )


def lowrank(projector1: Array, projector2: Array) -> LowRankPayload:
    """Make a low-rank map of the row, (x P1) P2^T, for the algorithm `lm_steer`.

    Args:
        projector1: P1, of shape [width, rank].
        projector2: P2, of shape [width, rank].

    Raises:
        InvalidSteering: The shapes do not fit, or not all numbers are finite.

    Examples:
        >>> payloads.lowrank([[1.0], [0.0]], [[0.0], [1.0]]).projector1.shape
        [2, 1]
    """
    return _checked(
        LowRankPayload(projector1=_tensor("projector1", projector1), projector2=_tensor("projector2", projector2))
    )


def reft(
    rotate_layer: Array,
    learned_source_weight: Array,
    learned_source_bias: Array | None = None,
    *,
    layer: int | None = None,
) -> ReftPayload:
    """Make a LoReFT intervention, (W x + b - R^T x) R^T, for the algorithm `loreft`.

    Args:
        rotate_layer: R, of shape [width, rank].
        learned_source_weight: W, of shape [rank, width].
        learned_source_bias: b, of shape [rank]; none if left out.
        layer: The layer it was trained for; if left out, the vector's own `layers` say.

    Raises:
        InvalidSteering: The shapes do not fit, or not all numbers are finite.

    Examples:
        >>> payloads.reft([[1.0], [0.0]], [[0.5, 0.5]], layer=3).layer
        3
    """
    bias = None if learned_source_bias is None else _tensor("learned_source_bias", learned_source_bias)
    return _checked(
        ReftPayload(
            rotate_layer=_tensor("rotate_layer", rotate_layer),
            learned_source_weight=_tensor("learned_source_weight", learned_source_weight),
            learned_source_bias=bias,
            layer=layer,
        )
    )


def concept_pair(h1: VectorSet, h2: VectorSet) -> ConceptPairPayload:
    """Make a pair of directions per site, for the algorithm `concept_replace`.

    Args:
        h1: The concept that is taken out.
        h2: The concept that is put in, at the same sites.

    Raises:
        InvalidSteering: The two name different sites.

    Examples:
        >>> from steergate.vectors import VectorSet
        >>> pair = payloads.concept_pair(VectorSet.from_rows({3: [1.0, 0.0]}), VectorSet.from_rows({3: [0.0, 1.0]}))
        >>> list(pair.h1)
        ['post_block']
    """
    return _checked(ConceptPairPayload(h1=h1.packed(), h2=h2.packed()))


def _tensor(name: str, array: Array) -> PackedTensor:
    try:
        given = numbers(array)
    except InvalidVectors as error:
        raise InvalidSteering(error.code, str(error), f"{name}.data") from None
    return PackedTensor(dtype=given.dtype, shape=list(given.shape), data=given.data)


def _checked(payload: P) -> P:
    payload = checked(payload, type(payload))
    raise_first(check_payload(payload), "")
    return payload
