"""What every wire struct is built from: the base class, the closed word sets, the bounded scalars.

Closed word sets are `Literal`s: they come out of the exported schema inline, so that a generated client has the
same words under the cursor and no enum classes with invented names.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

__all__ = [
    "At",
    "Bound",
    "ClientGates",
    "Conflict",
    "ConversationId",
    "Count",
    "Digest",
    "Dtype",
    "ExpertId",
    "Fires",
    "Label",
    "LayerIndex",
    "NonEmptyLayers",
    "Position",
    "ProbeAt",
    "ReportLevel",
    "RouterMode",
    "Scope",
    "Score",
    "TokenId",
    "VectorKind",
    "VectorName",
    "Wire",
]

MAX_INT = 2**31 - 1
"""The largest integer that any field takes: positions, ids and sizes travel through int32 device tensors."""


class Wire(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of every struct on the wire: immutable, strict about unknown fields, silent about defaults."""


Dtype = Literal["float16", "bfloat16", "float32", "float64"]
"""Element type of packed numbers. Bytes are little-endian whatever the machine."""

Conflict = Literal["sequential", "priority", "error"]
"""What happens when several static vectors select one row at one site."""

ReportLevel = Literal["none", "summary", "scores"]
"""How much the answer tells about what was applied."""

Scope = Literal["this_token", "next_step", "rest_of_request", "rest_of_conversation"]
"""How far a gate's firing reaches."""

At = Literal["generated", "answer"]
"""The rows at which an `always` gate acts: generated rows, or those and the prompt end."""

ProbeAt = Literal["generated", "prompt_end", "answer"]
"""The rows at which a probe looks."""

Fires = Literal["above", "below"]
"""The side of the threshold on which a probe fires."""

Score = Literal["dot", "cosine"]
"""How a probe is scored against the residual stream."""

RouterMode = Literal["activate", "deactivate", "soft", "soft_topk", "soft_random"]
"""How expert router logits are changed."""

VectorKind = Literal["probe", "steer"]
"""The two namespaces of registered vectors."""

ClientGates = Literal["reject", "ignore", "allow"]
"""What a server default with gates does with a request that brings its own."""

# `(?![\s\S])` and not `$`: Python's `$` lets a trailing newline through, ECMA's does not.
VectorName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,127}(?![\s\S])")]
"""Name of a registered vector."""

ConversationId = Annotated[str, Meta(pattern=r"^[A-Za-z0-9._:-]{1,256}(?![\s\S])")]
"""Name of a conversation, chosen by the client."""

Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}(?![\s\S])")]
"""Lower-case hexadecimal sha256."""

Label = Annotated[str, Meta(max_length=256)]
"""Free text for logs and reports; no part of identity."""

Count = Annotated[int, Meta(ge=1, le=MAX_INT)]
"""A size: at least one."""

Bound = Annotated[int, Meta(ge=-MAX_INT, le=MAX_INT)]
"""A prompt position or window bound; a negative one counts from the end of the prompt."""

TokenId = Annotated[int, Meta(ge=0, le=MAX_INT)]
"""A token id of the served model's vocabulary."""

Position = Annotated[int, Meta(ge=0, le=MAX_INT)]
"""A position within the generated tokens: 0 is the first."""

LayerIndex = Annotated[int, Meta(ge=0, le=MAX_INT)]
"""Index of a decoder block, counted from 0."""

ExpertId = Annotated[int, Meta(ge=0, le=MAX_INT)]
"""Index of an expert of one layer, counted from 0."""

NonEmptyLayers = Annotated[list[LayerIndex], Meta(min_length=1)]
"""A choice of layers. Left out means all of them, so an empty list is refused."""
