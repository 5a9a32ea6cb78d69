"""Taking turns, with engines that only write down what they are asked for."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

from benchmarks.engines import Load
from benchmarks.options import FULL, QUICK, Shape
from benchmarks.scenarios import ALL_LAYERS, STOCK, served
from benchmarks.serving import Side, comparison, measure


class Recorder:
    """Answers as an engine's process does. `answer`: the tokens of every request."""

    def __init__(self, kind: str, answer: int) -> None:
        self.kind = kind
        self.loads: list[Load] = []
        self._answer = answer

    def call(self, method: str, *arguments: Any) -> Any:
        """Do nothing, and say how long it took."""
        if method == "begin":
            self.loads.append(arguments[0])
            return 2.0
        return [1.0] * arguments[0] if method == "steps" else [[self._answer]] * self.loads[-1].batch


def say(_: str) -> None:
    """Nothing."""


@pytest.mark.parametrize("shape", [*QUICK, *FULL], ids=lambda shape: f"batch {shape.batch}")
def test_no_engine_ever_sees_a_prompt_again(shape: Shape) -> None:
    """It would come out of the prefix cache. Both sides of a pair see the same ones."""
    plain, steered = Recorder("stock", 1), Recorder("steered", 2)
    comparisons = [
        comparison(one, Side(plain, STOCK.name, shape.batch), Side(steered, one.name, shape.batch))  # type: ignore[arg-type]
        for one in served(shape.batch, quick=False)
    ]
    short = shape._replace(rounds=2)
    assert measure(comparisons, short, time.monotonic() + 60, say) == (2, True)
    for engine in (plain, steered):
        starts = [tuple(prompt[:4]) for load in engine.loads for prompt in load.prompts()]
        assert len(starts) == 3 * len(comparisons) * shape.batch
        assert len(set(starts)) == len(starts)
    assert sorted(map(Load.prompts, plain.loads)) == sorted(map(Load.prompts, steered.loads))


def test_rounds_end_with_the_time_but_for_one() -> None:
    plain, steered = Recorder("stock", 1), Recorder("steered", 2)
    one = comparison(ALL_LAYERS, Side(plain, STOCK.name, 2), Side(steered, ALL_LAYERS.name, 2))  # type: ignore[arg-type]
    assert measure([one], Shape(2, 4, 5, 2, 3), time.monotonic() - 1, say) == (1, False)
    assert one.reading.prefill == [(2.0, 2.0)]
    assert one.reading.decode == [(1.0, 1.0)] * 2


def test_steering_that_changes_nothing_is_not_measured() -> None:
    plain, steered = Recorder("stock", 1), Recorder("steered", 1)
    one = comparison(ALL_LAYERS, Side(plain, STOCK.name, 2), Side(steered, ALL_LAYERS.name, 2))  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="changed 0% of the answers"):
        measure([one], Shape(2, 4, 1, 1, 3), time.monotonic() + 60, say)


def test_who_is_first_alternates() -> None:
    order: list[str] = []
    clock = itertools.count()

    class Ordered(Recorder):
        def call(self, method: str, *arguments: Any) -> Any:
            order.append(f"{method} {self.kind} {next(clock)}")
            return super().call(method, *arguments)

    one = comparison(
        STOCK,
        Side(Ordered("a", 1), STOCK.name, 1),
        Side(Ordered("b", 1), STOCK.name, 1),  # type: ignore[arg-type]
    )
    measure([one], Shape(1, 4, 1, 2, 3), time.monotonic() + 60, say)
    firsts = [entry.split()[1] for entry in order if entry.startswith(("begin", "steps"))][::2]
    assert firsts.count("a") == firsts.count("b") == 3
