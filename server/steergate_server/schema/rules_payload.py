"""Rules of payloads: bytes against shapes, rows against layers, and numbers that cannot work.

Pure, like all of the rules, and shipped with them. Element values are not looked at here, but for rows of zeros.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from math import isfinite, prod

from .errors import PathPart, Problem
from .payloads import (
    ConceptPairPayload,
    DirectionPayload,
    LinearPayload,
    LowRankPayload,
    PackedTensor,
    ReftPayload,
    RouterLayer,
    RouterPayload,
    SteeringHookPacked,
)

__all__ = ["PAYLOAD_KINDS", "check_payload", "distinct", "finite", "packed_rows", "router_ids", "under", "zero_rows"]

Problems = Iterator[Problem]
Packed = Mapping[str, SteeringHookPacked]
AnyPayload = DirectionPayload | LinearPayload | LowRankPayload | ReftPayload | ConceptPairPayload | RouterPayload

PAYLOAD_KINDS: dict[type, str] = {
    DirectionPayload: "direction",
    LinearPayload: "linear",
    LowRankPayload: "lowrank",
    ReftPayload: "reft",
    ConceptPairPayload: "concept_pair",
    RouterPayload: "router",
}
"""The wire's word for each payload struct."""

_ITEM_SIZES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
_LAYER_KEY = re.compile(r"(?:0|[1-9][0-9]{0,8})(?![\s\S])")


def under(prefix: tuple[PathPart, ...], problems: Iterable[Problem]) -> Problems:
    """Put a path in front of each problem's own."""
    for code, message, path in problems:
        yield Problem(code, message, prefix + path)


def finite(value: float, *path: PathPart) -> Problems:
    """A number must be finite."""
    if not isfinite(value):
        yield Problem("not_finite", f"{value} was given; every number must be finite.", path)


def distinct(layers: Iterable[int] | None, *path: PathPart) -> Problems:
    """No layer may be named twice."""
    seen: set[int] = set()
    for index, layer in enumerate(layers or ()):
        if layer in seen:
            yield Problem("duplicate_layer", f"Layer {layer} is given twice. Give it once.", (*path, index))
        seen.add(layer)


def check_payload(payload: AnyPayload) -> Problems:
    """Yield everything that is wrong with a payload by itself; paths start at the payload."""
    if isinstance(payload, DirectionPayload):
        yield from under(("packed",), packed_rows(payload.packed))
    elif isinstance(payload, ConceptPairPayload):
        yield from _concept_pair(payload)
    elif isinstance(payload, RouterPayload):
        for key, layer in payload.layers.items():
            yield from under(("layers", key), _router_layer(key, layer))
    else:
        yield from _tensors(payload)


# Packed rows


def packed_rows(packed: Packed) -> Problems:
    """Yield what is wrong with the rows of each hook; paths start at the hook's name."""
    if not packed:
        yield Problem("out_of_range", "No hook is given. Give the rows of at least one.", ())
    for hook, rows in packed.items():
        yield from under((hook,), _rows(rows))


def _rows(rows: SteeringHookPacked) -> Problems:
    if len(rows.shape) != 2 or min(rows.shape) < 1:
        yield Problem("shape_mismatch", f"{list(rows.shape)} is no shape here. Give [rows, width].", ("shape",))
        return
    count, width = rows.shape
    if len(rows.layer_indices) != count:
        message = f"{len(rows.layer_indices)} layers were given for {count} rows. Give one per row."
        yield Problem("shape_mismatch", message, ("layer_indices",))
    yield from distinct(rows.layer_indices, "layer_indices")
    yield from _data(rows.data, rows.dtype, [count, width])
    if rows.scales is not None and len(rows.scales) != count:
        message = f"{len(rows.scales)} scales were given for {count} rows. Give one per row, or none."
        yield Problem("shape_mismatch", message, ("scales",))
    for index, scale in enumerate(rows.scales or ()):
        yield from finite(scale, "scales", index)


def _data(data: bytes, dtype: str, shape: list[int]) -> Problems:
    needed = prod(shape) * _ITEM_SIZES[dtype]
    if len(data) != needed:
        message = f"{len(data)} bytes were given; {dtype} of shape {shape} takes {needed}."
        yield Problem("shape_mismatch", message, ("data",))


