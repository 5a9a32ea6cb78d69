"""Steering on every route that carries it: the same rows and the same report, in each route's own shape."""

from __future__ import annotations

import json
from typing import Any

import pytest

from reference.models import random_direction
from reference.results import Result
from reference.wire import ALWAYS_IN_ANSWER, OBSERVE, Json, add, gate, probe, static
from support.server import EVERY_ROUTE, PROMPT, Answer, Api, Server, request_body, words

HIDDEN = 64
VECTOR = random_direction(1, HIDDEN, [1, 2], norm=4.0)
PROBE = random_direction(3, HIDDEN, [1])
ADDED = random_direction(4, HIDDEN, [2, 3], norm=5.0)
EARLY = random_direction(5, HIDDEN, [0], norm=5.0)

STEERED: dict[str, Json] = {
    "vectors": {"vectors": [static(VECTOR), static(EARLY, {"answer": "all"}, scale=0.5, label="early")]},
    "gates": {
        "vectors": [static(VECTOR, {"generation": "all"})],
        "gates": [
            gate(probe(PROBE, 0.5, at="answer"), "this_token", add(ADDED)),
            gate(probe(PROBE, 0.5), "next_step", {"kind": "attenuate", "keep": 0.25}),
            gate(ALWAYS_IN_ANSWER, "this_token", add(EARLY, 0.3)),
        ],
    },
}

BOTH_WAYS = [(route, stream) for route in EVERY_ROUTE for stream in (False, True) if (route, stream) != ("batch", True)]
"""The batch route does not stream."""

every_route = pytest.mark.parametrize(
    ("route", "stream"), BOTH_WAYS, ids=[f"{route}-{'stream' if stream else 'whole'}" for route, stream in BOTH_WAYS]
)


def assert_equals(answer: Answer, expected: Result, choice: int = 0) -> None:
    """The same text; logprobs within 1e-4 and token ids, where the route tells them."""
    assert answer.status == 200, answer.body
    given = answer.choices[choice]
    assert given.text.split() == [f"t{token}" for token in expected.tokens if token < 253]
    if given.logprobs:
        assert given.logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    if given.tokens:
        assert given.tokens == expected.tokens


# Steered ---------------------------------------------------------------------------------------------------------


@every_route
@pytest.mark.parametrize("steering", STEERED.values(), ids=STEERED)
def test_every_route_is_steered_and_reports(
    api: Api, reference: Any, plain: Result, steering: Json, route: str, stream: bool
) -> None:
    expected = reference(steering)
    assert expected.tokens != plain.tokens, "a route that shows text alone must show this"
    assert_equals(api.ask(route, stream=stream), plain)
    answer = api.ask(route, stream=stream, steering={**steering, "report": "summary"})
    assert_equals(answer, expected)
    assert answer.report == api.ask("completions", steering={**steering, "report": "summary"}).report
    assert answer.report is not None
    assert answer.report["fingerprint"] == answer.fingerprint
    gates = answer.report["choices"][0]["gates"]
    assert [seen["fired"] for seen in gates] == [len(trace.fired_rows) for trace in expected.gates]
    without = api.ask(route, stream=stream, steering=steering)
    assert_equals(without, expected)
    assert (without.fingerprint, without.report) == (answer.fingerprint, None)


@every_route
def test_steering_false_is_plain(api: Api, plain: Result, route: str, stream: bool) -> None:
    answer = api.ask(route, stream=stream, steering=False, conversation_id="a")
    assert_equals(answer, plain)
    assert (answer.fingerprint, answer.report) == (None, None)


@pytest.mark.parametrize(("route", "event"), [("responses", "response.completed"), ("messages", "message_stop")])
def test_the_last_event_of_a_stream_takes_the_report(api: Api, route: str, event: str) -> None:
    steering = {**STEERED["gates"], "report": "scores"}
    reported = api.ask(route, stream=True, steering=steering).events
    unreported = api.ask(route, stream=True).events
    # vLLM may put tokens that wait to be sent into one event, so kinds are compared, not their number.
    assert list(dict.fromkeys(event["type"] for event in reported)) == list(
        dict.fromkeys(event["type"] for event in unreported)
    )
    assert reported[-1]["type"] == event
    assert [index for index, event in enumerate(reported) if "steering_report" in event] == [len(reported) - 1]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_response_that_goes_on_from_a_stored_one(api: Api, stream: bool) -> None:
    """What went before is prompt, as if the client had sent it all."""
    steering = {**STEERED["gates"], "report": "scores"}
    first = api.ask("responses", steering=steering)
    turns = [{"role": "user", "content": words(PROMPT)}, {"role": "assistant", "content": first.text}]
    more = {"role": "user", "content": "t77 t78"}
    sent = api.ask("responses", stream=stream, input=[*turns, more], steering=steering)
    stored = api.ask("responses", stream=stream, input=[more], previous_response_id=first.body["id"], steering=steering)
    assert stored.status == 200, stored.body
    assert stored.text == sent.text != first.text
    assert stored.logprobs == pytest.approx(sent.logprobs, abs=1e-4)
    assert stored.report is not None
    assert sent.report is not None
    rows = [report["choices"][0]["tokens"] for report in (stored.report, sent.report)]
    assert [row[:2] for row in rows[0]] == [row[:2] for row in rows[1]]
    assert rows[0][0][0] > len(PROMPT), "the prompt end lies behind the first turn"
    assert stored.report["choices"][0]["vectors"] == sent.report["choices"][0]["vectors"]


