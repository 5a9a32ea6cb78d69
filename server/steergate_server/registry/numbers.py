"""Canonical numbers and the digest: what a payload is, whatever spelling it came in."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..schema.errors import SteeringError, format_path
from ..schema.hooks import HOOKS, site_order
from ..schema.payloads import (
    ConceptPairPayload,
    DirectionPayload,
    PackedTensor,
    Payload,
    ReftPayload,
    RouterPayload,
    SteeringHookPacked,
)
from ..schema.requests import InlineVec
from ..schema.rules_payload import PAYLOAD_KINDS, check_payload

__all__ = ["StoredPayload", "canonical", "canonical_numbers", "numbers_digest", "payload_digest", "sites_of"]

Numbers = dict[str, NDArray[np.float32]]
Site = tuple[str, int, int]
"""Hook, layer, width."""

_DTYPES = {"float16": "<f2", "float32": "<f4", "float64": "<f8"}


@dataclass(frozen=True)
class StoredPayload:
    """A payload in canonical form: what is stored, digested and steered with.

    Attributes:
        kind: The payload kind, such as `direction`.
        numbers: float32 tensors by path. Rows `[width]` are at `<hook>/<layer as %08d>`, those of a concept pair at
            `h1/<hook>/<layer>` and `h2/<hook>/<layer>`; other tensors keep their shape and are at their field's name.
        metadata: What else matters to the effect: router fields, a reft payload's layer. Empty for the other kinds.
    """

    kind: str
    numbers: Numbers
    metadata: dict[str, Any]

    @cached_property
    def digest(self) -> str:
        """Lower-case hexadecimal sha256 of the canonical numbers."""
        return numbers_digest(self.kind, self.numbers, self.metadata)

    @property
    def nbytes(self) -> int:
        """Size of the numbers, in bytes."""
        return sum(tensor.nbytes for tensor in self.numbers.values())


def canonical(payload: Payload | InlineVec, prefix: str = "") -> StoredPayload:
    """Bring a payload into canonical form.

    Args:
        payload: A decoded payload; an `InlineVec` is short for a direction payload.
        prefix: Path of the payload in the request as sent.

    Raises:
        SteeringError: `shape_mismatch`, `duplicate_layer` and the other rules of payloads; `unknown_hook`;
            `not_finite` for numbers that are not finite, or not in float32.
    """
    if isinstance(payload, InlineVec):
        payload = DirectionPayload(packed=payload.packed)
    for problem in check_payload(payload):
        raise SteeringError(problem.code, problem.message, format_path(problem.path, prefix))
    numbers = dict(sorted(_tensors(payload, prefix)))
    return StoredPayload(PAYLOAD_KINDS[type(payload)], numbers, _metadata(payload))


def canonical_numbers(payload: Payload | InlineVec, prefix: str = "") -> Numbers:
    """Return a payload's float32 tensors by path. See `StoredPayload` for the paths, `canonical` for the errors."""
    return canonical(payload, prefix).numbers


def payload_digest(payload: Payload | InlineVec, prefix: str = "") -> str:
    """Return a payload's digest: the same for the same numbers in any dtype spelling, row order or base64."""
    return canonical(payload, prefix).digest


def numbers_digest(kind: str, numbers: Mapping[str, NDArray[np.float32]], metadata: Mapping[str, Any]) -> str:
    """Return the digest of numbers that are canonical already.

    The hashed bytes are the ASCII of `steergate/1/<kind>` and a zero byte; then for each tensor in sorted order of
    its path: the path, a zero byte, the number of elements as little-endian uint64, the elements as little-endian
    float32 in C order; then the metadata as sorted compact JSON, if there is any.
    """
    digest = hashlib.sha256(f"steergate/1/{kind}\0".encode())
    for path in sorted(numbers):
        elements = np.ascontiguousarray(numbers[path], dtype="<f4")
        digest.update(f"{path}\0".encode())
        digest.update(elements.size.to_bytes(8, "little"))
        digest.update(elements.data)
    if metadata:
        digest.update(json.dumps(metadata, sort_keys=True, separators=(",", ":"), allow_nan=False).encode())
    return digest.hexdigest()


