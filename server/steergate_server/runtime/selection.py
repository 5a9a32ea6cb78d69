"""Which static vectors each row of a request selects (wire.md, Where), resolved once, when the request is admitted.

Row p is the forward pass whose input is token p. A prompt has P rows; row P - 1 is the prompt end and rows from P on
are generated. A phase is a property of the row alone, never of the size of a chunk. A set of vectors is a bit mask
over the plan's vectors, in their order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from steergate_server.schema.requests import Where

BEFORE_PROMPT_END, PROMPT_END, GENERATED = 0, 1, 2
PHASES = 3

Mask = NDArray[np.int64]

_PHASE_WORDS = ("prompt", "generation", "answer")
_TOKEN_CLAUSES = ("generation_tokens", "exclude_generation_tokens")


class TooManySetsError(ValueError):
    """Clauses that cut the rows of a request into more sets of vectors than it may have."""


class Selection(NamedTuple):
    """Masks by row. `prompt` [P]. A generated position j past the end of the arrays reads their last element.

    `certain` [G]: selected unless the token is excluded; `possible` [G]: selected if the token is included. Where no
    clause names generated token ids, `tokens` is empty and `certain` is the answer. Otherwise `tokens` [T] are the ids
    that matter, sorted, with `included` and `excluded` [T]: the vectors whose clause names each.
    """

    prompt: Mask
    certain: Mask
    possible: Mask
    tokens: NDArray[np.int64]
    included: Mask
    excluded: Mask

    def generated(self, positions: NDArray[np.int64], tokens: NDArray[np.int64]) -> Mask:
        """Masks of generated positions [n] whose input tokens are `tokens` [n]."""
        at = np.minimum(positions, len(self.certain) - 1)
        certain: Mask = self.certain[at]
        possible: Mask = self.possible[at]
        if not len(self.tokens):
            return certain
        index = np.minimum(np.searchsorted(self.tokens, tokens), len(self.tokens) - 1)
        known = self.tokens[index] == tokens
        included = np.where(known, self.included[index], 0)
        excluded = np.where(known, self.excluded[index], 0)
        masks: Mask = (certain | (possible & included)) & ~excluded
        return masks

    def distinct(self, limit: int | None = None) -> list[int]:
        """Every mask that some row can have, 0 left out, sorted.

        limit: raise TooManySetsError as soon as more are found: clauses can be made to cut rows into very many sets.
        """
        found = set(self.prompt.tolist()) - {0}
        pairs = set(zip(self.certain.tolist(), self.possible.tolist(), strict=True))
        signatures = {(0, 0), *zip(self.included.tolist(), self.excluded.tolist(), strict=True)}
        for certain, possible in pairs:
            found |= {(certain | (possible & included)) & ~excluded for included, excluded in signatures} - {0}
            if limit is not None and len(found) > limit:
                raise TooManySetsError(f"the clauses cut the rows into more than {limit} different sets of vectors")
        return sorted(found)

    def first_row(self, prompt_length: int) -> int | None:
        """The first row that can be selected, or None if none ever is."""
        rows = self.prompt.nonzero()[0]
        if len(rows):
            return int(rows[0])
        reachable = self.certain | (self.possible if len(self.tokens) else 0)
        later = np.atleast_1d(reachable).nonzero()[0]
        return prompt_length + int(later[0]) if len(later) else None


def select(clauses: Sequence[Where], prompt: Sequence[int] | NDArray[np.int64], max_length: int) -> Selection:
    """Resolve the clauses of a plan's vectors against a prompt; `max_length` bounds the rows of the request."""
    length = len(prompt)
    if not clauses:
        nothing = np.zeros(0, dtype=np.int64)
        return Selection(np.zeros(length, dtype=np.int64), _NONE, _NONE, nothing, nothing, nothing)
    ids = np.asarray(prompt, dtype=np.int64)
    later = max(1, max_length - length)
    if all(is_phase_only(where) for where in clauses):
        later = 1
    prompt_masks = np.zeros(length, dtype=np.int64)
    certain, possible = np.zeros(later, dtype=np.int64), np.zeros(later, dtype=np.int64)
    named = sorted({token for where in clauses for clause in _TOKEN_CLAUSES for token in getattr(where, clause) or ()})
    tokens = np.asarray(named, dtype=np.int64)
    included, excluded = np.zeros(len(tokens), dtype=np.int64), np.zeros(len(tokens), dtype=np.int64)
    for number, where in enumerate(clauses):
        bit = np.int64(1 << number)
        prompt_masks |= bit * _prompt_rows(where, ids)
        base, open_rows = _generated_rows(where, later)
        certain |= bit * base
        if where.generation_tokens is not None:
            possible |= bit * open_rows
            included |= bit * np.isin(tokens, where.generation_tokens)
        if where.exclude_generation_tokens is not None:
            excluded |= bit * np.isin(tokens, where.exclude_generation_tokens)
    return Selection(prompt_masks, certain, possible, tokens, included, excluded)


