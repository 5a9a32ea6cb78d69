"""Rules of where-clauses: what one clause must satisfy, and whether two can select the same row.

Pure, like all of the rules, and shipped with them.
"""

from collections.abc import Collection, Iterator, Sequence
from itertools import product

from .errors import Problem
from .requests import Where

__all__ = ["can_overlap", "check_where"]

Problems = Iterator[Problem]

_PROMPT = ("prompt", "answer", "prompt_tokens", "prompt_positions", "prompt_window")
_GENERATION = ("generation", "answer", "generation_tokens", "generation_positions", "generation_window")
_EXCLUDES = ("tokens", "positions", "window")


def check_where(where: Where) -> Problems:
    """Yield everything that is wrong with a clause; paths start at the clause."""
    if all(getattr(where, name) is None for name in (*_PROMPT, *_GENERATION)):
        message = "The clause includes no rows. Include some, such as `answer: all` or `prompt_positions: [-1]`."
        yield Problem("empty_selection", message, ())
    for phase, includes in (("prompt", _PROMPT), ("generation", _GENERATION)):
        for name in (*includes[2:], *(f"exclude_{phase}_{what}" for what in _EXCLUDES)):
            yield from _member(name, getattr(where, name))
        if any(getattr(where, name) is not None for name in includes):
            continue
        for name in (f"exclude_{phase}_{what}" for what in _EXCLUDES):
            if getattr(where, name) is not None:
                message = f"`{name}` leaves rows out of a phase that the clause does not include. Include some of it."
                yield Problem("exclude_without_phase", message, (name,))


def _member(name: str, value: Sequence[int | None] | None) -> Problems:
    if value is None:
        return
    if name.endswith("_window"):
        yield from _window(name, value)
    elif not value:
        yield Problem("empty_selection", f"`{name}` is empty. List at least one, or leave it out.", (name,))
    elif not name.endswith("prompt_positions"):
        code = "invalid_position" if name.endswith("_positions") else "out_of_range"
        for index, number in enumerate(value):
            if number is not None and number < 0:
                yield Problem(code, f"{number} was given; it must be 0 or more.", (name, index))


def _window(name: str, window: Sequence[int | None]) -> Problems:
    start, stop = window if len(window) == 2 else (None, None)
    if start is None:
        yield Problem("invalid_window", "A window is [start, stop); only stop may be null.", (name,))
    elif name.endswith("generation_window") and (start < 0 or (stop is not None and stop < 0)):
        message = f"[{start}, {stop}) was given; the end of the answer is not known, so bounds must be 0 or more."
        yield Problem("invalid_window", message, (name,))
    elif stop is not None and (start < 0) == (stop < 0) and stop <= start:
        message = f"[{start}, {stop}) holds no row: a window is half open, so stop must come after start."
        yield Problem("invalid_window", message, (name,))


# Overlap of two clauses
#
# A row of the prompt has three coordinates that a client cannot tie to each other beforehand: its distance from the
# prompt's start, its distance from the prompt's end (0 is the prompt end), and its token id. A generated row has two:
# its distance from the start of the answer, and its token id. All are natural numbers, and every member of a clause is
# a box: a choice of values for some of the coordinates. Two clauses overlap when an include of one meets an include of
# the other outside of every exclude of both.

_Values = Collection[int]
_Box = dict[str, _Values]

_END = 2**32
_ANY = range(_END)


def can_overlap(a: Where, b: Where) -> bool:
    """Tell whether some prompt and some answer have a row that both clauses select.

    Only the clauses are looked at: what is known of the prompt at hand plays no part, so the verdict is the same on
    the client and the server.
    """
    for phase in ("prompt", "generation"):
        excludes = [*_excludes(a, phase), *_excludes(b, phase)]
        for first, second in product(_includes(a, phase), _includes(b, phase)):
            if _meet(first, second, excludes):
                return True
    return False


def _includes(where: Where, phase: str) -> Iterator[_Box]:
    if getattr(where, phase) is not None:
        yield {}
    if where.answer is not None:
        yield {"from_end": {0}} if phase == "prompt" else {}
    yield from _boxes(where, phase)


def _excludes(where: Where, phase: str) -> Iterator[_Box]:
    yield from _boxes(where, f"exclude_{phase}")


def _boxes(where: Where, prefix: str) -> Iterator[_Box]:
    tokens = getattr(where, f"{prefix}_tokens")
    if tokens is not None:
        yield {"token": set(tokens)}
    positions = getattr(where, f"{prefix}_positions")
    if positions is not None:
        yield {"from_start": {position for position in positions if position >= 0}}
        yield {"from_end": {-1 - position for position in positions if position < 0}}
    window = getattr(where, f"{prefix}_window")
    if window is not None:
        yield _window_box(*window)


def _window_box(start: int, stop: int | None) -> _Box:
    box: _Box = {}
    if start >= 0 or (stop is not None and stop >= 0):
        box["from_start"] = range(max(start, 0), stop if stop is not None and stop >= 0 else _END)
    if start < 0 or (stop is not None and stop < 0):
        box["from_end"] = range(-stop if stop is not None and stop < 0 else 0, -start if start < 0 else _END)
    return box


def _meet(first: _Box, second: _Box, excludes: list[_Box]) -> bool:
    """Tell whether some row is in both boxes and in no exclude."""
    # A row is outside of a box when one of its coordinates is: try each way to leave all of the excludes.
    for leaving in product(*excludes):
        outside: dict[str, list[_Values]] = {}
        for name, box in zip(leaving, excludes, strict=True):
            outside.setdefault(name, []).append(box[name])
        if all(
            _some([first.get(name, _ANY), second.get(name, _ANY)], outside.get(name, []))
            for name in ("from_start", "from_end", "token")
        ):
            return True
    return False


def _some(inside: list[_Values], outside: list[_Values]) -> bool:
    """Tell whether some number is in all of `inside` and in none of `outside`."""
    listed = [values for values in inside if not isinstance(values, range)]
    if listed:
        return any(
            all(value in values for values in inside) and not any(value in values for values in outside)
            for value in min(listed, key=len)
        )
    ranges = [values for values in inside if isinstance(values, range)]
    value, stop = max(values.start for values in ranges), min(values.stop for values in ranges)
    while value < stop:
        holes = [values for values in outside if value in values]
        if not holes:
            return True
        value = max(values.stop if isinstance(values, range) else value + 1 for values in holes)
    return False
