"""A server whose model is split over two ranks: vectors are those of the whole model, and so are the answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from reference.models import HEAD_DIM, pack, random_direction
from reference.results import Result
from reference.wire import EVERYWHERE, Json, static
from support.server import Api, steergate_serve

from .conftest import STEERING_KEY

HEADS = 4 * HEAD_DIM


@pytest.fixture(scope="module")
def split(model: Path, folder: Path) -> Iterator[Api]:
    flags = ["--tensor-parallel-size", "2", "--steer-hooks", "attn_heads,post_block"]
    flags += ["--steer-algorithms", "direct,attention_add", "--steering-api-key", STEERING_KEY]
    # Left to itself vLLM gives each rank a NUMA node of its own, and stops where there are fewer.
    with (
        steergate_serve(
            model, folder / "split.log", flags, variables={"VLLM_CPU_OMP_THREADS_BIND": "nobind"}, limit=400
        ) as running,
        Api(running) as client,
    ):
        yield client


def heads(width: int) -> Json:
    """A vector for attention's heads."""
    packed = random_direction(5, width, [1, 3], "attn_heads", 6.0)
    return static(packed, EVERYWHERE, algorithm="attention_add")


def test_heads_have_the_width_of_the_whole_model(split: Api) -> None:
    hooks = split.http.get("/v1/steering/capabilities").json()["hooks"]
    assert {hook["hook"]: hook["width"] for hook in hooks} == {"attn_heads": HEADS, "post_block": 64}
    answer = split.ask("completions", steering={"vectors": [heads(HEADS // 2)]})
    assert (answer.status, answer.error["code"]) == (400, "width_mismatch")


def test_an_answer_and_its_report(split: Api, reference: Callable[..., Result], plain: Result) -> None:
    gates = [
        {
            "when": {"kind": "probe", "probe": {"kind": "inline", "packed": random_direction(3, 64, [1])},
                     "threshold": 0.5, "at": "answer"},
            "scope": "this_token",
            "apply": {"kind": "add", "steer": {"kind": "inline", "packed": random_direction(4, 64, [2], norm=5.0)}},
        }
    ]  # fmt: skip
    steering = {"vectors": [heads(HEADS)], "gates": gates, "report": "summary"}
    answer = split.ask("completions", steering=steering)
    expected = reference(steering)
    assert answer.tokens == expected.tokens != plain.tokens
    assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert answer.report is not None
    assert answer.report["choices"][0]["gates"][0]["fired"] == len(expected.gates[0].fired_rows)


def test_a_failure_on_the_other_rank_reaches_the_client(split: Api) -> None:
    row = np.zeros(HEADS)
    row[-1] = 3e37
    failing = static(pack("attn_heads", {1: row}), EVERYWHERE, algorithm="attention_add")
    answer = split.ask("completions", steering={"vectors": [failing]})
    assert answer.error["code"] == "algorithm_failed"


def test_both_ranks_are_told_of_and_hold_nothing(split: Api, plain: Result) -> None:
    answer = split.ask("completions")
    assert answer.tokens == plain.tokens
    status = split.http.get("/v1/steering/status", headers={"X-Steering-API-Key": STEERING_KEY}).json()
    assert [(worker["rank"], worker["pool_used"]) for worker in status["workers"]] == [(0, 0), (1, 0)]
    assert status["live_requests"] == 0
