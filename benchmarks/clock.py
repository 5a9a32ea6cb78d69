"""The clock: wall time, or the processor time of one thread where others share the machine."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter, process_time

Now = Callable[[], float]


def clock(*, cpu_time: bool) -> Now:
    """Seconds by the wall, or seconds of processor time of this process."""
    return process_time if cpu_time else perf_counter
