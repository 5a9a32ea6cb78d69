"""Arrays of any library as little-endian bytes. Neither numpy nor torch is imported: an array brings its own."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Sequence
from itertools import chain
from math import isfinite, prod
from typing import Any, NamedTuple, Protocol, TypeAlias, cast, runtime_checkable

from ._generated.words import Dtype
from .errors import InvalidVectors

__all__ = [
    "ITEM_SIZES",
    "Array",
    "ArrayLike",
    "Dtype",
    "Numbers",
    "finite",
    "is_array",
    "no_floats",
    "numbers",
    "to_floats",
    "widest",
]

ITEM_SIZES: dict[str, int] = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes per element."""

_LETTERS = {"float16": "e", "float32": "f", "float64": "d"}


@runtime_checkable
class ArrayLike(Protocol):
    """An array of another library: a numpy array, a torch tensor."""

    @property
    def shape(self) -> Any: ...
    @property
    def dtype(self) -> Any: ...


Array: TypeAlias = ArrayLike | Sequence[float] | Sequence[Sequence[float]]
"""Numbers in rows: an array of numpy or torch, or plain lists of floats."""


class Numbers(NamedTuple):
    """An array as it travels: C-contiguous and little-endian."""

    dtype: Dtype
    shape: tuple[int, ...]
    data: bytes

    def rows(self) -> list[Numbers]:
        """Take a matrix apart into its rows."""
        stride = prod(self.shape[1:]) * ITEM_SIZES[self.dtype]
        return [
            Numbers(self.dtype, self.shape[1:], self.data[start : start + stride])
            for start in range(0, len(self.data), stride)
        ]


def is_array(value: object) -> bool:
    """Tell whether a value is meant as numbers."""
    return isinstance(value, ArrayLike | list | tuple)


def numbers(value: Array, what: str = "The numbers") -> Numbers:
    """Bring an array of finite floats into the form in which it travels.

    Floats of numpy and torch keep their precision; lists and arrays of integers become float32.

    Args:
        value: The array.
        what: How messages call it; a plural.

    Raises:
        InvalidVectors: It is no array of numbers, it is ragged, or not all of it is finite.
    """
    if not isinstance(value, ArrayLike):
        return _from_lists(value, what)
    return finite(_from_torch(value, what) if hasattr(value, "detach") else _from_numpy(value, what), what)


def _from_torch(tensor: Any, what: str) -> Numbers:
    tensor = tensor.detach().cpu().contiguous()
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in ITEM_SIZES:
        if not name.startswith(("int", "uint")):
            raise no_floats(name, what)
        tensor, name = tensor.float(), "float32"
    data = tensor.reshape(-1).view(cast(Any, sys.modules["torch"]).uint8).numpy().tobytes()
    return Numbers(cast(Dtype, name), tuple(tensor.shape), data)


def _from_numpy(array: Any, what: str) -> Numbers:
    name = array.dtype.name
    if name not in ITEM_SIZES:
        if array.dtype.kind not in "iu":
            raise no_floats(str(name), what)
        array, name = array.astype("<f4"), "float32"
    if name != "bfloat16":  # a type of its own that knows no byte order
        array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    return Numbers(name, tuple(array.shape), array.tobytes())


def _from_lists(value: Any, what: str) -> Numbers:
    if not isinstance(value, list | tuple):
        given = type(value).__name__
        raise InvalidVectors(
            f"{what} are a {given}. Give a list of floats, a numpy array or a tensor.", code="invalid_type"
        )
    nested = bool(value) and all(isinstance(item, list | tuple) for item in value)
    if nested and len({len(row) for row in value}) > 1:
        raise InvalidVectors(f"{what} are ragged. Give rows of one length.")
    flat = [*chain.from_iterable(value)] if nested else value
    strange = next((item for item in flat if not _is_number(item)), None)
    if strange is not None:
        raise InvalidVectors(f"{what} hold {strange!r}. Give floats.", code="invalid_type")
    items = [float(item) for item in flat]
    shape = (len(value), len(value[0])) if nested else (len(value),)
    return Numbers("float32", shape, _float32(items, what))


def _is_number(item: Any) -> bool:
    return not isinstance(item, bool | str | bytes) and hasattr(item, "__float__")


def _float32(items: Sequence[float], what: str) -> bytes:
    try:
        data = struct.pack(f"<{len(items)}f", *items)
    except OverflowError:
        data = b""
    if (not data and items) or not all(map(isfinite, items)):
        message = (
            f"{what} are not all finite, or do not fit float32 once they are scaled. "
            "Look for NaN, infinity, and magnitudes above 3.4e38."
        )
        raise InvalidVectors(message, code="not_finite")
    return data


def finite(given: Numbers, what: str) -> Numbers:
    """Return numbers that are all finite, also in float32.

    Raises:
        InvalidVectors: They are not.
    """
    _float32(to_floats(given), what)
    return given


def no_floats(dtype: str, what: str) -> InvalidVectors:
    """Build the refusal of another element type."""
    return InvalidVectors(f"{what} are {dtype}. Give float16, bfloat16, float32 or float64.", code="invalid_type")


def to_floats(row: Numbers) -> tuple[float, ...]:
    """Read the elements, exactly."""
    if row.dtype == "bfloat16":
        # A bfloat16 is the upper half of a float32.
        halves = struct.unpack(f"<{len(row.data) // 2}H", row.data)
        return struct.unpack(f"<{len(halves)}f", struct.pack(f"<{len(halves)}I", *(half << 16 for half in halves)))
    letter = _LETTERS[row.dtype]
    return struct.unpack(f"<{len(row.data) // ITEM_SIZES[row.dtype]}{letter}", row.data)


def widest(rows: Iterable[Numbers]) -> list[Numbers]:
    """Bring rows to one element type that holds all of them exactly."""
    rows = list(rows)
    dtypes = {row.dtype for row in rows}
    if len(dtypes) <= 1:
        return rows
    dtype: Dtype = "float64" if "float64" in dtypes else "float32"
    letter = _LETTERS[dtype]
    return [Numbers(dtype, row.shape, struct.pack(f"<{prod(row.shape)}{letter}", *to_floats(row))) for row in rows]
