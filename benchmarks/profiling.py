"""Where the time of a step goes: our stages by the clock, then functions and calls of ours by the profiler.

It runs inside of an engine's process. Stages are timed by wrapping methods; the time of a stage that calls another is
its own alone.
"""

from __future__ import annotations

import cProfile
import functools
import pstats
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from benchmarks.clock import Now
from benchmarks.report import table

_OURS = "steergate_server"


class Clock:
    """Own time of nested stages, summed by name."""

    def __init__(self, now: Now) -> None:
        self._now = now
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: defaultdict[str, int] = defaultdict(int)
        self._inner: list[float] = []

    def wrap(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function that is timed under a name."""

        @functools.wraps(function)
        def timed(*arguments: Any, **named: Any) -> Any:
            self._inner.append(0.0)
            started = self._now()
            try:
                return function(*arguments, **named)
            finally:
                whole = self._now() - started
                self.seconds[name] += whole - self._inner.pop()
                self.calls[name] += 1
                if self._inner:
                    self._inner[-1] += whole

        return timed


def profile(session: Any, load: Any, steps: int) -> dict[str, Any]:
    """Own time of our stages in ms a step, and of our functions; a step as it is comes first."""
    session.begin(load)
    session.steps(steps // 2)
    plain = session.steps(steps)
    clock = Clock(session.now)
    with _wrapped(session, clock):
        session.steps(2)
        clock.seconds.clear()
        clock.calls.clear()
        session.steps(steps)
    profiler = cProfile.Profile(session.now)
    profiler.enable()
    session.steps(steps)
    profiler.disable()
    session.end()
    stages = [
        {"stage": name, "ms": 1e3 * seconds / steps, "calls": clock.calls[name] / steps}
        for name, seconds in sorted(clock.seconds.items(), key=lambda item: -item[1])
    ]
    return {"step_ms": 1e3 * statistics.median(plain), "stages": stages, "functions": _functions(profiler, steps)}


@contextmanager
def _wrapped(session: Any, clock: Clock) -> Iterator[None]:
    undo = []
    for owner, attribute, name in _stages(session):
        had = attribute in vars(owner)
        before = getattr(owner, attribute)
        setattr(owner, attribute, clock.wrap(name, before))
        undo.append((owner, attribute, before, had))
    try:
        yield
    finally:
        for owner, attribute, before, had in reversed(undo):
            if had:
                setattr(owner, attribute, before)
            else:
                delattr(owner, attribute)


def _stages(session: Any) -> list[tuple[Any, str, str]]:
    """What is wrapped: (owner, attribute, name of the stage). vLLM's own methods take their time out of ours."""
    core = session.llm.llm_engine.engine_core.engine_core
    scheduler, worker = core.scheduler, core.model_executor.driver_worker.worker
    runner = worker.model_runner
    found: list[tuple[Any, str, str]] = []
    for owner, methods in (
        (scheduler, ("schedule", "update_from_output")),
        (runner, ("_update_states", "_prepare_inputs", "_model_forward", "sample_tokens")),
    ):
        for method in methods:
            ours, theirs = _ours_and_theirs(type(owner), method)
            found.append((theirs, method, f"vLLM: {method}"))
            found.append((ours, method, f"ours: {'scheduler' if owner is scheduler else 'runner'}.{method}"))
    controller, op = runner.steering, runner.steering._op
    found += [(controller, name, f"ours: Controller.{name}") for name in ("begin_step", "see_tokens", "end_step")]
    found += [
        (controller, "steer", "ours: ops that return at once, and the test of it"),
        (op, "_probe", "ours: op, probe"),
        (op, "_change", "ours: op, change"),
        (op, "_added_change", "ours: op, what is added"),
        (controller.book, "change", "ours: op, change from the tables"),
    ]
    from steergate_server.runtime import torch_op as module

    found += [(module, "all_in_range", "ours: op, range check"), (module, "score_gates", "ours: op, score_gates")]
    return found


def _ours_and_theirs(kind: type, method: str) -> tuple[type, type]:
    """The first class of ours, and the first of vLLM's, that have a method of their own by this name."""
    having = [one for one in kind.__mro__ if method in vars(one)]
    ours = next(one for one in having if _OURS in one.__module__)
    return ours, next(one for one in having if _OURS not in one.__module__)


def _functions(profiler: cProfile.Profile, steps: int) -> list[dict[str, Any]]:
    """Own time by function of ours, and of what it calls outside of Python, in ms a step; the largest first."""
    found: dict[str, tuple[float, float]] = {}
    for function, (_, calls, own, _, callers) in pstats.Stats(profiler).stats.items():  # type: ignore[attr-defined]
        if _OURS in function[0]:
            found[_label(function)] = (own, calls)
        elif function[0] == "~" or "torch" in function[0]:
            for caller, (_, count, spent, _) in callers.items():
                if _OURS in caller[0]:
                    found[f"{_label(caller)} -> {_label(function)}"] = (spent, count)
    largest = sorted(found.items(), key=lambda item: -item[1][0])[:25]
    return [{"function": name, "ms": 1e3 * own / steps, "calls": calls / steps} for name, (own, calls) in largest]


def _label(function: tuple[str, int, str]) -> str:
    file, _, name = function
    if file == "~":
        return name.strip("<>").removeprefix("built-in method ").removeprefix("method ")
    return f"{file.rpartition('/')[2].removesuffix('.py')}.{name}"


def describe(title: str, found: dict[str, Any]) -> str:
    """The tables of one profile."""
    ours = sum(stage["ms"] for stage in found["stages"] if stage["stage"].startswith("ours"))
    rows = [[stage["stage"], f"{stage['ms']:.3f}", f"{stage['calls']:g}"] for stage in found["stages"]]
    calls = [[one["function"], f"{one['ms']:.3f}", f"{one['calls']:g}"] for one in found["functions"]]
    return "\n".join(
        [
            f"{title}: {found['step_ms']:.2f} ms a step, {ours:.3f} ms of it ours",
            table(["stage (own time)", "ms", "calls"], rows),
            "",
            table(["function, under the profiler (own time)", "ms", "calls"], calls),
        ]
    )
