"""The V2 model runner: every answer is the reference's, and what is applied and reported equals the V1 runner's.

Its engines run in two processes beside this one: those that are eager in turn, and a compiled one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from reference.models import random_direction
from reference.wire import EVERYWHERE, add, gate, probe, static
from support.engines import Answer, SteeredEngine

from .conftest import HIDDEN
from .oracle import Case, Oracle, differ, prompt
from .programs import matrix, random_programs
from .v2_on_cpu import Done, Job, Member, Ran, Running, run_batch

HALF = list(range(128))
"""Half of the model's tokens."""

CLAUSES: list[tuple[dict[str, Any], tuple[int, ...]]] = [
    (EVERYWHERE, (1, 33, 150)),
    ({"prompt": "all"}, (1, 150)),
    ({"generation": "all"}, (1, 7)),
    ({"answer": "all"}, (1, 150)),
    ({"prompt_positions": [0, -1]}, (1, 150)),
    ({"generation_window": [1, 4]}, (7,)),
    ({"prompt_tokens": HALF}, (70,)),
    ({"generation_tokens": HALF}, (1, 70)),
    ({"generation": "all", "exclude_generation_tokens": HALF}, (1, 7)),
]
"""Each with the lengths of its prompts: the longest is computed in three chunks."""

BLOCKS = 15
"""Of KV cache where it is short; one of them vLLM keeps for itself."""

FIRST_PREEMPTION = 20
"""Tokens after which vLLM has preempted nobody yet."""

HELD = ("live", "pool_used", "slots_used", "probes_used", "payloads_held", "lanes_nonzero")


def steer(seed: int, where: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"vectors": [static(random_direction(seed, HIDDEN, [0, 1, 3], norm=8.0), where, **more)]}


def by_kind(cases: list[Case]) -> list[Case]:
    """The first case of each kind: when, where it looks, scope, what it applies."""
    found: dict[Any, Case] = {}
    for case in cases:
        (one,) = case.request["gates"]
        kind = (one["when"]["kind"], one["when"].get("at"), one["scope"], one["apply"]["kind"])
        found.setdefault(kind, case)
    return list(found.values())


def static_cases() -> list[Case]:
    return [
        Case(prompt(800 + length, length), steer(800 + number, where))
        for number, (where, lengths) in enumerate(CLAUSES)
        for length in lengths
    ]


MIXED = [
    Member(Case(prompt(850, 33), None, 12)),
    Member(Case(prompt(851, 20), steer(1, EVERYWHERE), 12)),
    Member(Case(prompt(852, 9), steer(2, EVERYWHERE), 40), leaves_at=3),
    Member(Case(prompt(853, 5), None, 12)),
    Member(Case(prompt(854, 70), steer(3, {"answer": "all"}), 12)),
    Member(Case(prompt(855, 4), steer(4, EVERYWHERE)), plan=b"\xff\xff"),
    Member(Case(prompt(856, 90), None, 12)),
    Member(Case(prompt(857, 100), steer(5, {"prompt": "all"}), 30), leaves_at=1),
    Member(Case(prompt(858, 1), None, 12)),
]
"""Plain requests beside steered ones, of which two leave early and one fails."""

PLAIN = [number for number, member in enumerate(MIXED) if member.case.request is None]
LEAVING = [number for number, member in enumerate(MIXED) if member.leaves_at]
FAILING = [number for number, member in enumerate(MIXED) if member.plan]


def unsteered(members: list[Member]) -> list[Member]:
    """The same batch on stock vLLM. What failed there never ran, so it is left out."""
    return [member._replace(case=member.case._replace(request=None)) for member in members if not member.plan]


def preempted_cases(oracle: Oracle) -> list[Case]:
    """Seven long answers, of which the KV cache holds a half. vLLM preempts those that came last: the steered ones."""
    probing, steering = random_direction(99, HIDDEN, [1]), random_direction(98, HIDDEN, [2, 3], norm=8.0)
    cases = [Case(prompt(870 + number, 40), None, 70) for number in range(3)]
    cases.append(Case(prompt(873, 40), steer(6, {"generation": "all"}), 60))
    seeds = itertools.count(874)
    for scope, at in (("next_step", "generated"), ("rest_of_request", "answer"), ("this_token", "generated")):
        watching = [gate(probe(probing, 0.0, at=at), "this_token", {"kind": "observe"})]
        gap = 0.0
        while gap < 0.1:  # until a threshold is passed for the first time at a row that is computed again
            ids = prompt(next(seeds), 40)
            scores = oracle.free(Case(ids, watching, FIRST_PREEMPTION)).gates[0].scores
            best = list(itertools.accumulate(scores, max))[4:]
            gap, threshold = max((high - low, (high + low) / 2) for low, high in itertools.pairwise(best))
        gates = [gate(probe(probing, threshold, at=at), scope, add(steering))]
        cases.append(Case(ids, {"gates": gates, "report": "summary"}, 60))
    return cases


