"""What gates must not cost: no compilation for new ones, no score read on the host unless somebody keeps books of it,
and no prefix-cache hit of a prompt that they leave alone."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from reference.models import random_direction
from reference.wire import ALWAYS, Json, add, gate, probe
from steergate_server.runtime.config import EngineConfig
from support.engines import SteeredEngine

from .conftest import HIDDEN, WHOLE_PROMPTS
from .oracle import prompt

LONG = 1_000


@pytest.fixture(scope="module")
def counted(tiny: Path) -> Iterator[SteeredEngine]:
    """A compiled engine with room for a long prompt, whose worker counts."""
    engine = SteeredEngine(
        tiny,
        config=EngineConfig(hooks=("pre_attn", "post_block"), memory_mib=16),
        **{
            **WHOLE_PROMPTS,
            "max_model_len": 1_200,
            "max_num_batched_tokens": 1_200,
            "hf_overrides": {"max_position_embeddings": 2_048},
            "disable_log_stats": False,
            "worker_extension_cls": "support.counting.Counting",
        },
    )
    engine.steer([prompt(700, 20)] * 4, [None, {"vectors": [STATIC]}, [gated(1)], None], 4)  # whatever is lazy
    yield engine
    engine.close()


STATIC = {
    "steer": {"kind": "inline", "packed": random_direction(701, HIDDEN, [1], norm=5.0)},
    "where": {"generation": "all"},
}


def gated(seed: int, scope: str = "this_token") -> Json:
    """A gate with numbers of its own, at sites of its own."""
    layer = seed % 3
    when = probe(random_direction(710 + seed, HIDDEN, [layer]), 0.1 * seed, at="answer")
    return gate(when, scope, add(random_direction(730 + seed, HIDDEN, [layer + 1], norm=5.0)))


def count(engine: SteeredEngine, requests: list[Any], tokens: int = 9) -> dict[str, int]:
    """What the worker counts while these requests run in one batch."""
    engine.llm.collective_rpc("counting_start")
    engine.steer([prompt(740 + number, 5 + 7 * number) for number in range(len(requests))], requests, tokens)
    counted: dict[str, int] = engine.llm.collective_rpc("counting_stop")[0]
    return counted


def test_gates_without_books_are_never_read_on_the_host(counted: SteeredEngine) -> None:
    requests = [[gated(seed) for seed in range(first, first + 4)] for first in (2, 6, 10)]

    found = count(counted, [*requests, None, {"vectors": [STATIC]}])
    assert found == {"steps": 9, "host reads": 0, "compilations": 0}


@pytest.mark.parametrize("scope", ["next_step", "rest_of_request"])
def test_a_gate_that_outlives_its_row_is_read_once_a_step(counted: SteeredEngine, scope: str) -> None:
    found = count(counted, [[gated(20, scope)], [gated(21)], [gated(22, scope), gated(23)], None])
    assert found == {"steps": 9, "host reads": 9, "compilations": 0}


def test_a_report_is_read_only_while_its_request_runs(counted: SteeredEngine) -> None:
    requests = [{"gates": [gated(30)], "report": "summary"}, *([gated(seed)] for seed in range(31, 38))]
    counted.llm.collective_rpc("counting_start")
    counted.steer([prompt(750, 12)] * len(requests), requests, [4] + [9] * 7)
    assert counted.llm.collective_rpc("counting_stop")[0] == {"steps": 9, "host reads": 4, "compilations": 0}


def hits(engine: SteeredEngine) -> int:
    """Tokens that vLLM has found in its prefix cache so far."""
    return next(metric.value for metric in engine.llm.get_metrics() if metric.name == "vllm:prefix_cache_hits")


def test_gates_on_the_answer_leave_a_long_shared_prompt_to_everybody(counted: SteeredEngine) -> None:
    shared = prompt(760, LONG)
    requests: dict[str, Any] = {
        "plain": None,
        "always": [gate(ALWAYS, "this_token", add(random_direction(761, HIDDEN, [0], norm=5.0)))],
        "probe": [gated(40)],
        "lasting": [gated(41, "rest_of_request")],
        "static": {"vectors": [STATIC]},
    }
    found = {}
    for name, request in requests.items():
        counted.llm.reset_prefix_cache()
        counted.steer([shared], [None], 2)
        before = hits(counted)
        counted.steer([shared] * 3, [request] * 3, 6)
        found[name] = hits(counted) - before
    assert found["plain"] == 3 * (LONG // 32) * 32
    assert found == dict.fromkeys(requests, found["plain"])
