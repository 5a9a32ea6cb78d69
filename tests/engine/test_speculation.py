"""N-gram speculation: drafted rows are steered like any others, and those that are rejected never count."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from reference.wire import OBSERVE, Json, gate, probe
from steergate_server.runtime.config import EngineConfig
from steergate_server.schema.errors import SteeringError
from support.engines import SteeredEngine

from .conftest import REGISTERED, SETTINGS
from .oracle import Case, Oracle, check_batch, prompt
from .programs import matrix, random_programs

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def drafting(tiny: Path) -> Iterator[SteeredEngine]:
    """An engine that drafts up to three tokens at a time."""
    config = EngineConfig(hooks=("pre_attn", "post_block"), memory_mib=16, trace=True)
    engine = SteeredEngine(
        tiny,
        config=config,
        enforce_eager=True,
        **{**SETTINGS, "disable_log_stats": False, "speculative_config": DRAFTS},
    )
    for kind, vectors in REGISTERED.items():
        for name, source in vectors.items():
            engine.register(name, kind, source["packed"])
    yield engine
    engine.close()


def drafted(engine: SteeredEngine) -> tuple[int, int]:
    """Drafted tokens so far, and accepted ones."""
    counted = {metric.name: getattr(metric, "value", 0) for metric in engine.llm.get_metrics()}
    return counted["vllm:spec_decode_num_draft_tokens"], counted["vllm:spec_decode_num_accepted_tokens"]


def is_allowed(one: Json) -> bool:
    return one["when"]["kind"] == "always" or one["scope"] == "this_token"


def test_answers_and_books_equal_the_reference(drafting: SteeredEngine, oracle: Oracle) -> None:
    """Prompts of one repeated stretch, so that there is much to draft from, and some drafts are wrong."""
    cases = [
        case._replace(prompt=(prompt(900 + number % 7, 5) * 40)[: len(case.prompt)], max_tokens=14)
        for number, case in enumerate([*matrix(oracle), *random_programs(oracle, 60)])
        if all(map(is_allowed, case.request["gates"]))
    ]
    before = drafted(drafting)

    check_batch(drafting, oracle, _clear_of_thresholds(oracle, cases))

    proposed, accepted = (now - then for now, then in zip(drafted(drafting), before, strict=True))
    assert 20 < accepted < proposed - 20


def _clear_of_thresholds(oracle: Oracle, cases: list[Case]) -> list[Case]:
    """Those whose scores on these prompts do not lie on a threshold."""
    clear = []
    for case in cases:
        answer = oracle.free(case)
        margins = [
            abs(score - one["when"]["threshold"])
            for one, trace in zip(case.request["gates"], answer.gates, strict=True)
            for score in trace.scores
        ]
        if min(margins, default=1.0) > 1e-3:
            clear.append(case)
    assert len(clear) > 0.8 * len(cases)
    return clear


@pytest.mark.parametrize("scope", ["next_step", "rest_of_request", "rest_of_conversation"])
def test_a_probe_may_not_act_on_later_rows(drafting: SteeredEngine, scope: str) -> None:
    packed = REGISTERED["probe"]["look"]["packed"]
    apply = {"kind": "add", "steer": {"kind": "name", "name": "last"}}
    drafting.plan([gate(probe(packed, 0.0), "this_token", OBSERVE)])
    drafting.release()

    with pytest.raises(SteeringError) as raised:
        drafting.plan([gate(probe(packed, 0.0), scope, apply)], "a-conversation")
    assert (raised.value.code, raised.value.param) == ("gates_unavailable", "steering[0].scope")