class Batches(NamedTuple):
    """What is run, by name."""

    gates: list[Case]
    programs: list[Case]
    static: list[Case]
    preempted: list[Case]
    stopping: list[Member]


@pytest.fixture(scope="module")
def batches(oracle: Oracle) -> Batches:
    gates, programs = by_kind(matrix(oracle)), random_programs(oracle, 60)[::5]
    # Half-way through each answer, one of its tokens becomes a stop. The engine that runs them takes no long prompts.
    stopping = [
        Member(case, {"stop_token_ids": [oracle.free(case).tokens[4]]}) for case in programs if len(case.prompt) < 150
    ]
    return Batches(gates, programs, static_cases(), preempted_cases(oracle), stopping)


def members_of(cases: list[Case]) -> list[Member]:
    return [Member(case) for case in cases]


class Results(NamedTuple):
    """The jobs that are done: as vLLM runs on CPU, with too little KV cache, asynchronously, stock, and compiled."""

    plain: Done
    short: Done
    asynchronous: Done
    stock: Done
    compiled: Done


@pytest.fixture(scope="module")
def running(tiny: Path, batches: Batches) -> Iterator[list[Running]]:
    """The jobs, begun."""
    gates, programs, static_ones, preempted = map(members_of, batches[:4])
    short = {"num_gpu_blocks_override": BLOCKS, "max_model_len": 192}
    jobs = [
        Job(tiny, {"gates": gates, "programs": programs, "static": static_ones, "mixed": MIXED}),
        Job(tiny, {"preempted": preempted}, short),
        Job(tiny, {"preempted": preempted, "stopping": batches.stopping}, short, asynchronous=True),
        Job(tiny, {"mixed": unsteered(MIXED)}, steered=False),
    ]
    compiled = Job(tiny, {"programs": programs}, eager=False)
    with closing(Running([compiled])) as beside, closing(Running(jobs)) as running:
        yield [running, beside]


@pytest.fixture(scope="module")
def v1(request: pytest.FixtureRequest, running: list[Running], batches: Batches) -> dict[str, Ran]:
    """The same batches on the V1 runner, while the jobs run."""
    assert running
    eager: SteeredEngine = request.getfixturevalue("eager")
    members = {"gates": batches.gates, "programs": batches.programs, "static": batches.static}
    return {name: run_batch(eager, members_of(cases)) for name, cases in members.items()}


@pytest.fixture(scope="module")
def results(running: list[Running], v1: dict[str, Ran]) -> Results:
    assert v1
    return Results(*(done for jobs in running for done in jobs.result()))


def check_all(oracle: Oracle, cases: list[Case], answers: list[Answer]) -> None:
    for number, (case, answer) in enumerate(zip(cases, answers, strict=True)):
        try:
            oracle.check(case, answer)
        except AssertionError as error:
            error.add_note(f"case {number} of {len(cases)}, {len(case.prompt)} prompt tokens")
            raise


def test_the_v2_runner_ran(results: Results) -> None:
    for name, done in zip(Results._fields, results, strict=True):
        assert "vllm.v1.worker.gpu.model_runner" in done.runner
        assert ("steergate_server.vllm_plugin.runner_v2" in done.runner) == (name != "stock")
        assert ("Async" in done.scheduler) == (name == "asynchronous")


@pytest.mark.parametrize("name", ["gates", "programs", "static"])
def test_answers_and_books_equal_the_reference(results: Results, batches: Batches, oracle: Oracle, name: str) -> None:
    check_all(oracle, getattr(batches, name), results.plain.batches[name].answers)


def test_compiled(results: Results, batches: Batches, oracle: Oracle) -> None:
    check_all(oracle, batches.programs, results.compiled.batches["programs"].answers)


