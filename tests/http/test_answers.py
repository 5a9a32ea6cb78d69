"""Answers: unsteered ones are untouched, steered ones equal the reference, header and report say what was applied."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from reference.models import random_direction
from reference.results import GateTrace, Result
from reference.sources import Site, decode_packed, directions
from reference.wire import ALWAYS, ALWAYS_IN_ANSWER, EVERYWHERE, OBSERVE, Json, add, gate, inline, probe, static
from steergate_server.registry.numbers import payload_digest
from steergate_server.schema.decode import decode, encode
from steergate_server.schema.requests import InlineVec
from support.checks import assert_equals
from support.server import PROMPT, ROUTES, Answer, Api

HIDDEN = 64
VECTOR = random_direction(1, HIDDEN, [1, 2], norm=4.0)
ENTERING = random_direction(2, HIDDEN, [0, 3], "pre_attn", norm=2.0)
PROBE = random_direction(3, HIDDEN, [1])
LATE_PROBE = random_direction(3, HIDDEN, [2])
ADDED = random_direction(4, HIDDEN, [2, 3], norm=5.0)
EARLY = random_direction(5, HIDDEN, [0], norm=5.0)
HALF = {"kind": "attenuate", "keep": 0.25}
NAMED = {"kind": "name", "name": "happy"}

UNSTEERED: dict[str, Json] = {
    "absent": {},
    "null": {"steering": None},
    "empty-list": {"steering": []},
    "empty-object": {"steering": {}},
    "spelled-out-nothing": {"steering": {"vectors": [], "gates": [], "report": "none"}},
    "false": {"steering": False},
    "conversation": {"conversation_id": "a.b:c-1", "steering": None},
}

STEERED: dict[str, Any] = {
    "everywhere": {"vectors": [static(VECTOR)]},
    "prompt": {"vectors": [static(VECTOR, {"prompt": "all"})]},
    "generation": {"vectors": [static(VECTOR, {"generation": "all"})]},
    "answer": {"vectors": [static(VECTOR, {"answer": "all"})]},
    "two-vectors": {"vectors": [static(VECTOR), static(ENTERING, {"answer": "all"}, scale=-1.5, label="enter")]},
    "own-layers": {"vectors": [static(VECTOR, layers=[2])]},
    "name": {"vectors": [{"steer": NAMED, "where": EVERYWHERE}]},
    "name-at-one-layer": {"vectors": [{"steer": {**NAMED, "layers": [1]}, "where": EVERYWHERE, "scale": 2}]},
    "always": [gate(ALWAYS, "this_token", add(ADDED))],
    "always-in-answer": [gate(ALWAYS_IN_ANSWER, "rest_of_request", add(ADDED, -1.0))],
    "this-token": [gate(probe(PROBE, 0.5), "this_token", add(ADDED))],
    "next-step": [gate(probe(PROBE, 0.5), "next_step", add(EARLY))],
    "rest-of-request": [gate(probe(PROBE, 0.5, at="answer"), "rest_of_request", add(ADDED))],
    "prompt-end": [gate(probe(PROBE, -1.0, at="prompt_end"), "rest_of_request", add(ADDED))],
    "cosine-below": [gate(probe(PROBE, 0.05, score="cosine", fires="below", at="answer"), "next_step", add(ADDED))],
    "named-probe": [
        gate({"kind": "probe", "probe": {"kind": "name", "name": "topic"}, "threshold": 0.5}, "next_step", add(ADDED))
    ],
    "observed": {
        "vectors": [static(VECTOR)],
        "gates": [gate(probe(PROBE, 0.5, at="answer"), "this_token", OBSERVE) | {"label": "watch"}],
    },
    "attenuated": {"vectors": [static(VECTOR)], "gates": [gate(probe(PROBE, 0.5), "rest_of_request", HALF)]},
    "four-gates": {
        "vectors": [static(VECTOR, scale=0.5)],
        "gates": [
            gate(probe(PROBE, 0.5, at="answer", sharpness=0.5), "this_token", add(ADDED)),
            gate(probe(LATE_PROBE, 0.3), "next_step", add(EARLY)),
            gate(probe(LATE_PROBE, 1.0, fires="below"), "rest_of_request", HALF),
            gate(ALWAYS_IN_ANSWER, "this_token", add(EARLY, 0.3)),
        ],
    },
}


def with_report(steering: Any) -> Json:
    """The request with a report; the list shorthand has no place for one."""
    request = {"gates": steering} if isinstance(steering, list) else steering
    return {**request, "report": "summary"}


# Plain -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("members", UNSTEERED.values(), ids=UNSTEERED)
def test_unsteered_requests_are_plain(api: Api, plain: Result, members: Json, route: str, stream: bool) -> None:
    answer = api.ask(route, stream=stream, **members)
    assert_equals(answer, plain)
    assert answer.logprobs == api.ask(route, stream=stream).logprobs
    assert answer.fingerprint is None
    assert answer.report is None
    assert answer.headers["x-steering-contract"] == "1.0"


@pytest.mark.parametrize("route", ROUTES)
def test_scale_zero_is_plain_to_the_bit(api: Api, route: str) -> None:
    before = api.ask(route)
    answer = api.ask(route, steering={"vectors": [static(VECTOR, scale=0)]})
    assert (answer.tokens, answer.logprobs) == (before.tokens, before.logprobs)


# Steered ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("steering", STEERED.values(), ids=STEERED)
def test_steered_answers_equal_the_reference(
    api: Api, reference: Any, plain: Result, steering: Any, route: str, stream: bool
) -> None:
    expected = reference(steering)
    assert expected.logprobs != plain.logprobs, "a case that changes nothing tests nothing"
    answer = api.ask(route, stream=stream, steering=steering)
    assert_equals(answer, expected)
    assert answer.fingerprint
    assert answer.headers["x-steering-contract"] == "1.0"
    assert answer.report is None


def test_a_long_prompt_is_computed_afresh_under_other_steering(api: Api, reference: Any) -> None:
    prompt = [254, *(5 + 7 * i % 240 for i in range(298)), 255]
    requests = [None, STEERED["everywhere"], STEERED["generation"], STEERED["rest-of-request"]]
    expected = [reference(steering, prompt, 4) for steering in requests]
    for _ in range(2):
        for steering, result in zip(requests, expected, strict=True):
            assert_equals(api.ask("completions", prompt, max_tokens=4, steering=steering), result)


def test_requests_at_the_same_time_keep_apart(api: Api, reference: Any) -> None:
    steering = [None if scale == 0 else {"vectors": [static(VECTOR, scale=scale)]} for scale in (0, 1, -1, 0, 2, -2)]
    expected = [reference(one, max_tokens=40) for one in steering]

    def ask(number: int) -> Answer:
        route = list(ROUTES)[number // len(steering) % 2]
        return api.ask(route, max_tokens=40, stream=number % 2 == 0, steering=steering[number % len(steering)])

    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(ask, range(4 * len(steering))))
    for number, answer in enumerate(answers):
        assert_equals(answer, expected[number % len(steering)])
        assert (answer.fingerprint is None) == (steering[number % len(steering)] is None)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_several_prompts_in_one_request(api: Api, reference: Any, stream: bool) -> None:
    prompts = [PROMPT, PROMPT[:9], [7]]
    steering = with_report(STEERED["four-gates"])
    answer = api.ask("completions", prompts, stream=stream, steering=steering)
    assert len(answer.choices) == len(prompts)
    assert answer.report is not None
    assert [choice["index"] for choice in answer.report["choices"]] == [0, 1, 2]
    for index, prompt in enumerate(prompts):
        expected = reference(steering, prompt)
        assert_equals(answer, expected, index)
        assert_choice_reported(answer.report["choices"][index], steering, expected)


@pytest.mark.parametrize("route", ROUTES)
def test_several_choices_of_one_prompt(api: Api, reference: Any, route: str) -> None:
    # vLLM refuses n > 1 at temperature 0.
    answer = api.ask(route, n=2, temperature=1, top_k=1, steering=STEERED["everywhere"])
    expected = reference(STEERED["everywhere"])
    assert len(answer.choices) == 2
    for index in range(2):
        assert_equals(answer, expected, index)


# The header ------------------------------------------------------------------------------------------------------


def test_the_fingerprint_is_content(api: Api, key: str) -> None:
    def fingerprint(steering: Any) -> str | None:
        return api.ask("completions", max_tokens=1, steering=steering).fingerprint

    assert api.register("same-as-happy", "steer", VECTOR, key).body["status"] == "created"
    happy = fingerprint({"vectors": [{"steer": NAMED, "where": EVERYWHERE}]})
    assert happy == fingerprint({"vectors": [{"steer": {**NAMED, "name": "same-as-happy"}, "where": EVERYWHERE}]})
    assert happy == fingerprint({"vectors": [static(VECTOR, label="another label")]})
    assert happy == fingerprint({"vectors": [static(VECTOR, scale=1)], "report": "summary"})
    assert happy != fingerprint({"vectors": [static(VECTOR, scale=1.5)]})
    assert happy != fingerprint({"vectors": [static(VECTOR, {"prompt": "all"})]})
    assert happy != fingerprint({"vectors": [static(VECTOR, layers=[1])]})
    gates = STEERED["rest-of-request"]
    assert fingerprint(gates) == fingerprint({"gates": gates})
    assert fingerprint(gates) != fingerprint(STEERED["prompt-end"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", ROUTES)
def test_an_error_of_vllm_has_no_header(api: Api, route: str, stream: bool) -> None:
    answer = api.ask(route, max_tokens=100_000, stream=stream, steering=STEERED["everywhere"])
    assert answer.status == 400
    assert answer.fingerprint is None
    assert answer.headers["x-steering-contract"] == "1.0"


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/v1/steering/capabilities", "/nothing-here", "/metrics"])
def test_every_answer_names_the_contract(api: Api, path: str) -> None:
    assert api.http.get(path).headers["x-steering-contract"] == "1.0"


# The report ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("steering", STEERED.values(), ids=STEERED)
def test_the_report_equals_the_reference(api: Api, reference: Any, steering: Any, route: str, stream: bool) -> None:
    request = with_report(steering)
    answer = api.ask(route, stream=stream, steering=request)
    expected = reference(request)
    assert_equals(answer, expected)
    report = answer.report
    assert report is not None
    assert set(report) == {"fingerprint", "default", "vectors", "choices"}
    assert report["fingerprint"] == answer.fingerprint
    assert report["default"] == "none"
    assert [choice["index"] for choice in report["choices"]] == [0]
    assert_choice_reported(report["choices"][0], request, expected)
    for vector, spec in zip(report["vectors"], request.get("vectors", []), strict=True):
        assert vector["label"] == spec.get("label")
        assert vector["algorithm"] == "direct"
        if spec["steer"]["kind"] == "inline":
            assert vector["digest"] == payload_digest(decode(encode(spec["steer"]), InlineVec))
            assert vector["sites"] == [str(site) for site in static_sites(spec)]


@pytest.mark.parametrize("usage", [False, True], ids=["without-usage", "with-usage"])
@pytest.mark.parametrize("route", ROUTES)
def test_a_stream_ends_with_one_chunk_for_the_report(api: Api, route: str, usage: bool) -> None:
    more = {"stream_options": {"include_usage": True}} if usage else {}
    answer = api.ask(route, stream=True, steering=with_report(STEERED["everywhere"]), **more)
    last = answer.events[-1]
    assert last["choices"] == []
    assert last["steering_report"]["fingerprint"] == answer.fingerprint
    assert {name: last[name] for name in ("id", "object", "created", "model")} == {
        name: answer.events[0][name] for name in ("id", "object", "created", "model")
    }
    assert all("steering_report" not in event for event in answer.events[:-1])
    assert ("usage" in answer.events[-2] and answer.events[-2]["choices"] == []) == usage


@pytest.mark.parametrize("route", ROUTES)
def test_a_report_without_steering(api: Api, plain: Result, route: str) -> None:
    answer = api.ask(route, steering={"report": "summary"})
    assert_equals(answer, plain)
    assert answer.report is not None
    assert answer.report["vectors"] == []
    assert answer.report["choices"] == [{"index": 0, "vectors": [], "gates": []}]


def test_sites_that_an_attenuation_cannot_reach_are_listed(api: Api, reference: Any) -> None:
    vector = random_direction(1, HIDDEN, [0, 1, 2], norm=4.0)
    request = with_report(
        {"vectors": [static(vector)], "gates": [gate(probe(LATE_PROBE, 0.5, at="answer"), "this_token", HALF)]}
    )
    answer = api.ask("completions", steering=request)
    assert_equals(answer, reference(request))
    assert answer.report is not None
    reported = answer.report["choices"][0]["gates"][0]
    assert reported["sites_out_of_reach"] == ["0:post_block", "1:post_block"]


def test_a_first_token_that_a_firing_came_too_late_for_is_untouched(api: Api, reference: Any, plain: Result) -> None:
    """At the row of its first firing, a lasting gate acts from the probe's site on; the vector's site is before it."""
    request = with_report([gate(probe(LATE_PROBE, -100.0, at="answer"), "rest_of_request", add(EARLY))])
    answer = api.ask("completions", steering=request)
    assert_equals(answer, reference(request))
    assert answer.logprobs[0] == pytest.approx(plain.logprobs[0], abs=1e-4)
    assert answer.report is not None
    assert answer.report["choices"][0]["gates"][0]["first_answer_token"] == "untouched"


def assert_choice_reported(reported: Json, request: Json, expected: Result) -> None:
    """One choice of the report holds the figures of the reference's trace."""
    for vector, trace in zip(reported["vectors"], expected.vectors, strict=True):
        assert vector["positions_selected"] == len(trace.selected)
        assert {vector["positions_applied"]} == {len(rows) for rows in trace.applied.values()}
    for given, sent, trace in zip(reported["gates"], request.get("gates", []), expected.gates, strict=True):
        assert_gate_reported(given, sent, trace, request)


