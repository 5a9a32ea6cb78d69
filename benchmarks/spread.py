"""Statistics: medians, quartiles and paired ratios. Pure Python, so that nothing is loaded for it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

Pair = tuple[float, float]
"""Two times taken right after each other: of the reference, and of what is compared with it."""


class Spread(NamedTuple):
    """Median and quartiles of so many samples."""

    median: float
    low: float
    high: float
    samples: int


def spread(samples: Sequence[float]) -> Spread:
    """Median and quartiles of samples. Raises ValueError where there are none."""
    if not samples:
        raise ValueError("there are no samples")
    if len(samples) == 1:
        return Spread(samples[0], samples[0], samples[0], 1)
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return Spread(median, low, high, len(samples))


def ratios(pairs: Sequence[Pair]) -> list[float]:
    """What is compared over the reference, pair by pair: drift of the machine hits both sides of a pair alike."""
    return [other / reference for reference, other in pairs]


def turn_time(steps: Sequence[float]) -> float:
    """The time of one step of a turn: the median of all but the first, which pays for the other process's turn."""
    if len(steps) < 2:
        raise ValueError("a turn has at least two steps")
    return statistics.median(steps[1:])
