"""Sets of vectors: rows of numbers by site, from arrays or from files, ready to be sent or registered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import isfinite
from operator import index
from os import PathLike
from typing import Literal, NamedTuple, TypeAlias

from ._arrays import Array, Numbers, numbers, to_floats, widest
from ._generated.hooks import HOOKS, site_name
from ._generated.models import SteeringHookPacked
from .errors import InvalidVectors

__all__ = ["Convention", "RowOrigin", "VectorSet"]

Convention: TypeAlias = Literal["blocks", "hidden_states"]
"""What row i of a stack means: the output of block i, or Hugging Face's `hidden_states[i]`."""

Site: TypeAlias = tuple[str, int]
"""Hook and layer."""


class RowOrigin(NamedTuple):
    """Where a row of a file went.

    Examples:
        >>> print(RowOrigin("directions[0]", None, "the embeddings; not used"))
        directions[0] -> the embeddings; not used
        >>> print(RowOrigin("directions[1]", ("post_block", 0)))
        directions[1] -> 0:post_block
    """

    source: str
    """The tensor, with the row's index in a stack."""
    site: Site | None
    """Hook and layer, or None where the row is not used."""
    note: str = ""
    """What is to be known about it."""

    def __str__(self) -> str:
        parts = [site_name(*self.site)] if self.site is not None else []
        return f"{self.source} -> {'; '.join([*parts, *filter(None, [self.note])])}"


class _Row(NamedTuple):
    """A vector: numbers and the factor that belongs to them."""

    numbers: Numbers
    scale: float = 1.0

    @property
    def width(self) -> int:
        return self.numbers.shape[0]