_NONE = np.zeros(1, dtype=np.int64)
"""That of generated rows which no vector selects. Nobody may write to it."""


def is_phase_only(where: Where) -> bool:
    """Whether a clause tells rows apart by their phase alone."""
    return all(getattr(where, name) is None for name in where.__struct_fields__ if name not in _PHASE_WORDS)


def ignores_phase(where: Where) -> bool:
    """Whether the clause treats every row alike, so that its effect does not depend on where the prompt ends."""
    everywhere = where.prompt is not None and (where.generation is not None or where.answer is not None)
    return everywhere and is_phase_only(where)


def has_generation_part(where: Where) -> bool:
    """Whether the clause can select generated rows."""
    words = ("generation", "answer", "generation_tokens", "generation_positions", "generation_window")
    return any(getattr(where, name) is not None for name in words)


def _prompt_rows(where: Where, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
    length = len(ids)
    rows = np.full(length, where.prompt is not None)
    if where.answer is not None:
        rows[-1:] = True
    rows |= _named_rows(length, where.prompt_positions, where.prompt_window, from_end=True)
    if where.prompt_tokens is not None:
        rows |= np.isin(ids, where.prompt_tokens)
    out = _named_rows(length, where.exclude_prompt_positions, where.exclude_prompt_window, from_end=True)
    if where.exclude_prompt_tokens is not None:
        out |= np.isin(ids, where.exclude_prompt_tokens)
    return rows & ~out


def _generated_rows(where: Where, length: int) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """By generated position: included whatever the token and not left out; not left out."""
    rows = np.full(length, where.generation is not None or where.answer is not None)
    rows |= _named_rows(length, where.generation_positions, where.generation_window, from_end=False)
    kept = ~_named_rows(length, where.exclude_generation_positions, where.exclude_generation_window, from_end=False)
    return rows & kept, kept


def _named_rows(
    length: int, positions: Iterable[int] | None, window: tuple[int, int | None] | None, *, from_end: bool
) -> NDArray[np.bool_]:
    """Rows at some positions and in a window `[start, stop)`; what lies outside selects nothing, as a slice would."""
    rows = np.zeros(length, dtype=bool)
    if positions is not None:
        at = np.asarray(list(positions), dtype=np.int64)
        if from_end:
            at = np.where(at < 0, at + length, at)
        rows[at[(at >= 0) & (at < length)]] = True
    if window is not None:
        rows[slice(*window)] = True
    return rows


def reachable_phases(where: Where) -> tuple[bool, bool, bool]:
    """Whether a clause may select rows (before the prompt end, at the prompt end, generated) of some prompt."""
    prompt = any(
        getattr(where, name) is not None for name in ("prompt", "prompt_tokens", "prompt_positions", "prompt_window")
    )
    return prompt, prompt or where.answer is not None, has_generation_part(where)