@pytest.mark.parametrize("name", ["gates", "programs", "static"])
def test_trace_and_reports_equal_v1(results: Results, v1: dict[str, Ran], name: str) -> None:
    """Each row is steered once, by the same lanes at the same sites with the same weights."""
    one, two = v1[name], results.plain.batches[name]
    assert two.trace.keys() == one.trace.keys()
    assert {len(weights) for ran in (one, two) for weights in ran.trace.values()} == {1}
    for key, weights in two.trace.items():
        assert weights == pytest.approx(one.trace[key], abs=1e-4), key
    for left, right in zip(one.answers, two.answers, strict=True):
        assert left.tokens == right.tokens
        np.testing.assert_allclose(left.logprobs, right.logprobs, rtol=0, atol=1e-4)
        assert right.ours.keys() == left.ours.keys()
        for book, other in zip(left.ours.get("gates", ()), right.ours.get("gates", ()), strict=True):
            assert book.keys() == other.keys()
            np.testing.assert_allclose(numbers(book), numbers(other), rtol=1e-4, atol=1e-4)


def numbers(book: dict[str, Any]) -> list[float]:
    return [np.nan if value is None else value for value in book.values()]


def test_clauses_that_depend_on_generated_tokens_select_some_rows(results: Results, batches: Batches) -> None:
    trace = results.plain.batches["static"].trace
    for number, case in enumerate(batches.static):
        if "generation_tokens" in str(case.request):
            rows = {row for member, _, row, _ in trace if member == number}
            assert 0 < len(rows) < case.max_tokens - 1


def test_requests_beside_others(results: Results, oracle: Oracle) -> None:
    """Plain ones get what stock vLLM gives them; the others, as far as they come, what the reference says."""
    mixed = results.plain.batches["mixed"].answers
    stock = iter(results.stock.batches["mixed"].answers)
    for number, (member, answer) in enumerate(zip(MIXED, mixed, strict=True)):
        if number in FAILING:
            assert answer.finish_reason == "error"
            assert answer.ours["error"]["code"] == "algorithm_failed"
            assert answer.tokens == []
            continue
        bare = next(stock)
        if number in PLAIN:
            assert answer.tokens == bare.tokens
            np.testing.assert_allclose(answer.logprobs, bare.logprobs, rtol=0, atol=1e-5)
        if number in LEAVING:
            assert member.leaves_at is not None
            assert member.leaves_at <= len(answer.tokens) < member.case.max_tokens
            expected = oracle.along(member.case, answer.tokens).logprobs
            np.testing.assert_allclose(answer.logprobs, expected, rtol=0, atol=1e-4)
        else:
            oracle.check(member.case, answer)
            assert differ(answer, bare) == (number not in PLAIN)
    trace = results.plain.batches["mixed"].trace
    assert {member for member, *_ in trace} == set(range(len(MIXED))) - {*PLAIN, *FAILING}


@pytest.mark.parametrize("name", ["short", "asynchronous"])
def test_preempted_requests_resume(results: Results, batches: Batches, oracle: Oracle, name: str) -> None:
    """They come back as new ones, with tokens beyond their prompts; what their gates did is not forgotten."""
    ran: Ran = getattr(results, name).batches["preempted"]
    check_all(oracle, batches.preempted, ran.answers)
    for number, case in enumerate(batches.preempted):
        again = {row for (member, _, row, _), weights in ran.trace.items() if member == number and len(weights) > 1}
        if case.request is not None:
            assert any(row > len(case.prompt) for row in again), f"member {number} was not preempted in its answer"
        for trace in oracle.along(case, ran.answers[number].tokens).gates:
            assert trace.fired_rows[0] in again, f"member {number} fired at no row that was computed again"


def test_a_firing_past_the_stop_never_counts(results: Results, batches: Batches, oracle: Oracle) -> None:
    """Asynchronously, one forward runs whose input is the stop."""
    answers = results.asynchronous.batches["stopping"].answers
    for member, answer in zip(batches.stopping, answers, strict=True):
        assert answer.finish_reason == "stop"
        assert answer.tokens[-1] in member.sampling["stop_token_ids"]
        assert len(answer.tokens) <= 5
        expected = oracle.along(member.case, answer.tokens)
        np.testing.assert_allclose(answer.logprobs, expected.logprobs, rtol=0, atol=1e-4)
        for book, trace in zip(answer.ours["gates"], expected.gates, strict=True):
            assert book["fired"] == len(trace.fired_rows)
            assert book["evaluated"] == sum(row.fired or row.score is not None for row in trace.rows)


def test_nothing_is_left(results: Results) -> None:
    for name, done in zip(Results._fields, results, strict=True):
        if name != "stock":
            assert {held: done.status[held] for held in HELD} == dict.fromkeys(HELD, 0), name
