"""Payloads: the numbers of one intervention, as they travel on the wire."""

from typing import Annotated

from msgspec import Meta, field

from .words import MAX_INT, Count, Dtype, ExpertId, LayerIndex, RouterMode, Wire

__all__ = [
    "ConceptPairPayload",
    "DirectionPayload",
    "LinearPayload",
    "LowRankPayload",
    "PackedByHook",
    "PackedTensor",
    "Payload",
    "ReftPayload",
    "RouterLayer",
    "RouterPayload",
    "SteeringHookPacked",
]


class SteeringHookPacked(Wire, frozen=True, kw_only=True):
    """One vector per layer, all at one hook."""

    dtype: Dtype
    """Element type of `data`."""
    shape: Annotated[list[Count], Meta(min_length=2, max_length=2)]
    """`[rows, width]`."""
    layer_indices: Annotated[list[LayerIndex], Meta(min_length=1)]
    """The layer of each row, counted from 0, none twice."""
    data: bytes
    """Base64 of rows x width little-endian, C-contiguous elements."""
    scales: list[float] | None = None
    """One factor per row; the row times its factor is the vector. Left out: 1 for each."""


class PackedTensor(Wire, frozen=True, kw_only=True):
    """One tensor without a site of its own."""

    dtype: Dtype
    """Element type of `data`."""
    shape: Annotated[list[Count], Meta(min_length=1, max_length=2)]
    """Sizes of the dimensions, one or two."""
    data: bytes
    """Base64 of the little-endian, C-contiguous elements."""


PackedByHook = Annotated[dict[str, SteeringHookPacked], Meta(min_length=1)]
"""Packed rows by the hook that they belong to."""


class DirectionPayload(Wire, frozen=True, kw_only=True, tag_field="kind", tag="direction"):
    """One direction per site."""

    packed: PackedByHook
    """Rows by hook."""


class LinearPayload(Wire, frozen=True, kw_only=True, tag_field="kind", tag="linear"):
    """An affine map of the row: W x + b. Names no layer and no hook."""

    weight: PackedTensor
    """W, `[H, H]`."""
    bias: PackedTensor | None = None
    """b, `[H]`."""


class LowRankPayload(Wire, frozen=True, kw_only=True, tag_field="kind", tag="lowrank"):
    """A low-rank map of the row, (x P1) P2^T. Names no layer and no hook."""

    projector1: PackedTensor
    """P1, `[H, r]`."""
    projector2: PackedTensor
    """P2, `[H, r]`."""


class ReftPayload(Wire, frozen=True, kw_only=True, tag_field="kind", tag="reft"):
    """A LoReFT intervention, (W x + b - R^T x) R^T. Names no hook."""

    rotate_layer: PackedTensor
    """R, `[H, r]`."""
    learned_source_weight: PackedTensor
    """W, `[r, H]`."""
    learned_source_bias: PackedTensor | None = None
    """b, `[r]`."""
    layer: LayerIndex | None = None
    """The layer it was trained for; left out: the vector's own `layers` say."""


class ConceptPairPayload(Wire, frozen=True, kw_only=True, tag_field="kind", tag="concept_pair"):
    """Two directions per site: the concept to take out and the one to put in. Both name the same sites."""

    h1: PackedByHook
    """The concept that is taken out."""
    h2: PackedByHook
    """The concept that is put in."""


class RouterLayer(Wire, frozen=True, kw_only=True):
    """What is done to the expert router of one layer."""

    mode: RouterMode
    """How the logits are changed."""
    expert_ids: list[ExpertId] = field(default_factory=list)
    """The experts that the mode is about."""
    activate_ids: list[ExpertId] = field(default_factory=list)
    """Experts to raise, in the modes `activate` and `deactivate`."""
    deactivate_ids: list[ExpertId] = field(default_factory=list)
    """Experts to lower, in the modes `activate` and `deactivate`; lowered last."""
    epsilon: float = 0.01
    """Distance to the row's largest or smallest value, in logits."""
    lambda_: float = field(default=0.5, name="lambda")
    """Share of the row's standard deviation that the soft modes add; may be negative."""
    topk: Count = 8
    """How many experts of a row count as chosen, in the mode `soft_topk`."""
    seed: Annotated[int, Meta(ge=0, le=MAX_INT)] = 0
    """Seed of the mode `soft_random`."""


class RouterPayload(Wire, frozen=True, kw_only=True, tag_field="kind", tag="router"):
    """Changes to the expert routers of some layers."""

    layers: Annotated[
        dict[Annotated[str, Meta(pattern=r"^(?:0|[1-9][0-9]{0,8})(?![\s\S])")], RouterLayer], Meta(min_length=1)
    ]
    """By layer: the decimal index of a decoder block, without leading zeros."""


Payload = DirectionPayload | LinearPayload | LowRankPayload | ReftPayload | ConceptPairPayload | RouterPayload
"""Any payload, told apart by `kind`."""