def zero_rows(packed: Packed, why: str) -> Problems:
    """Yield the rows that hold nothing but zero bytes, or are scaled by 0; `why` says what that breaks."""
    for hook, rows in packed.items():
        if len(rows.shape) != 2 or len(rows.data) != prod(rows.shape) * _ITEM_SIZES[rows.dtype]:
            continue
        stride = rows.shape[1] * _ITEM_SIZES[rows.dtype]
        for index, layer in enumerate(rows.layer_indices[: rows.shape[0]]):
            start = index * stride
            if rows.data.count(0, start, start + stride) == stride:
                message = f"The row of layer {layer} is all zeros: {why}. Give a vector that is not zero."
                yield Problem("zero_vector", message, (hook, "data"))
            elif rows.scales is not None and index < len(rows.scales) and rows.scales[index] == 0:
                message = f"The row of layer {layer} is scaled by 0: {why}. Give another scale."
                yield Problem("zero_vector", message, (hook, "scales", index))


def _concept_pair(payload: ConceptPairPayload) -> Problems:
    yield from under(("h1",), packed_rows(payload.h1))
    yield from under(("h2",), packed_rows(payload.h2))
    if _sites(payload.h1) != _sites(payload.h2):
        message = "`h1` and `h2` name different sites. Give the same hooks, layers and widths in both."
        yield Problem("shape_mismatch", message, ("h2",))


def _sites(packed: Packed) -> set[tuple[str, int, int]]:
    return {(hook, layer, rows.shape[-1]) for hook, rows in packed.items() for layer in rows.layer_indices}


# Tensors without a site


def _tensors(payload: LinearPayload | LowRankPayload | ReftPayload) -> Problems:
    """Check each tensor by itself, then that their shapes fit each other."""
    for name, tensor, _ in _expected(payload):
        yield from under((name,), _data(tensor.data, tensor.dtype, list(tensor.shape)))
    sizes: dict[str, int] = {}
    for name, tensor, letters in _expected(payload):
        known = [sizes.get(letter) for letter in letters]
        fits = len(tensor.shape) == len(letters)
        for letter, size in zip(letters, tensor.shape, strict=False):
            fits = fits and sizes.setdefault(letter, size) == size
        if not fits:
            wanted = ", ".join(
                letter if size is None else str(size) for letter, size in zip(letters, known, strict=True)
            )
            message = f"{list(tensor.shape)} was given; with the tensors before it, `{name}` must be [{wanted}]."
            yield Problem("shape_mismatch", message, (name, "shape"))


def _expected(payload: LinearPayload | LowRankPayload | ReftPayload) -> list[tuple[str, PackedTensor, str]]:
    """List the tensors that are given, with one letter per dimension: equal letters are equal sizes."""
    tensors: list[tuple[str, PackedTensor | None, str]]
    if isinstance(payload, LinearPayload):
        tensors = [("weight", payload.weight, "HH"), ("bias", payload.bias, "H")]
    elif isinstance(payload, LowRankPayload):
        tensors = [("projector1", payload.projector1, "Hr"), ("projector2", payload.projector2, "Hr")]
    else:
        tensors = [
            ("rotate_layer", payload.rotate_layer, "Hr"),
            ("learned_source_weight", payload.learned_source_weight, "rH"),
            ("learned_source_bias", payload.learned_source_bias, "r"),
        ]
    return [(name, tensor, letters) for name, tensor, letters in tensors if tensor is not None]


# Routers


def _router_layer(key: str, layer: RouterLayer) -> Problems:
    if not _LAYER_KEY.match(key):
        yield Problem("invalid_name", f'"{key}" is no layer. Write its index in decimal, without leading zeros.', ())
    ids = {
        "expert_ids": layer.expert_ids,
        "activate_ids": layer.activate_ids,
        "deactivate_ids": layer.deactivate_ids,
    }
    yield from router_ids(layer.mode, {name: experts for name, experts in ids.items() if experts})
    yield from finite(layer.epsilon, "epsilon")
    yield from finite(layer.lambda_, "lambda")


def router_ids(mode: str, ids: Mapping[str, object]) -> Problems:
    """Yield what is wrong between a mode and the lists of experts that are given and not empty."""
    if mode in ("activate", "deactivate"):
        if not ids:
            message = f"The mode `{mode}` needs experts. Give `expert_ids`, `activate_ids` or `deactivate_ids`."
            yield Problem("missing_field", message, ("expert_ids",))
        return
    if "expert_ids" not in ids:
        yield Problem("missing_field", f"The mode `{mode}` needs experts. Give `expert_ids`.", ("expert_ids",))
    for name in ("activate_ids", "deactivate_ids"):
        if name in ids:
            yield Problem("unknown_param", f"The mode `{mode}` does not use `{name}`. Leave it out.", (name,))
