"""Prefix caching: KV is shared only between runs with identical activations. A warm answer equals a cold one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from reference.models import random_direction
from reference.wire import ALWAYS, EVERYWHERE, OBSERVE, add, gate, probe, static
from support.engines import Answer, SteeredEngine

from .conftest import HIDDEN, SETTINGS
from .oracle import Case, Oracle, check_batch, differ, prompt

BLOCK = SETTINGS["block_size"]
LONG = prompt(400, 4 * BLOCK + 5)
"""Four full blocks and a bit: a warm run finds all four."""

A = random_direction(83, HIDDEN, [0, 1, 2, 3], norm=6.0)
B = random_direction(84, HIDDEN, [0, 1, 2, 3], "pre_attn", norm=6.0)
PROBE = random_direction(85, HIDDEN, [1])
LATE = random_direction(87, HIDDEN, [1, 2, 3], norm=6.0)

PLAIN = None
STATIC = {"vectors": [static(A)]}
STRONGER = {"vectors": [static(A, scale=2.0)]}
OTHER = {"vectors": [static(B)]}
PROMPT_ONLY = {"vectors": [static(A, {"prompt": "all"})]}
GENERATED_ONLY = {"vectors": [static(A, {"generation": "all"})]}
ANSWER = {"vectors": [static(A, {"answer": "all"})]}
GATED = [gate(probe(PROBE, 0.0), "rest_of_request", add(B))]
GATED_AT_END = [gate(probe(PROBE, 0.0, at="answer"), "this_token", add(LATE))]
OBSERVED = [gate(probe(PROBE, 0.0, at="answer"), "this_token", OBSERVE)]
ALWAYS_ADDED = [gate(ALWAYS, "this_token", add(A))]

REQUESTS = {
    "plain": PLAIN,
    "static": STATIC,
    "stronger": STRONGER,
    "other": OTHER,
    "prompt only": PROMPT_ONLY,
    "generated only": GENERATED_ONLY,
    "answer": ANSWER,
    "gated": GATED,
    "gated at the end": GATED_AT_END,
    "observed": OBSERVED,
    "always": ALWAYS_ADDED,
}

SHARES_THE_PROMPT = {"plain", "generated only", "answer", "gated", "gated at the end", "observed", "always"}
"""Requests that leave the first four blocks of `LONG` as they are: its prompt end lies in the fifth."""


@pytest.fixture
def cached(eager: SteeredEngine) -> SteeredEngine:
    """The eager engine with an empty cache."""
    eager.llm.reset_prefix_cache()
    return eager


def ask(engine: SteeredEngine, request: Any, prompt_ids: list[int] = LONG, tokens: int = 8) -> Answer:
    (answer,) = engine.steer([prompt_ids], [request], tokens)
    return answer


def same(warm: Answer, cold: Answer) -> None:
    assert warm.finish_reason == cold.finish_reason == "length"
    assert warm.tokens == cold.tokens
    np.testing.assert_allclose(warm.logprobs, cold.logprobs, rtol=0, atol=1e-4)


@pytest.fixture(scope="package")
def cold(eager: SteeredEngine, oracle: Oracle) -> dict[str, Answer]:
    """Every request from an empty cache. They are the reference's, and are different from each other."""
    answers = {}
    for name, request in REQUESTS.items():
        (answers[name],) = check_batch(eager, oracle, [Case(LONG, request, 8)])
        assert answers[name].cached_tokens == 0
    distinct = ("plain", "static", "stronger", "other", "prompt only", "generated only", "answer")
    assert all(differ(answers[a], answers[b]) for a in distinct for b in distinct if a != b)
    return answers


def test_plain_and_steered_in_turn(cached: SteeredEngine, cold: dict[str, Answer]) -> None:
    cached.llm.reset_prefix_cache()
    for turn, name in enumerate(("plain", "static", "plain", "stronger", "plain", "static", "other", "plain")):
        answer = ask(cached, REQUESTS[name])
        same(answer, cold[name])
        repeated = turn in (2, 4, 5, 7)
        assert answer.cached_tokens == (4 * BLOCK if repeated else 0), f"turn {turn}: {name}"


@pytest.mark.parametrize("second", REQUESTS)
@pytest.mark.parametrize("first", REQUESTS)
def test_every_pair(cached: SteeredEngine, cold: dict[str, Answer], first: str, second: str) -> None:
    """Warm equals cold, and blocks are shared wherever neither request changes them."""
    cached.llm.reset_prefix_cache()
    same(ask(cached, REQUESTS[first]), cold[first])
    warm = ask(cached, REQUESTS[second])
    same(warm, cold[second])
    shares = first == second or {first, second} <= SHARES_THE_PROMPT
    assert warm.cached_tokens == (4 * BLOCK if shares else 0)


