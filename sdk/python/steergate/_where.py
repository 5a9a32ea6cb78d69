"""The builder of where-clauses: which rows a static vector steers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from ._check import checked, raise_first
from ._generated import models
from ._generated.rules_where import check_where

__all__ = ["Where", "clause_of"]

_PHASES = {"prompt": ("prompt", "answer"), "generation": ("generation", "answer")}
_LISTS = ("tokens", "positions")


class Where:
    """Which rows a static vector steers: a union of includes, minus excludes. Immutable.

    A row is the forward pass whose input is one token. Prompt rows are those of the prompt's tokens, generated rows
    those of the answer's; the answer rows are the prompt end, which produces the answer's first token, and all
    generated rows.

    Examples:
        >>> from steergate import Where
        >>> Where.answer()
        Where.answer()
        >>> (Where.generation() | Where.prompt_positions(0, -1)).exclude(generation_window=(0, 8))
        (Where.generation() | Where.prompt_positions(0, -1)).exclude(generation_window=(0, 8))
    """

    __slots__ = ("_clause",)

    def __init__(self, clause: models.Where) -> None:
        """Wrap a wire struct; the class methods are the usual way to get a clause.

        Raises:
            InvalidSteering: The clause breaks a rule; `param` is the path inside of it.
        """
        self._clause = checked(clause, models.Where)
        raise_first(check_where(self._clause), "")

    @property
    def clause(self) -> models.Where:
        """The wire struct."""
        return self._clause

    # Includes

    @classmethod
    def answer(cls) -> Where:
        """Every row that produces a token of the answer: the prompt end and all generated rows."""
        return cls(models.Where(answer="all"))

    @classmethod
    def prompt(cls) -> Where:
        """Every row of the prompt."""
        return cls(models.Where(prompt="all"))

    @classmethod
    def generation(cls) -> Where:
        """Every generated row."""
        return cls(models.Where(generation="all"))

    @classmethod
    def prompt_tokens(cls, *ids: int) -> Where:
        """Prompt rows whose token has one of these ids."""
        return cls(models.Where(prompt_tokens=list(ids)))

    @classmethod
    def prompt_positions(cls, *positions: int) -> Where:
        """Prompt rows by absolute position; a negative one counts from the end of the whole prompt."""
        return cls(models.Where(prompt_positions=list(positions)))

    @classmethod
    def prompt_window(cls, start: int, stop: int | None = None) -> Where:
        """Prompt rows `[start, stop)`, as in a slice: bounds may be negative, no stop is the end."""
        return cls(models.Where(prompt_window=(start, stop)))

    @classmethod
    def generation_tokens(cls, *ids: int) -> Where:
        """Generated rows whose token has one of these ids."""
        return cls(models.Where(generation_tokens=list(ids)))

    @classmethod
    def generation_positions(cls, *positions: int) -> Where:
        """Generated rows by position, counted from 0."""
        return cls(models.Where(generation_positions=list(positions)))

    @classmethod
    def generation_window(cls, start: int, stop: int | None = None) -> Where:
        """Generated rows `[start, stop)`; no stop is the end."""
        return cls(models.Where(generation_window=(start, stop)))

    # Excludes, and both together

    def exclude(
        self,
        *,
        prompt_tokens: Iterable[int] | None = None,
        prompt_positions: Iterable[int] | None = None,
        prompt_window: tuple[int, int | None] | None = None,
        generation_tokens: Iterable[int] | None = None,
        generation_positions: Iterable[int] | None = None,
        generation_window: tuple[int, int | None] | None = None,
    ) -> Where:
        """Leave rows out. Excludes win over all includes.

        Raises:
            InvalidSteering: The clause includes nothing of that phase, or a list or window is not in order.
            ValueError: There is another exclude window in that phase already.

        Examples:
            >>> Where.answer().exclude(generation_tokens=[13])
            Where.answer().exclude(generation_tokens=[13])
        """
        given: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "prompt_positions": prompt_positions,
            "prompt_window": prompt_window,
            "generation_tokens": generation_tokens,
            "generation_positions": generation_positions,
            "generation_window": generation_window,
        }
        changes = {
            exclude: _merged(name, getattr(self._clause, exclude), list(rows) if name.endswith(_LISTS) else tuple(rows))
            for name, rows in given.items()
            if rows is not None and (exclude := f"exclude_{name}")
        }
        return Where(replace(self._clause, **changes))

    def __or__(self, other: Where) -> Where:
        """Select the rows of both clauses.

        Raises:
            ValueError: The union is not one clause: two windows in one phase, or excludes of one clause that would
                hit rows of the other.
        """
        if not isinstance(other, Where):
            return NotImplemented
        for phase in _PHASES:
            if self._excludes(phase) != other._excludes(phase) and (
                (self._excludes(phase) and other._includes(phase)) or (other._excludes(phase) and self._includes(phase))
            ):
                raise ValueError(
                    f"the excludes of one clause would hit {phase} rows of the other. "
                    "Exclude from the union, or send two vectors."
                )
        merged = {
            name: _merged(name, getattr(self._clause, name), getattr(other._clause, name))
            for name in self._clause.__struct_fields__
        }
        return Where(models.Where(**merged))

    def _includes(self, phase: str) -> bool:
        names = (*_PHASES[phase], f"{phase}_tokens", f"{phase}_positions", f"{phase}_window")
        return any(getattr(self._clause, name) is not None for name in names)

    def _excludes(self, phase: str) -> dict[str, Any]:
        names = [f"exclude_{phase}_{what}" for what in ("tokens", "positions", "window")]
        return {name: getattr(self._clause, name) for name in names if getattr(self._clause, name) is not None}

    def __eq__(self, other: object) -> bool:
        return self._clause == other._clause if isinstance(other, Where) else NotImplemented

    def __hash__(self) -> int:
        return hash(repr(self))

    def __repr__(self) -> str:
        given = {name: getattr(self._clause, name) for name in self._clause.__struct_fields__}
        includes = [
            f"Where.{name}({'' if value == 'all' else ', '.join(map(repr, value))})"
            for name, value in given.items()
            if value is not None and not name.startswith("exclude_")
        ]
        excludes = [
            f"{name.removeprefix('exclude_')}={value!r}"
            for name, value in given.items()
            if value is not None and name.startswith("exclude_")
        ]
        union = " | ".join(includes)
        if not excludes:
            return union
        return f"{f'({union})' if len(includes) > 1 else union}.exclude({', '.join(excludes)})"


def _merged(name: str, mine: Any, theirs: Any) -> Any:
    """Merge one member of two clauses."""
    if mine is None or theirs is None:
        return theirs if mine is None else mine
    if name.endswith(_LISTS):
        return [*mine, *(item for item in theirs if item not in mine)]
    if mine != theirs:
        window = name.removeprefix("exclude_").replace("_", " ")
        raise ValueError(
            f"one clause holds one {window}, and {mine} and {theirs} were given. "
            "List positions instead, or send two vectors."
        )
    return mine


def clause_of(where: Where | models.Where) -> models.Where:
    """Return the wire struct of a clause, whichever way it was made."""
    return where.clause if isinstance(where, Where) else where
