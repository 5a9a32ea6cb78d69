"""Files of vectors: what is in them, and which block each row belongs to. No pickle is ever loaded."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, TypeAlias, cast

from ._arrays import Dtype, Numbers, finite, no_floats, numbers
from .errors import ConventionRequired, InvalidVectors
from .vectors import Convention, RowOrigin, Site

__all__ = ["read"]

Rows: TypeAlias = dict[Site, Numbers]
Read: TypeAlias = tuple[Rows, list[RowOrigin]]

_LAYER = re.compile(r"(?:layer\.|direction\.)?(0|[1-9][0-9]*)")
_SAFETENSORS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}


def read(
    path: str | PathLike[str],
    hook: str,
    layers: Sequence[int] | None,
    convention: Convention | None,
    model_layers: int | None,
) -> Read:
    """Read a file into rows by site, and tell where each went. `VectorSet.load` documents the arguments."""
    file = Path(path)
    reader = _READERS.get(file.suffix.lower())
    if reader is None:
        known = ", ".join(f"`{suffix}`" for suffix in _READERS)
        raise InvalidVectors(f"{file.name}: files of this kind are not read. Give {known}.", code="invalid_type")
    if not file.is_file():
        raise FileNotFoundError(2, "No such file", str(file))
    tensors = dict(reader(file))
    if not tensors:
        raise InvalidVectors(f"{file.name} holds no tensors.", code="out_of_range")
    if len(tensors) == 1:
        ((name, tensor),) = tensors.items()
        if len(tensor.shape) == 2 and not _LAYER.fullmatch(name):
            return _stack(name, tensor, hook, convention, model_layers)
        if len(tensor.shape) == 1 and not _LAYER.fullmatch(name):
            return _single(name, tensor, hook, layers)
    if convention is not None:
        raise InvalidVectors(f"{file.name} names its layers, so `convention` says nothing. Leave it out.")
    return _named(tensors, hook)


# What a file may hold


def _named(tensors: dict[str, Numbers], hook: str) -> Read:
    rows: Rows = {}
    mapping: list[RowOrigin] = []
    for name, tensor in tensors.items():
        found = _LAYER.fullmatch(name)
        if found is None:
            raise InvalidVectors(
                f"Tensor `{name}` names no layer. Name each `layer.N`, `direction.N` or `N`, or keep one stack alone."
            )
        if len(tensor.shape) != 1:
            raise InvalidVectors(f"Tensor `{name}` has the shape {list(tensor.shape)}. Give [width].")
        site = (hook, int(found[1]))
        if site in rows:
            other = next(origin.source for origin in mapping if origin.site == site)
            raise InvalidVectors(
                f"Tensors `{other}` and `{name}` both give layer {site[1]}. Keep one.", code="duplicate_layer"
            )
        first = next(iter(rows.values()), tensor)
        if first.shape != tensor.shape:
            raise InvalidVectors(
                f"Tensor `{name}` is {tensor.shape[0]} wide, `{mapping[0].source}` is {first.shape[0]}. "
                "All must be equally wide."
            )
        rows[site] = tensor
        mapping.append(RowOrigin(name, site))
    return rows, mapping


def _single(name: str, tensor: Numbers, hook: str, layers: Sequence[int] | None) -> Read:
    if layers is None or len(layers) != 1:
        given = "none was" if layers is None else f"{len(layers)} were"
        raise InvalidVectors(
            f"Tensor `{name}` is one vector and names no layer; {given} given. Give exactly one in `layers`.",
            code="layers_required",
        )
    site = (hook, layers[0])
    return {site: tensor}, [RowOrigin(name, site)]


def _stack(name: str, tensor: Numbers, hook: str, convention: Convention | None, model_layers: int | None) -> Read:
    count = tensor.shape[0]
    offset = {"blocks": 0, "hidden_states": 1}[_convention(name, count, convention, model_layers)]
    rows: Rows = {}
    mapping: list[RowOrigin] = []
    for index, row in enumerate(tensor.rows()):
        source = f"{name}[{index}]"
        if index < offset:
            mapping.append(RowOrigin(source, None, "the embeddings; not used"))
            continue
        site = (hook, index - offset)
        rows[site] = row
        last = offset == 1 and index == count - 1
        note = "Hugging Face gives the last hidden state after the final norm" if last else ""
        mapping.append(RowOrigin(source, site, note))
    return rows, mapping


def _convention(name: str, count: int, convention: Convention | None, model_layers: int | None) -> Convention:
    expected = {} if model_layers is None else {model_layers: "blocks", model_layers + 1: "hidden_states"}
    if model_layers is not None and count not in expected:
        raise InvalidVectors(
            f"Tensor `{name}` has {count} rows. A model of {model_layers} blocks has {model_layers} (`blocks`) "
            f"or {model_layers + 1} (`hidden_states`)."
        )
    inferred = cast("Convention | None", expected.get(count))
    if convention is None and inferred is None:
        raise ConventionRequired(
            f"Tensor `{name}` is a stack of {count} rows, and nothing says which block each belongs to. Give "
            "`convention`: `blocks` if row i is the output of block i, `hidden_states` if row 0 is the embeddings.",
            code="layers_required",
        )
    if convention not in (None, "blocks", "hidden_states"):
        raise InvalidVectors(f"{convention!r} is no convention. It is `blocks` or `hidden_states`.", "unknown_kind")
    if convention is not None and inferred not in (None, convention):
        raise InvalidVectors(
            f"Tensor `{name}` has {count} rows: of a model of {model_layers} blocks that is `{inferred}`, "
            f"not `{convention}`."
        )
    return convention or cast("Convention", inferred)


# Readers


def _safetensors(file: Path) -> Iterator[tuple[str, Numbers]]:
    import safetensors

    try:
        tensors: Any = safetensors.deserialize(file.read_bytes())  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise InvalidVectors(f"{file.name} is no safetensors file: {error}.", code="invalid_type") from None
    for name, tensor in sorted(tensors, key=lambda item: _natural(item[0])):
        what = f"The numbers of tensor `{name}`"
        dtype = _SAFETENSORS.get(tensor["dtype"])
        if dtype is None:
            raise no_floats(str(tensor["dtype"]), what)
        yield name, finite(Numbers(cast(Dtype, dtype), tuple(tensor["shape"]), bytes(tensor["data"])), what)


def _numpy(file: Path) -> Iterator[tuple[str, Numbers]]:
    import numpy

    try:
        loaded = numpy.load(file, allow_pickle=False)
        arrays = dict(loaded) if isinstance(loaded, numpy.lib.npyio.NpzFile) else {file.name: loaded}
    except (ValueError, EOFError, OSError) as error:
        raise InvalidVectors(f"{file.name} is no plain numpy file: {error}", code="invalid_type") from None
    for name in sorted(arrays, key=_natural):
        what = f"The numbers of tensor `{name}`"
        if arrays[name].dtype.kind != "f":
            raise no_floats(str(arrays[name].dtype), what)
        yield name, numbers(arrays[name], what)


def _natural(name: str) -> tuple[str, int]:
    """Sort `layer.2` before `layer.10`."""
    found = re.fullmatch(r"(.*?)(\d*)", name, re.DOTALL)
    assert found is not None
    return found[1], int(found[2] or 0)


_READERS: dict[str, Callable[[Path], Iterator[tuple[str, Numbers]]]] = {
    ".safetensors": _safetensors,
    ".npz": _numpy,
    ".npy": _numpy,
}