def test_the_block_of_the_prompt_end_is_not_shared(cached: SteeredEngine, oracle: Oracle) -> None:
    """A prompt that fills its blocks: its last one holds the prompt end, which `answer` changes."""
    full = prompt(401, 3 * BLOCK)
    longer = [*full, 7, 8, 9]
    for first, second, shared in (
        (PLAIN, ANSWER, 3),  # the prompt end of the second one lies in its fourth block
        (ANSWER, PLAIN, 2),
        (GATED_AT_END, PLAIN, 2),
        (GENERATED_ONLY, PLAIN, 3),
        (GATED, PLAIN, 3),
        (PLAIN, PLAIN, 3),
    ):
        cached.llm.reset_prefix_cache()
        ask(cached, first, full)
        warm = ask(cached, second, longer)
        oracle.check(Case(longer, second, 8), warm)
        assert warm.cached_tokens == shared * BLOCK


def test_two_prompt_lengths_share_no_generated_blocks(cached: SteeredEngine, oracle: Oracle) -> None:
    """The same tokens, divided into prompt and answer at two places: under a clause by phase, their KV differs."""
    short = prompt(402, BLOCK + 3)
    for request, shared in ((GENERATED_ONLY, 1), (ANSWER, 1), (ALWAYS_ADDED, 1), (STATIC, 3)):
        cached.llm.reset_prefix_cache()
        first = ask(cached, request, short, 3 * BLOCK)
        oracle.check(Case(short, request, 3 * BLOCK), first)
        whole = short + first.tokens
        second = ask(cached, request, whole[: 3 * BLOCK + 5])
        oracle.check(Case(whole[: 3 * BLOCK + 5], request, 8), second)
        # Steering that ignores phase may reuse the answer's blocks, as a later turn of a conversation does.
        assert second.cached_tokens == shared * BLOCK, request


def test_generated_blocks_of_equal_requests(cached: SteeredEngine, oracle: Oracle) -> None:
    """Plain requests do not find the generated blocks of steered ones, nor the reverse."""
    short = prompt(403, BLOCK + 3)
    for first, second in (
        (GENERATED_ONLY, PLAIN),
        (PLAIN, GENERATED_ONLY),
        (GATED, PLAIN),
        (ALWAYS_ADDED, GENERATED_ONLY),
    ):
        cached.llm.reset_prefix_cache()
        whole = short + ask(cached, first, short, 3 * BLOCK).tokens
        warm = ask(cached, second, whole)
        oracle.check(Case(whole, second, 8), warm)
        plain_answer = first is PLAIN and second is GENERATED_ONLY  # all of `whole` is prompt there
        assert warm.cached_tokens == (4 * BLOCK if plain_answer else BLOCK)


def test_identity_is_content_not_names(cached: SteeredEngine) -> None:
    other = random_direction(86, HIDDEN, [0, 1, 2, 3], norm=6.0)

    def named(name: str) -> dict[str, Any]:
        return {"vectors": [{"steer": {"kind": "name", "name": name}, "where": EVERYWHERE}]}

    cached.register("moving", "steer", A)
    cached.register("still", "steer", A)
    try:
        cold = ask(cached, named("moving"))
        assert cold.cached_tokens == 0
        for request in (named("still"), STATIC, named("moving")):
            warm = ask(cached, request)
            same(warm, cold)
            assert warm.cached_tokens == 4 * BLOCK, "the same numbers under another name, or none"
        cached.register("moving", "steer", other, replace=True)
        moved = ask(cached, named("moving"))
        assert moved.cached_tokens == 0, "other numbers under the same name"
        assert differ(moved, cold)
        same(moved, ask(cached, {"vectors": [static(other)]}))
        same(ask(cached, named("still")), cold)
    finally:
        for name in ("moving", "still"):
            cached.names.unregister(name, "steer")


def test_within_one_batch(cached: SteeredEngine, cold: dict[str, Answer]) -> None:
    """All of them at once, twice: blocks are looked up while others fill them."""
    cached.llm.reset_prefix_cache()
    names = [*REQUESTS, *REQUESTS]
    answers = cached.steer([LONG] * len(names), [REQUESTS[name] for name in names], 8)
    for name, answer in zip(names, answers, strict=True):
        same(answer, cold[name])
    assert all(answer.cached_tokens for answer in answers[len(REQUESTS) :])
