"""Faults inside the engine: each ends its own request with a code; neighbours and later requests notice nothing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.oracle import Case, Oracle, prompt
from reference.models import random_direction, shared_tiny_llama
from reference.wire import EVERYWHERE, OBSERVE, add, gate, probe, static
from steergate_server.runtime.config import EngineConfig
from steergate_server.runtime.plan import decode_plan
from support.engines import Answer, SteeredEngine, answer_of, parameters

HIDDEN = 64
BLOCK = 32
BLOCKS = 25
"""Of KV cache, one of which vLLM keeps for itself."""

SLOTS = 4
"""Three that can be used, and the empty one."""


def vector(seed: int) -> dict[str, Any]:
    return random_direction(seed, HIDDEN, [0, 1, 3], norm=7.0)


def one(seed: int, where: dict[str, Any] = EVERYWHERE) -> dict[str, Any]:
    return {"vectors": [static(vector(seed), where)]}


PROBE = random_direction(99, HIDDEN, [1])
OBSERVED = {"gates": [gate(probe(PROBE, 0.0, at="answer"), "this_token", OBSERVE)], "report": "summary"}


@pytest.fixture(scope="module")
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shared_tiny_llama(getattr(request.config, "cache", None), tmp_path_factory.mktemp)


@pytest.fixture(scope="module")
def oracle(tiny: Path) -> Oracle:
    return Oracle(tiny, {})


@pytest.fixture(scope="module")
def running(tiny: Path) -> Iterator[SteeredEngine]:
    """An engine that is short of slots, KV cache and places in the batch."""
    engine = SteeredEngine(
        tiny,
        config=EngineConfig(hooks=("pre_attn", "post_block"), memory_mib=16, max_slots=SLOTS, trace=True),
        enforce_eager=True,
        block_size=BLOCK,
        max_num_batched_tokens=64,
        max_num_seqs=6,
        max_model_len=512,
        num_gpu_blocks_override=BLOCKS,
        enable_prefix_caching=True,
    )
    yield engine
    engine.close()


@pytest.fixture
def engine(running: SteeredEngine) -> Iterator[SteeredEngine]:
    """The engine, with an empty cache before a test and nothing held after it."""
    running.llm.reset_prefix_cache()
    running.trace()
    yield running
    running.release()
    held = ("live", "pool_used", "slots_used", "probes_used", "payloads_held")
    deadline = time.monotonic() + 5
    while any((status := running.status())[name] for name in held) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert {name: status[name] for name in held} == dict.fromkeys(held, 0)


def run(engine: SteeredEngine, cases: list[Case], plans: list[bytes | None] | None = None) -> list[Answer]:
    """Run cases in one batch; their plans as they are admitted now, unless others are given."""
    chosen = [engine.plan(case.request) for case in cases] if plans is None else plans
    return engine.run([case.prompt for case in cases], chosen, [case.max_tokens for case in cases])


def file_of(engine: SteeredEngine, plan: bytes | None) -> Path:
    """Where the payload of a plan with one vector lies."""
    assert plan is not None
    (digest,) = decode_plan(plan).digests
    (path,) = engine.spool.glob(f"*{digest}*")
    return path


def assert_failed(answer: Answer, code: str) -> None:
    assert answer.finish_reason == "error"
    assert answer.ours["error"]["code"] == code
    assert answer.ours["error"]["message"]


def assert_alone(engine: SteeredEngine, case: Case, answer: Answer) -> None:
    """The answer is what the request gets when nobody is beside it."""
    engine.llm.reset_prefix_cache()
    (alone,) = run(engine, [case])
    assert answer.tokens == alone.tokens
    np.testing.assert_allclose(answer.logprobs, alone.logprobs, rtol=0, atol=1e-4)


NEIGHBOURS = [
    Case(prompt(600, 10), one(1)),
    Case(prompt(601, 70), None),
    Case(prompt(602, 1), one(2, {"answer": "all"})),
    Case(prompt(603, 20), OBSERVED),
]


def break_file(path: Path, how: str) -> None:
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(content[:-100])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        # A valid file whose numbers are not those that its name promises.
        path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize("how", ["missing", "truncated", "empty", "other numbers"])
def test_a_payload_that_cannot_be_read(engine: SteeredEngine, oracle: Oracle, how: str) -> None:
    victim = Case(prompt(610, 3 * BLOCK + 4), one(3))
    cases = [*NEIGHBOURS[:2], victim, *NEIGHBOURS[2:]]
    plans = [engine.plan(case.request) for case in cases]
    path = file_of(engine, plans[2])
    content = path.read_bytes()
    break_file(path, how)
    answers = run(engine, cases, plans)
    assert_failed(answers[2], "algorithm_failed")
    assert answers[2].tokens == []
    assert str(path.parent) not in answers[2].ours["error"]["message"]

    # The file is back: the same request finds no block that the failed one left.
    path.write_bytes(content)
    (again,) = run(engine, [victim], [plans[2]])
    assert again.cached_tokens == 0
    oracle.check(victim, again)
    for case, answer in zip(cases, answers, strict=True):
        if case is not victim:
            oracle.check(case, answer)
            assert_alone(engine, case, answer)


def test_requests_wait_for_a_slot(engine: SteeredEngine, oracle: Oracle) -> None:
    """Every slot is taken: one more configuration waits, those that need no slot of their own do not."""
    holders = [Case(prompt(620 + seed, 8), one(seed), 12) for seed in range(1, SLOTS)]
    waits = [Case(prompt(630 + seed, 8), one(9 + seed)) for seed in range(3)]
    cases = [*holders, *waits, Case(prompt(634, 8), one(1)), Case(prompt(635, 8), None)]
    for case, answer in zip(cases, run(engine, cases), strict=True):
        oracle.check(case, answer)
    trace = engine.trace()
    first_step = {request_id: step for step, _, request_id, *_ in reversed(trace)}
    assert {slot for *_, slot, _ in trace} == set(range(1, SLOTS))
    assert len(set(first_step.values())) > 1, "nobody waited"


def test_gates_wait_for_a_slot(engine: SteeredEngine, oracle: Oracle) -> None:
    """A gate's vector takes a slot, too. Where none is free its request waits: no gate is lost over it."""
    cases = []
    for number, scope in enumerate(("next_step", "rest_of_request", "this_token") * 2):
        steer = random_direction(20 + number, HIDDEN, [1, 3], norm=7.0)
        own = gate(probe(PROBE, -1e4), scope, add(steer))
        cases.append(Case(prompt(636 + number, 8), {"gates": [own], "report": "summary"}, 12))
    answers = run(engine, cases)
    for case, answer in zip(cases, answers, strict=True):
        oracle.check(case, answer)
        (told,) = answer.ours["gates"]
        assert (told["evaluated"], told["fired"]) == (11, 11)
    first_step = {request_id: step for step, _, request_id, *_ in reversed(engine.trace())}
    assert len(first_step) == len(cases)
    assert len(set(first_step.values())) > 1, "nobody waited"


