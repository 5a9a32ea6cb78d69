"""The server default on the engine: under, beside and, where it is locked, behind what requests bring themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from reference.models import random_direction
from reference.sources import Site
from reference.wire import ALWAYS_IN_ANSWER, EVERYWHERE, Json, add, gate, probe, static
from steergate_server.schema.decode import decode, encode
from steergate_server.schema.registry import ServerDefault
from support.engines import SteeredEngine

from .oracle import Case, Oracle, check_batch, differ, prompt, run_cold
from .programs import rows_at

FIRST, LAST = Site(0, "post_block"), Site(3, "post_block")
STATIC = static(rows_at(600, [FIRST, Site(2, "pre_attn")], 6.0))
IN_ANSWER = static(rows_at(601, [LAST], 6.0), {"answer": "all"}, scale=-0.7)
BY_TOKEN = static(rows_at(602, [FIRST, LAST], 6.0), {"prompt": "all", "generation_tokens": list(range(0, 250, 2))})
ADDING = gate(ALWAYS_IN_ANSWER, "this_token", add(rows_at(603, [Site(1, "pre_attn"), LAST], 5.0)))
HALVING = gate(ALWAYS_IN_ANSWER, "this_token", {"kind": "attenuate", "keep": 0.5})

DEFAULTS: dict[str, Json] = {
    "static": {"vectors": [STATIC]},
    "two that meet": {"vectors": [STATIC, IN_ANSWER], "conflict": "priority"},
    "by token": {"vectors": [BY_TOKEN]},
    "gates": {"gates": [ADDING]},
    "both": {"vectors": [IN_ANSWER], "gates": [HALVING, ADDING]},
}

OWN = static(rows_at(610, [FIRST, LAST], 6.0))
OWN_BY_POSITION = static(rows_at(611, [Site(2, "pre_attn")], 7.0), {"answer": "all", "prompt_positions": [0, -2]})
OWN_GATE = gate(
    probe(random_direction(612, 64, [1]), 0.0, at="answer", sharpness=2.0),
    "this_token",
    add(random_direction(613, 64, [2, 3], norm=6.0)),
)

REQUESTS: dict[str, Any] = {
    "nothing": {"report": "summary"},
    "a vector": {"vectors": [OWN]},
    "two vectors": {"vectors": [OWN, OWN_BY_POSITION], "report": "summary"},
    "a gate": {"gates": [OWN_GATE], "report": "summary"},
    "an attenuation": {"vectors": [OWN], "gates": [{**HALVING, "apply": {"kind": "attenuate", "keep": 0.25}}]},
    "a vector and a gate": {"vectors": [OWN_BY_POSITION], "gates": [OWN_GATE], "report": "summary"},
}


@pytest.fixture
def put(engine: SteeredEngine) -> Iterator[Any]:
    """`put(default, locked=False)` puts a default in force for the length of the test."""

    def put_default(default: Json, *, locked: bool = False) -> None:
        body = {**default, "client_gates": "allow", "locked": locked}
        engine.admission.set_default(decode(encode(body), ServerDefault))

    yield put_default
    engine.admission.clear_default()


@pytest.mark.parametrize("locked", [False, True], ids=["open", "locked"])
@pytest.mark.parametrize("default", DEFAULTS.values(), ids=DEFAULTS)
def test_requests_on_a_default(engine: SteeredEngine, oracle: Oracle, put: Any, default: Json, locked: bool) -> None:
    cases = [
        Case(prompt(620 + number, length), request, 8, {"default": default, "locked": locked})
        for number, request in enumerate(REQUESTS.values())
        for length in (1, 37)
    ]
    without = run_cold(engine, cases)
    put(default, locked=locked)

    answers = check_batch(engine, oracle, cases)
    assert sum(map(differ, answers, without)) > 0.8 * len(cases)


def test_a_locked_default_is_not_attenuated(engine: SteeredEngine, oracle: Oracle, put: Any) -> None:
    """keep 0 takes away the request's own vector and an open default, and leaves a locked one as it is."""
    request = {"vectors": [OWN], "gates": [gate(ALWAYS_IN_ANSWER, "this_token", {"kind": "attenuate", "keep": 0.0})]}
    text = prompt(640, 1)  # its only prompt row is the prompt end, which the gate reaches
    answers = {}
    for locked in (False, True):
        put(DEFAULTS["static"], locked=locked)
        case = Case(text, request, 8, {"default": DEFAULTS["static"], "locked": locked})
        (answers[locked],) = check_batch(engine, oracle, [case])
    engine.admission.clear_default()
    (plain,) = run_cold(engine, [Case(text, None, 8)])

    assert answers[False].tokens == plain.tokens
    assert differ(answers[True], plain)


def test_opting_out(engine: SteeredEngine, put: Any) -> None:
    """Without the default a request gets, to the bit, what it got before there was one."""
    text = prompt(641, 20)
    requests = [None, {"vectors": [OWN]}]
    before = run_cold(engine, [Case(text, request, 8) for request in requests])
    put(DEFAULTS["both"])
    opted_out = [False, {"vectors": [OWN], "inherit_default": False}]

    assert [(a.tokens, a.logprobs) for a in run_cold(engine, [Case(text, r, 8) for r in opted_out])] == [
        (a.tokens, a.logprobs) for a in before
    ]
    assert all(map(differ, run_cold(engine, [Case(text, request, 8) for request in requests]), before))


def test_another_default_needs_no_reset_of_the_cache(engine: SteeredEngine, oracle: Oracle, put: Any) -> None:
    """The default is part of each request's plan, so blocks of one are never read under another."""
    text = prompt(642, 100)
    defaults: list[tuple[Json | None, bool]] = [
        (DEFAULTS["static"], False), (None, False), (DEFAULTS["by token"], False), (DEFAULTS["static"], True),
        (DEFAULTS["static"], False),
    ]  # fmt: skip
    engine.llm.reset_prefix_cache()
    cached = []
    for default, locked in defaults:
        around = {} if default is None else {"default": default, "locked": locked}
        engine.admission.clear_default()
        if default is not None:
            put(default, locked=locked)
        request = None if default is None else {"report": "summary"}
        (answer,) = engine.steer([text], [request], 6)
        oracle.check(Case(text, request, 6, around), answer)
        cached.append(answer.cached_tokens)
    assert cached == [0, 0, 0, 0, 96]


def test_a_default_holds_its_payloads_and_lets_them_go(engine: SteeredEngine, put: Any) -> None:
    def payloads() -> set[str]:
        return {path.name for path in engine.spool.glob("*.safetensors")}

    before = payloads()
    put({"vectors": [STATIC]})
    with_static = payloads()
    put({"vectors": [IN_ANSWER]})
    with_other = payloads()
    engine.admission.clear_default()

    assert len(with_static - before) == len(with_other - before) == 1
    assert with_static != with_other
    assert payloads() == before
    assert STATIC["where"] == EVERYWHERE
