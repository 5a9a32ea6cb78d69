"""Which rows a where-clause selects: one token at a time, written from the wire's description alone.

A clause is a plain mapping, as it stands in JSON.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Clause = Mapping[str, Any]


def selects(where: Clause, tokens: Sequence[int], prompt: int, row: int) -> bool:
    """Tell whether row `row` is selected; `tokens[row]` is the row's input token, `prompt` the prompt's length."""
    return _included(where, tokens[row], prompt, row) and not _named(where, "exclude_", tokens[row], prompt, row)


def _included(where: Clause, token: int, prompt: int, row: int) -> bool:
    if row < prompt and where.get("prompt") == "all":
        return True
    if row >= prompt and where.get("generation") == "all":
        return True
    if row >= prompt - 1 and where.get("answer") == "all":
        return True
    return _named(where, "", token, prompt, row)


def _named(where: Clause, prefix: str, token: int, prompt: int, row: int) -> bool:
    """Tell whether one of the six selectors that name tokens, positions or windows names this row."""
    phase = "prompt" if row < prompt else "generation"
    position = row if row < prompt else row - prompt

    def member(what: str) -> Any:
        return where.get(f"{prefix}{phase}_{what}")

    if member("tokens") is not None and token in member("tokens"):
        return True
    for wanted in member("positions") or ():
        if position == (wanted + prompt if wanted < 0 else wanted):
            return True
    if member("window") is not None:
        start, stop = member("window")
        first = start + prompt if start < 0 else start
        last = None if stop is None else stop + prompt if stop < 0 else stop
        return position >= first and (last is None or position < last)
    return False