def test_more_slots_than_there_are(engine: SteeredEngine, oracle: Oracle) -> None:
    """A plan that can never fit, past the front's refusal: it fails, those beside and behind it do not."""
    vectors = [static(vector(seed), where) for seed, where in enumerate(({"prompt": "all"}, {"answer": "all"}), 1)]
    vectors.append(static(vector(3), {"generation": "all"}))
    gates = [gate({"kind": "always"}, "this_token", add(vector(4)))]
    victim = Case(prompt(640, BLOCK + 5), {"vectors": vectors, "gates": gates})
    cases = [NEIGHBOURS[1], victim, *NEIGHBOURS[2:], NEIGHBOURS[0]]
    answers = run(engine, cases)
    assert_failed(answers[1], "over_capacity")
    assert answers[1].tokens == []
    for case, answer in zip(cases, answers, strict=True):
        if case is not victim:
            oracle.check(case, answer)


def test_a_failed_requests_blocks_are_not_for_one_that_waits(engine: SteeredEngine, oracle: Oracle) -> None:
    """A failed request's blocks hold KV without its steering. Its twin, queued before it failed, must not find them."""
    victim = Case(prompt(655, BLOCK + 5), one(9))
    plan = engine.plan(victim.request)
    path = file_of(engine, plan)
    content = path.read_bytes()
    path.unlink()
    # Six fit into a batch. The last of these takes the failed one's place, so the twin waits until they are done.
    plain = [(f"plain-{number}", prompt(650 + number, 2), None, 50) for number in range(6)]
    twins = [(name, victim.prompt, plan, victim.max_tokens) for name in ("failed", "twin")]
    core = engine.llm.llm_engine
    engine.llm.sleep(level=0, mode="keep")
    for name, prompt_ids, encoded, tokens in (*plain[:5], twins[0], plain[5], twins[1]):
        core.add_request(name, {"prompt_token_ids": prompt_ids}, parameters(encoded, tokens))
    engine.llm.wake_up(tags=["scheduling"])
    answers: dict[str, Answer] = {}
    while core.has_unfinished_requests():
        for output in core.step():
            answers[output.request_id] = answer_of(output)
            if output.request_id == "failed":
                path.write_bytes(content)
    assert_failed(answers["failed"], "algorithm_failed")
    oracle.check(victim, answers["twin"])


@pytest.mark.parametrize("garbage", [b"", b"\xff\xff\xff", b"{}", b"\x81\xa6groups\x01", "text", 7, {"groups": []}])
def test_a_plan_that_cannot_be_decoded(engine: SteeredEngine, oracle: Oracle, garbage: Any) -> None:
    cases = [*NEIGHBOURS[:2], Case(prompt(660, 8), None), *NEIGHBOURS[2:]]
    plans = [engine.plan(case.request) for case in cases]
    plans[2] = garbage
    answers = run(engine, cases, plans)
    assert_failed(answers[2], "algorithm_failed")
    assert answers[2].tokens == []
    for case, answer in zip(cases, answers, strict=True):
        if case is not cases[2]:
            oracle.check(case, answer)


