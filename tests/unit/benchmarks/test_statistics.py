"""Medians, quartiles, pairs and tables, against numbers worked out by hand or by numpy."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.calls import timed
from benchmarks.profiling import Clock
from benchmarks.report import table
from benchmarks.spread import ratios, spread, turn_time


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 10, 31])
def test_spread_is_what_numpy_says(count: int) -> None:
    samples = np.random.default_rng(count).exponential(size=count).tolist()
    found = spread(samples)
    assert found.samples == count
    np.testing.assert_allclose((found.low, found.median, found.high), np.quantile(samples, (0.25, 0.5, 0.75)))


def test_no_samples_have_no_spread() -> None:
    with pytest.raises(ValueError, match="no samples"):
        spread([])


def test_drift_of_the_machine_cancels_in_pairs() -> None:
    drift = [1.0, 1.7, 3.0, 0.4]
    pairs = [(2.0 * factor, 2.1 * factor) for factor in drift]
    assert ratios(pairs) == pytest.approx([1.05] * 4)
    assert spread(ratios(pairs)).median == pytest.approx(1.05)


def test_the_first_step_of_a_turn_does_not_count() -> None:
    assert turn_time([100.0, 3.0, 1.0, 2.0]) == 2.0
    with pytest.raises(ValueError, match="two steps"):
        turn_time([1.0])


class Ticking:
    """A clock that goes on by one second whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_a_stage_has_its_own_time_without_that_of_what_it_calls() -> None:
    clock = Clock(Ticking())
    inner = clock.wrap("inner", lambda: 5)
    outer = clock.wrap("outer", lambda: inner() + inner())
    assert outer() == 10
    # Six readings: 1 outer, 2-3 inner, 4-5 inner, 6 outer. Each inner takes 1, the whole 5.
    assert dict(clock.seconds) == {"inner": 2.0, "outer": 3.0}
    assert dict(clock.calls) == {"inner": 2, "outer": 1}


def test_a_stage_that_raises_is_timed_and_raises() -> None:
    clock = Clock(Ticking())

    def fails() -> None:
        raise KeyError("x")

    inner = clock.wrap("inner", fails)
    outer = clock.wrap("outer", inner)
    with pytest.raises(KeyError):
        outer()
    assert dict(clock.seconds) == {"inner": 1.0, "outer": 2.0}


def test_every_case_is_timed_in_every_round() -> None:
    now = Ticking()

    def slow() -> None:
        now.now += 9.0

    quick, heavy = timed({"quick": lambda: None, "heavy": slow}, {"heavy": 2.0}, now, rounds=4, seconds=50)
    assert (quick.aim, heavy.aim) == (None, 2.0)
    # Calibration sees 1 second for three calls, then 28: 150 and 5 calls a sample.
    assert quick.samples == pytest.approx([1 / 150] * 4)
    assert heavy.samples == pytest.approx([(1 + 5 * 9) / 5] * 4)


def test_tables_line_up() -> None:
    assert table(["what", "ms"], [["a", "1.25"], ["longer", "10"]]).splitlines() == [
        "what      ms",
        "------  ----",
        "a       1.25",
        "longer    10",
    ]