def assert_gate_reported(given: Json, sent: Json, trace: GateTrace, request: Json) -> None:
    when = sent["when"]
    assert (given["when"], given["scope"], given["apply"]) == (when["kind"], sent["scope"], sent["apply"]["kind"])
    assert given["label"] == sent.get("label")
    assert given["status"] == "ran"
    assert given["latched"] is False
    fired = trace.fired_rows
    assert given["fired"] == len(fired)
    assert (given["first_fired"], given["last_fired"]) == ((fired[0], fired[-1]) if fired else (None, None))
    if when["kind"] == "probe":
        close = min(abs(score - when["threshold"]) for score in trace.scores)
        assert close > 1e-3, "a score so close to the threshold may fall on either side"
        assert given["evaluated"] == len(trace.scores)
        assert given["max_score"] == pytest.approx(max(trace.scores), abs=1e-4)
    else:
        assert given["evaluated"] == len(fired)
        assert given["max_score"] is None
    assert given["first_answer_token"] == first_token(sent, trace, request)
    assert given["sites_out_of_reach"] == []


def first_token(sent: Json, trace: GateTrace, request: Json) -> str:
    """How the gate touched the prompt end, by its weights at the sites that it acts at."""
    if sent["apply"]["kind"] == "observe":
        return "untouched"
    if sent["apply"]["kind"] == "add":
        sites = list(decode_packed(sent["apply"]["steer"]["packed"]))
    else:
        sites = [site for spec in request["vectors"] for site in static_sites(spec)]
    end, known_from = trace.rows[0], Site(-1, "pre_attn").order
    if sent["when"]["kind"] == "probe" and sent["when"]["probe"]["kind"] == "inline":
        known_from = next(iter(decode_packed(sent["when"]["probe"]["packed"]))).order
    weights = {end.weight if site.order >= known_from else end.weight_before for site in sites}
    return {(0.0,): "untouched", (1.0,): "steered"}.get(tuple(weights), "partly")


def static_sites(spec: Json) -> list[Site]:
    """The sites of an inline vector that its own layers leave, in execution order."""
    sites = directions(inline(spec["steer"]["packed"]), "steer", {})
    return [site for site in sites if spec.get("layers") is None or site.layer in spec["layers"]]
