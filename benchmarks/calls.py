"""Timing of small functions: each many times in a row, all in turn, round by round."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from benchmarks.clock import Now


class Timing(NamedTuple):
    """Seconds of one call, one sample for each round; `aim`: the most its median should be, None for no aim."""

    name: str
    samples: list[float]
    aim: float | None


def timed(
    cases: Mapping[str, Callable[[], object]], aims: Mapping[str, float], now: Now, *, rounds: int, seconds: float = 0.1
) -> list[Timing]:
    """Time cases by turns. now: the clock; seconds: how long a sample takes, roughly."""
    counts = {name: _count(call, now, seconds) for name, call in cases.items()}
    samples: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, call in cases.items():
            samples[name].append(_time(call, now, counts[name]) / counts[name])
    return [Timing(name, found, aims.get(name)) for name, found in samples.items()]


def _count(call: Callable[[], object], now: Now, seconds: float) -> int:
    """How many calls fill a sample."""
    _time(call, now, 3)
    return max(1, int(seconds / max(_time(call, now, 3) / 3, 1e-9)))


def _time(call: Callable[[], object], now: Now, count: int) -> float:
    started = now()
    for _ in range(count):
        call()
    return now() - started
