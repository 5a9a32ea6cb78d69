"""Static steering against the reference: clauses, sites, sources and scales, at every kind of prompt length."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from reference.models import pack, random_direction
from reference.wire import EVERYWHERE, static
from support.engines import SteeredEngine

from .conftest import HIDDEN, SETTINGS
from .oracle import Case, Oracle, check_batch, differ, prompt, run_cold

LENGTHS = (1, 2, 40, 150)
"""One token, whose only row is the prompt end; two; more than a block; and one that is computed in several chunks."""

CLAUSES = [
    dict.fromkeys(names, "all")
    for count in (1, 2, 3)
    for names in itertools.combinations(("prompt", "generation", "answer"), count)
]


def vector(seed: int, layers: list[int], hook: str = "post_block", norm: float = 6.0) -> dict[str, Any]:
    return random_direction(seed, HIDDEN, layers, hook, norm)


def named(name: str, **selection: Any) -> dict[str, Any]:
    return {"steer": {"kind": "name", "name": name, **selection}, "where": EVERYWHERE}


def one(*vectors: dict[str, Any]) -> dict[str, Any]:
    return {"vectors": list(vectors)}


def check_and_move(engine: SteeredEngine, oracle: Oracle, cases: list[Case]) -> None:
    """The answers are the reference's, and none is what the request would get without steering."""
    plain = run_cold(engine, [case._replace(request=None) for case in cases])
    for case, steered, unsteered in zip(cases, check_batch(engine, oracle, cases), plain, strict=True):
        assert differ(steered, unsteered), f"{case.request} moves nothing"


def test_a_long_prompt_is_computed_in_chunks() -> None:
    assert max(LENGTHS) > 2 * SETTINGS["max_num_batched_tokens"]


def test_clauses(engine: SteeredEngine, oracle: Oracle) -> None:
    check_and_move(
        engine,
        oracle,
        [
            Case(prompt(length, length), one(static(vector(1, [1], norm=9.0), clause)))
            for length in LENGTHS
            for clause in CLAUSES
        ],
    )


@pytest.mark.parametrize("hook", ["pre_attn", "post_block"])
def test_sites(engine: SteeredEngine, oracle: Oracle, hook: str) -> None:
    """Each layer alone, the first and the last among them, at rows of both phases and at the prompt end alone."""
    check_and_move(
        engine,
        oracle,
        [
            Case(prompt(10 + length, length), one(static(vector(2, [layer], hook, 9.0), where)))
            for layer in range(4)
            for length in (1, 33)
            for where in (EVERYWHERE, {"answer": "all"})
        ],
    )


ROW = np.random.default_rng(22).standard_normal(HIDDEN)

REQUESTS = {
    "several sites": one(static(vector(3, [0, 1, 2, 3]))),
    "both hooks": one(static(vector(4, [0, 3], "pre_attn") | vector(5, [1, 2]))),
    "several vectors, one site": one(*(static(vector(seed, [2])) for seed in (6, 7, 8))),
    "several vectors, rows that overlap": one(
        static(vector(9, [1, 2]), {"prompt": "all"}),
        static(vector(10, [2, 3]), {"answer": "all"}, scale=0.5),
        static(vector(11, [0], "pre_attn"), {"generation": "all"}),
        static(vector(12, [2])),
    ),
    "the same vector twice": one(static(vector(13, [1])), static(vector(13, [1]), {"answer": "all"}, scale=-0.5)),
    "negative scale": one(static(vector(14, [1, 3]), scale=-1.5)),
    "scale 0 beside another": one(static(vector(15, [1]), scale=0.0), static(vector(16, [1]))),
    "layers of an inline vector": one(static(vector(17, [0, 1, 2, 3]), layers=[3, 1])),
    **{
        f"{dtype} with scales": one(static(pack("post_block", {2: ROW, 0: -ROW}, dtype, scales=[1.5, 0.5])))
        for dtype in ("float16", "bfloat16", "float64")
    },
    "a payload spelled out": one(
        {"steer": {"kind": "payload", "payload": {"kind": "direction", "packed": vector(18, [2])}}, "where": EVERYWHERE}
    ),
    "named": one(named("two-hooks")),
    "named, one hook": one(named("two-hooks", hook="post_block")),
    "named, some layers": one(named("two-hooks", layers=[0, 3])),
    "named, one hook and layer": one(named("two-hooks", layers=[3], hook="pre_attn")),
    "named, layers of layers": one({**named("two-hooks", layers=[0, 3]), "layers": [0]}),
    "named and inline": one(named("last"), static(vector(19, [3]))),
}


def test_sources_and_sums(engine: SteeredEngine, oracle: Oracle) -> None:
    check_and_move(
        engine,
        oracle,
        [
            Case(prompt(20 + seed, length), request)
            for seed, request in enumerate(REQUESTS.values())
            for length in (3, 70)
        ],
    )


def test_scale_zero_is_no_steering_bit_for_bit(engine: SteeredEngine) -> None:
    prompts = [prompt(30 + length, length) for length in LENGTHS]
    zero = one(static(vector(20, [0, 1, 2, 3]), scale=0.0), {**named("two-hooks"), "scale": 0.0})
    steered = one(static(vector(20, [0, 1, 2, 3])))
    answers = {}
    for name, request in (("zero", zero), ("none", None), ("steered", steered)):
        engine.llm.reset_prefix_cache()
        answers[name] = engine.steer(prompts, [request] * len(prompts))
    assert answers["zero"] == answers["none"]
    assert all(a.logprobs != b.logprobs for a, b in zip(answers["zero"], answers["steered"], strict=True))


def test_the_answer_alone_is_the_references_own(engine: SteeredEngine, oracle: Oracle) -> None:
    """Not along the engine's tokens: the reference answers freely."""
    case = Case(prompt(40, 40), one(static(vector(21, [1, 3]))), max_tokens=24)
    engine.llm.reset_prefix_cache()
    (answer,) = engine.steer([case.prompt], [case.request], case.max_tokens)
    free = oracle.free(case)
    assert answer.tokens == free.tokens
    assert answer.logprobs == pytest.approx(free.logprobs, abs=1e-4)