def test_a_batch_has_a_report_for_each_conversation(api: Api, reference: Any) -> None:
    prompts = [PROMPT, [254, *range(40, 52), 255], [254, 7, 255]]
    conversations = [[{"role": "user", "content": words(prompt)}] for prompt in prompts]
    steering = {**STEERED["gates"], "report": "summary"}
    answer = api.ask("batch", messages=conversations, steering=steering)
    assert answer.report is not None
    assert [choice["index"] for choice in answer.report["choices"]] == [0, 1, 2]
    for index, prompt in enumerate(prompts):
        expected = reference(steering, prompt)
        assert_equals(answer, expected, index)
        gates = answer.report["choices"][index]["gates"]
        assert [seen["fired"] for seen in gates] == [len(trace.fired_rows) for trace in expected.gates]
        assert gates[0]["first_fired"] == (expected.gates[0].fired_rows or [None])[0]


def test_invocations_take_completions_too(api: Api, reference: Any) -> None:
    for stream in (False, True):
        body = request_body("completions", stream=stream, steering={**STEERED["vectors"], "report": "summary"})
        answer = api.send("/invocations", body)
        assert_equals(answer, reference(STEERED["vectors"]))
        assert answer.report is not None
        assert answer.report["fingerprint"] == answer.fingerprint


def test_a_last_slash_is_redirected_as_vllm_does(api: Api, reference: Any) -> None:
    for route in ("completions", "responses", "messages"):
        body = request_body(route, steering=STEERED["vectors"])
        moved = api.send(f"{EVERY_ROUTE[route]}/", body)
        assert (moved.status, moved.fingerprint) == (307, None)
        assert_equals(api.send(moved.headers["location"], body), reference(STEERED["vectors"]))


# Behind a root path, with a server key ---------------------------------------------------------------------------

KEY = {"Authorization": "Bearer server-key"}


@pytest.mark.parametrize("prefix", ["", "/behind"])
@pytest.mark.parametrize("route", EVERY_ROUTE)
def test_a_root_path_changes_nothing(keyed: Server, reference: Any, route: str, prefix: str) -> None:
    with Api(keyed, KEY) as client:
        body = request_body(route, steering=STEERED["vectors"])
        assert_equals(client.send(prefix + EVERY_ROUTE[route], body), reference(STEERED["vectors"]))
        refused = client.send(f"{prefix}/tokenize", body)
        assert (refused.status, refused.error["code"]) == (400, "steering_not_supported_here")


@pytest.mark.parametrize("prefix", ["", "/behind"])
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer other"}, {"Authorization": "Basic server-key"}])
def test_an_alias_is_no_way_round_the_server_key(keyed: Server, prefix: str, headers: dict[str, str]) -> None:
    """vLLM asks for its key under some prefixes only."""
    with Api(keyed, headers) as client:
        for route in EVERY_ROUTE:
            answer = client.send(prefix + EVERY_ROUTE[route], request_body(route, steering=STEERED["vectors"]))
            assert (answer.status, answer.fingerprint) == (401, None), route
        assert answer.error["code"] == "unauthorized"


# Refused ---------------------------------------------------------------------------------------------------------

GATES = STEERED["gates"]["gates"][:1]
REPORT = {"report": "summary"}
MCP = {"type": "mcp", "server_label": "container", "server_url": "http://localhost:1"}

REFUSED: dict[str, tuple[Json, str, str]] = {
    "shape": ({"steering": {"vectors": [], "gate": 1}}, "unknown_field", "steering.gate"),
    "rules": (
        {"steering": [gate(probe(VECTOR, 0.0), "this_token", OBSERVE)]},
        "probe_not_single_site",
        "steering[0].when.probe",
    ),
    "model": (
        {"steering": {"vectors": [static(VECTOR, layers=[3])]}},
        "layer_not_in_payload",
        "steering.vectors[0].layers[0]",
    ),
    "prompt": (
        {"steering": {"vectors": [static(VECTOR, {"prompt_positions": [400]})]}},
        "selects_nothing",
        "steering.vectors[0].where",
    ),
    "conversation": ({"conversation_id": "a b"}, "invalid_name", "conversation_id"),
    "misspelt": ({"steerings": []}, "unknown_field", "steerings"),
    "reserved": ({"vllm_xargs": {"steergate": "x"}}, "reserved_field", "vllm_xargs.steergate"),
}