def test_preemption(engine: SteeredEngine, oracle: Oracle) -> None:
    """Too little KV cache for six long answers: static steering resumes where it was."""
    tokens = 4 * BLOCK
    clauses = ({"prompt": "all"}, {"generation": "all"}, {"answer": "all"}, EVERYWHERE)
    static_ones = [Case(prompt(670 + n, 60 + n), one(n % 2 + 1, where), tokens) for n, where in enumerate(clauses)]
    cases = [Case(prompt(680, 60), None, tokens), Case(prompt(681, 60), None, tokens), *static_ones]
    answers = run(engine, cases)
    for case, answer in zip(cases, answers, strict=True):
        oracle.check(case, answer)
    applied = Counter(tuple(record[1:5]) for record in engine.trace())
    again = {request_id for (_, request_id, _, _), times in applied.items() if times > 1}
    assert again, "no steered request was preempted and computed again"


GATED_SCOPES = [
    (scope, at, number)
    for number, (scope, at) in enumerate(
        (scope, at)
        for scope in ("this_token", "next_step", "rest_of_request")
        for at in ("generated", "prompt_end", "answer")
    )
]


@pytest.mark.parametrize(("scope", "at", "seed"), GATED_SCOPES)
def test_gates_resume_with_their_history(engine: SteeredEngine, oracle: Oracle, scope: str, at: str, seed: int) -> None:
    """A preempted request computes prompt and answer again: each row's weight is what it was the first time."""
    tokens = 3 * BLOCK
    ids = prompt(720 + seed, 40)
    observed = oracle.free(Case(ids, [gate(probe(PROBE, 0.0, at=at), "this_token", OBSERVE)], tokens))
    scores = sorted(observed.gates[0].scores)
    # A threshold that few rows pass, well apart from every score: a lasting gate then fires late.
    gaps = [(high - low, (high + low) / 2) for low, high in pairwise(scores[-8:])] or [(0.0, scores[0] - 1.0)]
    threshold = max(gaps)[1]
    steer = random_direction(98, HIDDEN, [2, 3], norm=8.0)
    gates = [gate(probe(PROBE, threshold, at=at), scope, add(steer))]
    gated = Case(ids, {"gates": gates, "report": "scores"}, tokens)
    # vLLM preempts those that came last.
    cases = [*(Case(prompt(740 + seed * 10 + n, 60), None, 4 * BLOCK) for n in range(5)), gated]
    answers = run(engine, cases)
    oracle.check(gated, answers[-1])
    applied = Counter(tuple(record[1:5]) for record in engine.trace())
    assert any(times > 1 for times in applied.values()), "the gated request was not preempted"


def test_preempted_twins_of_two_prompt_lengths(engine: SteeredEngine, oracle: Oracle) -> None:
    """Equal tokens, divided into prompt and answer at two places. A resumed one must not find the other's blocks."""
    token, tokens = 9, 4 * BLOCK
    base = prompt(690, BLOCK + 1)
    request = one(1, {"generation": "all"})
    cases = [
        Case(base, request, tokens),
        *(Case(prompt(691 + n, 60), None, tokens) for n in range(4)),
        Case([*base, token, token, token], request, tokens),
    ]
    plans = [engine.plan(case.request) for case in cases]
    answers = engine.run([case.prompt for case in cases], plans, tokens, allowed_token_ids=[token])
    for case, answer in zip(cases, answers, strict=True):
        assert answer.tokens == [token] * tokens
        expected = oracle.along(case, answer.tokens)
        np.testing.assert_allclose(answer.logprobs, expected.logprobs, rtol=0, atol=1e-4)


@pytest.mark.parametrize("scale", [3e37, -3e37])
def test_rows_that_leave_the_range_harm_nobody(engine: SteeredEngine, oracle: Oracle, scale: float) -> None:
    """Their request ends; their keys and values do not stay behind as NaN in blocks that others are given."""
    huge = {"vectors": [static(vector(seed), EVERYWHERE, scale=scale) for seed in (5, 6)]}
    spoilers = [Case(prompt(770 + number, BLOCK + 9), huge) for number in range(2)]
    beside = [*NEIGHBOURS[:3], Case(prompt(780, 40), None)]
    answers = run(engine, [*spoilers, *beside])
    for answer in answers[:2]:
        assert answer.finish_reason == "error"
        assert answer.ours["error"]["code"] in ("algorithm_failed", "out_of_range")
    for case, answer in zip(beside, answers[2:], strict=True):
        oracle.check(case, answer)
    # Enough plain requests to be given every block that the others left.
    later = [Case(prompt(790 + number, 3 * BLOCK), None) for number in range(6)]
    for case, answer in zip(later, run(engine, later), strict=True):
        oracle.check(case, answer)