def sites_of(payload: Payload | InlineVec) -> list[Site]:
    """List the sites that a payload names, in execution order, as (hook, layer, width).

    Routers have no width: theirs is 0. Payloads that name no hook (linear, lowrank, reft) have no sites.
    """
    sites: list[Site] = []
    if isinstance(payload, RouterPayload):
        sites = [("router_logits", int(layer), 0) for layer in payload.layers]
    elif isinstance(payload, InlineVec | DirectionPayload | ConceptPairPayload):
        packed = payload.h1 if isinstance(payload, ConceptPairPayload) else payload.packed
        sites = [(hook, layer, rows.shape[1]) for hook, rows in packed.items() for layer in rows.layer_indices]
    return sorted(sites, key=lambda site: site_order(site[0], site[1]))


def _metadata(payload: Payload) -> dict[str, Any]:
    if isinstance(payload, RouterPayload):
        # Defaults are written out: leaving a default out and spelling it is the same router.
        fields = {
            layer: {field.encode_name: getattr(router, field.name) for field in msgspec.structs.fields(type(router))}
            for layer, router in payload.layers.items()
        }
        return {"layers": fields}
    if isinstance(payload, ReftPayload) and payload.layer is not None:
        return {"layer": payload.layer}
    return {}


def _tensors(payload: Payload, prefix: str) -> Iterator[tuple[str, NDArray[np.float32]]]:
    if isinstance(payload, DirectionPayload):
        yield from _packed(payload.packed, format_path(["packed"], prefix), "")
    elif isinstance(payload, ConceptPairPayload):
        yield from _packed(payload.h1, format_path(["h1"], prefix), "h1/")
        yield from _packed(payload.h2, format_path(["h2"], prefix), "h2/")
    else:
        for field in payload.__struct_fields__:
            tensor = getattr(payload, field)
            if isinstance(tensor, PackedTensor):
                elements = _elements(tensor.data, tensor.dtype).reshape(tensor.shape)
                yield field, _float32(elements, format_path([field, "data"], prefix))


def _packed(
    packed: Mapping[str, SteeringHookPacked], param: str, parent: str
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    for hook, rows in packed.items():
        at = format_path([hook], param)
        if hook not in HOOKS:
            # Not only a courtesy: a hook is part of the hashed path, so its spelling must not be the client's choice.
            raise SteeringError("unknown_hook", f"There is no hook of that name. Hooks are {', '.join(HOOKS)}.", at)
        elements = _elements(rows.data, rows.dtype).reshape(rows.shape)
        if rows.scales is not None:
            with np.errstate(over="ignore", invalid="ignore"):
                elements = elements.astype(np.float64) * np.asarray(rows.scales, dtype=np.float64)[:, None]
        values = _float32(elements, f"{at}.data")
        for index, layer in enumerate(rows.layer_indices):
            yield f"{parent}{hook}/{layer:08d}", values[index]


def _elements(data: bytes, dtype: str) -> NDArray[Any]:
    if dtype == "bfloat16":
        # A bfloat16 is the upper half of a float32.
        return (np.frombuffer(data, dtype="<u2").astype("<u4") << np.uint32(16)).view("<f4")
    return np.frombuffer(data, dtype=_DTYPES[dtype])


def _float32(elements: NDArray[Any], param: str) -> NDArray[np.float32]:
    with np.errstate(over="ignore", invalid="ignore"):
        values = elements.astype(np.float32)
    if not np.isfinite(values).all():
        message = (
            "The numbers are not all finite, or do not fit float32 once they are scaled. "
            "Look for NaN, infinity, and magnitudes above 3.4e38."
        )
        raise SteeringError("not_finite", message, param)
    return values