@every_route
@pytest.mark.parametrize(("members", "code", "param"), REFUSED.values(), ids=REFUSED)
def test_every_route_refuses_bad_steering(
    api: Api, route: str, stream: bool, members: Json, code: str, param: str
) -> None:
    counted = api.metric("vllm:generation_tokens_total")
    assert_refused(api.ask(route, stream=stream, **members), route, code, param)
    assert api.metric("vllm:generation_tokens_total") == counted


def assert_refused(answer: Answer, route: str, code: str, param: str) -> None:
    """The error in OpenAI's shape; on the messages route Anthropic's tag stands beside it."""
    assert (answer.status, answer.fingerprint) == (400, None), answer.body or answer.events
    assert answer.headers["content-type"] == "application/json"
    assert set(answer.body) == ({"error", "type"} if route == "messages" else {"error"})
    assert answer.body.get("type", "error") == "error"
    assert set(answer.error) == {"message", "type", "param", "code"}
    assert (answer.error["code"], answer.error["param"]) == (code, param)
    assert answer.error["type"] == "invalid_request_error"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("members", "param"),
    [
        ({"background": True, "steering": GATES}, "background"),
        ({"background": True, "steering": {"vectors": [static(VECTOR)]}}, "background"),
        ({"tools": [{"type": "function", "name": "f", "parameters": {}}, MCP], "steering": GATES}, "tools[1].type"),
        ({"tools": [{"type": "web_search_preview"}], "steering": GATES}, "tools[0].type"),
        (
            {"tools": [{"type": "code_interpreter", "container": "x"}], "steering": {"report": "summary"}},
            "tools[0].type",
        ),
    ],
    ids=["background", "background-vectors", "mcp", "search", "report"],
)
def test_responses_that_take_several_runs_are_refused(api: Api, members: Json, param: str, stream: bool) -> None:
    answer = api.ask("responses", stream=stream, **members)
    assert_refused(answer, "responses", "steering_not_supported_here", param)


def test_tools_that_the_client_runs_are_no_hindrance(api: Api) -> None:
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}]
    answer = api.ask("responses", tools=tools, tool_choice="none", steering=GATES)
    assert answer.status == 200, answer.body
    assert answer.fingerprint


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_batch_with_beam_search_is_refused(api: Api, stream: bool) -> None:
    for route in ("batch", "invocations"):
        answer = api.ask(route, use_beam_search=True, n=2, stream=stream, steering=STEERED["vectors"])
        assert_refused(answer, route, "steering_not_supported_here", "use_beam_search")


def test_invocations_of_another_kind_are_refused(api: Api) -> None:
    for body in ({"input": "t5"}, {"text_1": "t5", "text_2": "t6"}, {"requestType": "NEW_SESSION"}):
        answer = api.send("/invocations", {"model": "tiny", **body, "steering": STEERED["vectors"]})
        assert_refused(answer, "invocations", "steering_not_supported_here", "steering")


@every_route
def test_a_refusal_of_vllm_stays_as_it_is(api: Api, route: str, stream: bool) -> None:
    too_long = [254, *[5] * 600, 255]
    steered = api.ask(route, too_long, stream=stream, steering=STEERED["vectors"])
    plain = api.ask(route, too_long, stream=stream)
    assert (steered.status, steered.body, steered.fingerprint) == (plain.status, plain.body, None)
    assert steered.status == 400


# Failures once the engine runs -----------------------------------------------------------------------------------

OVERFLOW = {"vectors": [static(random_direction(1, HIDDEN, [1], norm=3e38), {"generation_positions": [2]})]}
"""Numbers that leave the range of float32 at the third generated row."""


@every_route
def test_a_late_failure_ends_the_answer_in_the_route_s_own_way(
    api: Api, plain: Result, route: str, stream: bool
) -> None:
    response = api.http.post(EVERY_ROUTE[route], json=request_body(route, stream=stream, steering=OVERFLOW))
    if not stream:
        assert response.status_code == 400, response.text
        error = response.json()["error"]
    else:
        assert response.status_code == 200
        data = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
        named = route in ("responses", "messages")
        assert named or data.pop() == "[DONE]"
        error = json.loads(data[-1])["error"]
        assert "t" in "".join(data[:-1]), "some of the answer came before"
        if named:
            assert [line for line in response.text.splitlines() if line.startswith("event: ")][-1] == "event: error"
            assert json.loads(data[-1])["type"] == "error"
    assert (error["code"], error["type"]) == ("algorithm_failed", "invalid_request_error")
    assert "left the range" in error["message"]
    assert_equals(api.ask(route, stream=stream), plain)
