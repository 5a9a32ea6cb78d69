"""Gates and static steering under asynchronous scheduling: the same answers, and the same books, as without it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from support.engines import SteeredEngine

from .async_on_cpu import AsyncAnswers, Job, run_async
from .conftest import SETTINGS
from .oracle import Case, Oracle, check_rows
from .programs import matrix, random_programs


@pytest.fixture(scope="module")
def cases(oracle: Oracle) -> list[Case]:
    """A part of the matrix and of the random programs."""
    return [*matrix(oracle)[::5], *random_programs(oracle, 60)[::4]]


def job_of(engine: SteeredEngine, cases: list[Case], sampling: list[dict[str, Any]], **settings: Any) -> Job:
    """A job over the payloads that an engine's admission holds."""
    return Job(
        engine.model,
        engine.spool,
        engine.config,
        {**SETTINGS, **settings},
        [case.prompt for case in cases],
        [engine.plan(case.request) for case in cases],
        sampling,
    )


@pytest.fixture(scope="module")
def ran(eager: SteeredEngine, cases: list[Case]) -> Iterator[AsyncAnswers]:
    yield run_async(job_of(eager, cases, [{"max_tokens": case.max_tokens} for case in cases]))
    eager.release()


def test_answers_and_books_equal_the_reference(ran: AsyncAnswers, oracle: Oracle, cases: list[Case]) -> None:
    assert ran.asynchronous
    for case, answer in zip(cases, ran.answers, strict=True):
        oracle.check(case, answer)


def test_nothing_is_left(ran: AsyncAnswers) -> None:
    held = ("live", "pool_used", "slots_used", "probes_used", "payloads_held", "lanes_nonzero", "scheduler")
    assert {name: ran.status[name] for name in held} == dict.fromkeys(held, 0)


def test_a_firing_past_the_stop_never_counts(eager: SteeredEngine, oracle: Oracle, cases: list[Case]) -> None:
    """With a stop token, one forward runs whose input is the stop: its firing is no part of the answer."""
    reporting = [case for case in cases if isinstance(case.request, dict) and case.request.get("report")][:12]
    full = eager.steer([case.prompt for case in reporting], [case.request for case in reporting], 10)
    sampling = [{"max_tokens": 10, "stop_token_ids": [answer.tokens[4]]} for answer in full]
    try:
        stopped = run_async(job_of(eager, reporting, sampling)).answers
    finally:
        eager.release()
    for case, answer, whole in zip(reporting, stopped, full, strict=True):
        cut = whole.tokens.index(whole.tokens[4]) + 1
        assert answer.tokens == whole.tokens[:cut]
        expected = oracle.along(case, answer.tokens)
        for book, trace in zip(answer.ours["gates"], expected.gates, strict=True):
            assert book["fired"] == len(trace.fired_rows)
            assert book["evaluated"] == sum(row.fired or row.score is not None for row in trace.rows)
        check_rows(answer.ours["rows"], expected.gates)
