"""Serving overhead: two engines take turns at equal loads, so that whatever the machine does hits both."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from benchmarks.engines import Load
from benchmarks.options import Shape
from benchmarks.processes import Remote
from benchmarks.scenarios import Scenario
from benchmarks.spread import Pair, turn_time


class Side(NamedTuple):
    """One side of a comparison: an engine, what its requests ask for, and how many run at once."""

    engine: Remote
    scenario: str
    batch: int


class Reading(NamedTuple):
    """What a comparison gave, all in seconds: prefills and decode steps in pairs (reference, other), round by round.

    `changed`: share of the requests whose answers differ from the reference's. `steps`: every single decode step.
    """

    prefill: list[Pair]
    decode: list[Pair]
    changed: list[float]
    steps: tuple[list[float], list[float]]


class Comparison(NamedTuple):
    """A comparison by name, with what it has given so far."""

    scenario: Scenario
    reference: Side
    other: Side
    reading: Reading


def comparison(scenario: Scenario, reference: Side, other: Side) -> Comparison:
    """A comparison that nothing was measured of yet."""
    return Comparison(scenario, reference, other, Reading([], [], [], ([], [])))


def measure(
    comparisons: Sequence[Comparison], shape: Shape, deadline: float, say: Callable[[str], None]
) -> tuple[int, bool]:
    """Measure all comparisons in each round, after one of warm-up; rounds that counted, and whether all were made.

    deadline: time (`time.monotonic`) after which no round starts, but that at least one always counts.
    """
    for number in range(shape.rounds + 1):
        if number > 1 and time.monotonic() > deadline:
            return number - 1, False
        say("warm-up" if number == 0 else f"round {number} of {shape.rounds}")
        for place, one in enumerate(comparisons):
            prefill, decode, changed, steps = _round(one, shape, number, number * len(comparisons) + place)
            if number == 0:
                _check_changed(one.scenario, changed)
                continue
            one.reading.prefill.append(prefill)
            one.reading.decode.extend(decode)
            one.reading.changed.append(changed)
            for kept, more in zip(one.reading.steps, steps, strict=True):
                kept.extend(more)
    return shape.rounds, True


def _round(
    one: Comparison, shape: Shape, number: int, seed: int
) -> tuple[Pair, list[Pair], float, tuple[list[float], ...]]:
    """One round of a comparison. seed: of the prompts, another one each time: no prefix may come out of a cache."""
    sides = (one.reference, one.other)
    loads = [Load(side.scenario, side.batch, shape.prompt, shape.tokens, seed) for side in sides]
    prefill = [0.0, 0.0]
    for at in _order(number):
        prefill[at] = sides[at].engine.call("begin", loads[at])
    steps: tuple[list[float], list[float]] = ([], [])
    decode: list[Pair] = []
    for turn in range(shape.turns):
        times = [0.0, 0.0]
        for at in _order(number + turn):
            taken = sides[at].engine.call("steps", shape.steps)
            times[at] = turn_time(taken)
            steps[at].extend(taken)
        decode.append((times[0], times[1]))
    plain, answers = (side.engine.call("end") for side in sides)
    differing = sum(one != other for one, other in zip(plain, answers, strict=False))
    return (prefill[0], prefill[1]), decode, differing / min(len(plain), len(answers)), steps


def _order(number: int) -> tuple[int, int]:
    """Who is first alternates."""
    return (1, 0) if number % 2 else (0, 1)


def _check_changed(scenario: Scenario, changed: float) -> None:
    if scenario.changes and changed < 0.9:
        raise RuntimeError(f"`{scenario.name}` changed {changed:.0%} of the answers only: it is not steered as it says")