class VectorSet:
    """Vectors by site (hook and layer). Immutable; every method that changes something returns a new set.

    Examples:
        >>> from steergate.vectors import VectorSet
        >>> calm = VectorSet.from_rows({10: [0.5, -1.0], 11: [0.25, 2.0]})
        >>> calm
        <VectorSet post_block: layers 10-11, 2 wide, float32>
        >>> calm.select(layers=[11]).scaled(2.0).packed()["post_block"].scales
        [2.0]
    """

    __slots__ = ("_mapping", "_rows")

    def __init__(self, rows: Mapping[Site, Numbers], mapping: Iterable[RowOrigin] = ()) -> None:
        """Make a set of rows that are in wire form already; `from_rows` and `load` are the usual ways to get one."""
        self._rows = {(hook, _index(layer)): _Row(row) for (hook, layer), row in rows.items()}
        self._mapping = tuple(mapping)
        self._check()

    def _check(self) -> None:
        if not self._rows:
            raise InvalidVectors("No rows were given. Give at least one.", code="out_of_range")
        first: dict[str, int] = {}
        for (hook, layer), row in self._rows.items():
            name = site_name(hook, layer)
            if layer < 0:
                raise InvalidVectors(f"{name} is no site: layers are counted from 0.", code="out_of_range")
            if len(row.numbers.shape) != 1 or row.width == 0:
                raise InvalidVectors(f"{name} has the shape {list(row.numbers.shape)}. Give [width].")
            other = first.setdefault(hook, layer)
            if row.width != self._rows[hook, other].width:
                raise InvalidVectors(
                    f"{name} is {row.width} wide, {site_name(hook, other)} is {self._rows[hook, other].width}. "
                    "All rows at one hook must be equally wide."
                )

    @classmethod
    def from_rows(cls, rows: Mapping[int, Array], hook: str = "post_block") -> VectorSet:
        """Make a set of one array per layer, all at one hook.

        Args:
            rows: Arrays of shape [width] by layer, counted from 0: lists of floats, numpy arrays or tensors. Arrays
                keep their element type, lists become float32.
            hook: Where they belong.

        Raises:
            InvalidVectors: A row is no vector of finite floats, or widths differ.

        Examples:
            >>> VectorSet.from_rows({3: [1.0, 0.0, 0.0, 0.0]}, hook="mlp_out")
            <VectorSet mlp_out: layer 3, 4 wide, float32>
        """
        return cls(
            {(hook, layer): numbers(row, f"The numbers of layer {layer}") for layer, row in rows.items()},
        )

    @classmethod
    def load(
        cls,
        path: str | PathLike[str],
        *,
        hook: str | None = None,
        layers: Iterable[int] | None = None,
        convention: Convention | None = None,
        model_layers: int | None = None,
    ) -> VectorSet:
        """Read a file of vectors: `.safetensors`, `.npz` or `.npy`. Nothing in it is ever executed.

        The file holds one tensor [width] per layer, named `layer.N`, `direction.N` or `N`; or one tensor [width] of
        any name, with `layers=[N]`; or one stack [rows, width].

        Args:
            path: The file.
            hook: Where the rows belong; `post_block`, the output of a block, if left out.
            layers: Only these layers; for one tensor without a layer in its name, that layer.
            convention: What row i of a stack means: `blocks`, the output of block i; or `hidden_states`, Hugging
                Face's `hidden_states[i]`: row 0 the embeddings, row i the output of block i - 1.
            model_layers: Number of the model's blocks, from which the convention of a stack is inferred.

        Raises:
            InvalidVectors: With the name of the tensor that does not fit. Nothing is skipped.
            ConventionRequired: The rows of a stack could be either.
            OSError: The file cannot be read.

        Examples:
            >>> calm = VectorSet.load("calm.npy", convention="hidden_states")  # doctest: +SKIP
            >>> print(*calm.mapping, sep="\\n")  # doctest: +SKIP
            calm[0] -> the embeddings; not used
            calm[1] -> 0:post_block
        """
        from ._vector_files import read

        wanted = None if layers is None else list(layers)
        rows, mapping = read(path, hook or "post_block", wanted, convention, model_layers)
        loaded = cls(rows, mapping)
        return loaded if wanted is None else loaded.select(layers=wanted)

    @property
    def hooks(self) -> tuple[str, ...]:
        """The hooks, in execution order."""
        names = dict.fromkeys(hook for hook, _ in self._rows)
        return tuple(sorted(names, key=lambda hook: HOOKS.index(hook) if hook in HOOKS else len(HOOKS)))

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers of all hooks, ascending."""
        return tuple(sorted({layer for _, layer in self._rows}))

    @property
    def width(self) -> int | None:
        """Elements per row; None where hooks differ."""
        widths = {row.width for row in self._rows.values()}
        return widths.pop() if len(widths) == 1 else None

    @property
    def mapping(self) -> tuple[RowOrigin, ...]:
        """Where each row of the file went; empty for a set that comes from arrays."""
        return self._mapping

    def row(self, layer: int, hook: str = "post_block") -> tuple[float, ...]:
        """Read one vector, its scale included.

        Raises:
            KeyError: There is no such site.
        """
        row = self._rows[hook, layer]
        return tuple(value * row.scale for value in to_floats(row.numbers))

    def select(self, *, layers: Iterable[int] | None = None, hook: str | None = None) -> VectorSet:
        """Keep some layers, some hook.

        Raises:
            InvalidVectors: There are no rows at one of them.

        Examples:
            >>> VectorSet.from_rows({3: [1.0], 4: [2.0], 5: [3.0]}).select(layers=range(3, 5))
            <VectorSet post_block: layers 3-4, 1 wide, float32>
        """
        kept = {site: row for site, row in self._rows.items() if hook is None or site[0] == hook}
        if not kept:
            raise InvalidVectors(
                f"There are no rows at hook `{hook}`, only at {', '.join(self.hooks)}.", code="layer_not_in_payload"
            )
        if layers is not None:
            wanted = list(layers)
            present = sorted({layer for _, layer in kept})
            for layer in wanted:
                if layer not in present:
                    message = f"There is no row for layer {layer}, only for {', '.join(map(str, present))}."
                    raise InvalidVectors(message, code="layer_not_in_payload")
            kept = {site: row for site, row in kept.items() if site[1] in wanted}
        return self._with(kept, [origin for origin in self._mapping if origin.site in kept])

    def scaled(self, factor: float) -> VectorSet:
        """Multiply every vector; the factor travels beside the numbers, so nothing is rounded here.

        Raises:
            InvalidVectors: The factor is not finite.
        """
        if not isfinite(factor):
            raise InvalidVectors(f"{factor} was given; a scale must be finite.", code="not_finite")
        rows = {site: row._replace(scale=row.scale * float(factor)) for site, row in self._rows.items()}
        return self._with(rows, self._mapping)

    def packed(self) -> dict[str, SteeringHookPacked]:
        """Return the rows as the wire has them, by hook, layers ascending."""
        return {hook: self._packed_hook(hook) for hook in self.hooks}

    def _packed_hook(self, hook: str) -> SteeringHookPacked:
        layers = sorted(layer for name, layer in self._rows if name == hook)
        rows = [self._rows[hook, layer] for layer in layers]
        scales = [row.scale for row in rows]
        matrix = widest(row.numbers for row in rows)
        return SteeringHookPacked(
            dtype=matrix[0].dtype,
            shape=[len(rows), rows[0].width],
            layer_indices=layers,
            data=b"".join(row.data for row in matrix),
            scales=scales if any(scale != 1.0 for scale in scales) else None,
        )

    def _with(self, rows: dict[Site, _Row], mapping: Iterable[RowOrigin]) -> VectorSet:
        made = VectorSet.__new__(VectorSet)
        made._rows = rows
        made._mapping = tuple(mapping)
        made._check()
        return made

    def __or__(self, other: VectorSet) -> VectorSet:
        """Put two sets together, such as rows at two hooks.

        Raises:
            InvalidVectors: Both have rows at one site.
        """
        if not isinstance(other, VectorSet):
            return NotImplemented
        for hook, layer in self._rows.keys() & other._rows.keys():
            raise InvalidVectors(f"Both have a row at {site_name(hook, layer)}.", code="duplicate_layer")
        return self._with({**self._rows, **other._rows}, (*self._mapping, *other._mapping))

    def __eq__(self, other: object) -> bool:
        return self._rows == other._rows if isinstance(other, VectorSet) else NotImplemented

    def __hash__(self) -> int:
        return hash(frozenset(self._rows.items()))

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        parts = []
        for hook in self.hooks:
            rows = {layer: row for (name, layer), row in self._rows.items() if name == hook}
            dtypes = "/".join(sorted({row.numbers.dtype for row in rows.values()}))
            plural = "s" if len(rows) > 1 else ""
            parts.append(f"{hook}: layer{plural} {ranges(rows)}, {next(iter(rows.values())).width} wide, {dtypes}")
        return f"<VectorSet {'; '.join(parts)}>"


def _index(layer: object) -> int:
    """Bring a layer into Python's own integers; numpy's are taken as well."""
    if isinstance(layer, bool) or not hasattr(layer, "__index__"):
        raise InvalidVectors(f"{layer!r} is no layer. Give an integer.", code="invalid_type")
    return index(layer)


def ranges(layers: Iterable[int]) -> str:
    """Write layers the short way: `3, 10-25`."""
    spans: list[list[int]] = []
    for layer in sorted(layers):
        if spans and layer == spans[-1][-1] + 1:
            spans[-1][1:] = [layer]
        else:
            spans.append([layer])
    return ", ".join("-".join(map(str, span)) for span in spans)
