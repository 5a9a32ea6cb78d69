"""Payloads for the registry's tests, packed with the standard library alone."""

import struct

from steergate_server.schema.payloads import DirectionPayload, PackedTensor, SteeringHookPacked
from steergate_server.schema.requests import InlineVec

FORMATS = {"float16": "e", "float32": "f", "float64": "d"}


def pack(values, dtype="float32"):
    """Little-endian bytes of some numbers; bfloat16 is the upper half of a float32, cut off."""
    if dtype == "bfloat16":
        return b"".join(struct.pack("<f", value)[2:] for value in values)
    return struct.pack(f"<{len(values)}{FORMATS[dtype]}", *values)


def rows(by_layer, dtype="float32", scales=None):
    """One hook's rows from a mapping of layer to numbers."""
    flat = [value for row in by_layer.values() for value in row]
    return SteeringHookPacked(
        dtype=dtype,
        shape=[len(by_layer), len(next(iter(by_layer.values())))],
        layer_indices=list(by_layer),
        data=pack(flat, dtype),
        scales=scales,
    )


def direction(**hooks):
    """A direction payload from hooks, each a mapping of layer to numbers."""
    return DirectionPayload(packed={hook: rows(by_layer) for hook, by_layer in hooks.items()})


def inline(**hooks):
    """The same as an inline vector."""
    return InlineVec(packed=direction(**hooks).packed)


def tensor(shape, values, dtype="float32"):
    """A tensor without a site."""
    return PackedTensor(dtype=dtype, shape=list(shape), data=pack(values, dtype))
