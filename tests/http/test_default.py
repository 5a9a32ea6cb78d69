"""The server default in answers: what is inherited, what opting out does, whose gates run, what a lock holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from reference.models import random_direction
from reference.results import Result
from reference.wire import ALWAYS, EVERYWHERE, Json, add, gate, probe, static
from steergate_server.vllm_plugin.dialects import CARRYING_ROUTES
from support.checks import assert_equals, assert_refused, gates_of
from support.server import PROMPT, ROUTES, Answer, Api, Server, request_body

HIDDEN = 64
VECTOR = random_direction(31, HIDDEN, [1, 2], norm=4.0)
ENTERING = random_direction(32, HIDDEN, [2], "pre_attn", norm=3.0)
OWN = random_direction(33, HIDDEN, [0, 2], norm=3.0)
ADDED = random_direction(34, HIDDEN, [2, 3], norm=5.0)
PROBE = random_direction(3, HIDDEN, [1])
HALF = {"kind": "attenuate", "keep": 0.25}

OPERATOR_GATE = {**gate(ALWAYS, "this_token", add(ADDED, 0.5)), "label": "operator's"}
LATE = random_direction(35, HIDDEN, [1, 3], norm=5.0)
OWN_GATE = {**gate(probe(PROBE, 0.5, sharpness=0.5), "this_token", add(LATE, 0.8)), "label": "own"}
ATTENUATING = gate(probe(PROBE, -1e4), "rest_of_request", HALF)
VECTORS = [static(VECTOR, {"answer": "all"}), static(ENTERING, EVERYWHERE, scale=1.5)]
OWN_VECTORS = [
    static(OWN, EVERYWHERE),
    # No two orders of an erasure and an addition come to the same.
    static(random_direction(36, HIDDEN, [2]), {"answer": "all"}, algorithm="erase"),
]

DEFAULTS: dict[str, Json] = {
    "vectors": {"vectors": VECTORS},
    "locked": {"vectors": VECTORS, "locked": True},
    "gates": {"vectors": VECTORS, "gates": [OPERATOR_GATE], "client_gates": "allow"},
    "locked-gates": {"vectors": VECTORS, "gates": [OPERATOR_GATE], "client_gates": "allow", "locked": True},
    "attenuating": {"gates": [ATTENUATING], "client_gates": "allow"},
}

REQUESTS: dict[str, Any] = {
    "nothing": None,
    "report-alone": {"report": "summary"},
    "vectors": {"vectors": OWN_VECTORS},
    "gates": [OWN_GATE],
    "attenuation": {"vectors": OWN_VECTORS, "gates": [ATTENUATING], "report": "summary"},
    "attenuation-of-inherited": [ATTENUATING],
}

COMBINATIONS = list(itertools.product(ROUTES, (False, True)))
"""Every route, whole and as a stream."""

PutDefault = Callable[[Any], Answer]


def request_of(default: Json) -> Json:
    """The steering of a default."""
    return {name: value for name, value in default.items() if name not in ("client_gates", "locked")}


def expected_under(reference: Any, default: Json, steering: Any, **more: Any) -> Result:
    """What the reference answers under a default."""
    result: Result = reference(steering, default=request_of(default), locked=default.get("locked", False), **more)
    return result


# What is inherited ------------------------------------------------------------------------------------------------


MATRIX = [
    (default, request)
    for default, request in itertools.product(DEFAULTS, REQUESTS)
    if request != "attenuation-of-inherited" or default in ("vectors", "gates")
]
"""Every default with every request, but for attenuations of what is not there or is locked."""


@pytest.mark.parametrize(("default", "request_"), MATRIX, ids=map("-".join, MATRIX))
def test_answers_under_a_default_equal_the_reference(
    api: Api, reference: Any, put_default: PutDefault, default: str, request_: str
) -> None:
    put_default(DEFAULTS[default])
    steering = REQUESTS[request_]
    expected = expected_under(reference, DEFAULTS[default], steering)
    alone = reference(steering) if request_ != "attenuation-of-inherited" else reference(None)
    if (default, request_) not in (
        ("attenuating", "nothing"),
        ("attenuating", "report-alone"),
        ("attenuating", "gates"),
    ):
        assert expected.logprobs != alone.logprobs, "a default that changes nothing tests nothing"
    members = {} if steering is None else {"steering": steering}
    for route, stream in COMBINATIONS:
        answer = api.ask(route, stream=stream, **members)
        assert_equals(answer, expected)
        assert answer.fingerprint
        assert "x-steering-overridden" not in answer.headers
        assert (answer.report is None) == (request_ not in ("report-alone", "attenuation"))
        if answer.report is not None:
            assert answer.report["default"] == "inherited"
            assert answer.report["fingerprint"] == answer.fingerprint
            traces = [*expected.default_vectors, *expected.vectors]
            selected = [vector["positions_selected"] for vector in answer.report["choices"][0]["vectors"]]
            assert selected == [len(trace.selected) for trace in traces]
            fired = [given["fired"] for given in gates_of(answer)]
            assert fired == [len(trace.fired_rows) for trace in (*expected.default_gates, *expected.gates)]


@pytest.mark.parametrize("steering", [None, [], {}], ids=["null", "list", "object"])
def test_every_way_to_ask_for_nothing_inherits(
    api: Api, reference: Any, put_default: PutDefault, steering: Any
) -> None:
    put_default(DEFAULTS["vectors"])
    answer = api.ask("completions", steering=steering)
    assert_equals(answer, expected_under(reference, DEFAULTS["vectors"], None))
    assert answer.fingerprint == api.ask("chat").fingerprint


def test_a_body_that_only_python_reads_inherits(api: Api, reference: Any, put_default: PutDefault) -> None:
    put_default(DEFAULTS["vectors"])
    body = httpx.Request("POST", api.url, json=request_body("completions")).content.decode().encode("utf-16")
    assert_equals(api.send(ROUTES["completions"], body), expected_under(reference, DEFAULTS["vectors"], None))


def test_the_fingerprint_is_that_of_what_is_applied(api: Api, key: str, put_default: PutDefault) -> None:
    assert api.register("same-as-default", "steer", VECTOR, key).status == 200
    named = {"kind": "name", "name": "same-as-default"}
    put_default({"vectors": [static(VECTOR)]})
    inherited = api.ask("completions").fingerprint
    put_default({"vectors": [{"steer": named, "where": EVERYWHERE}]})
    assert api.ask("completions").fingerprint == inherited
    put_default({"vectors": [static(VECTOR, scale=2)]})
    assert api.ask("completions").fingerprint not in (inherited, None)
    assert api.unregister("same-as-default", "steer", key).status == 200


def test_changing_the_default_needs_no_reset(api: Api, key: str, reference: Any, put_default: PutDefault) -> None:
    prompt = [254, *(5 + 11 * i % 240 for i in range(98)), 255]
    everywhere, later = {"vectors": [static(VECTOR)]}, {"vectors": [static(VECTOR, {"generation": "all"})]}
    for default in (None, everywhere, None, later, everywhere, later, None):
        if default is None:
            api.clear_default(key)
        else:
            put_default(default)
        answer = api.ask("completions", prompt, max_tokens=4)
        assert_equals(answer, reference(None, prompt, 4, **({} if default is None else {"default": default})))
        assert (answer.fingerprint is None) == (default is None)


def test_a_request_that_runs_keeps_its_default(api: Api, key: str, reference: Any, put_default: PutDefault) -> None:
    put_default(DEFAULTS["vectors"])
    tokens: list[int] = []
    with api.http.stream(
        "POST", ROUTES["completions"], json=request_body("completions", stream=True, max_tokens=60)
    ) as response:
        for line in response.iter_lines():
            if not tokens:
                api.put_default({"vectors": [static(OWN, EVERYWHERE)]}, key)
            if line.startswith("data: {"):
                chunk = httpx.Response(200, content=line.removeprefix("data: ")).json()
                tokens += [token for choice in chunk["choices"] for token in choice.get("token_ids") or []]
    assert tokens == expected_under(reference, DEFAULTS["vectors"], None, max_tokens=60).tokens


def test_the_default_of_a_file_is_in_force_from_the_start(shared: Server, reference: Any, file_default: Json) -> None:
    default = request_of(file_default)
    default["gates"] = [{**given, "scope": "rest_of_request"} for given in default["gates"]]
    with Api(shared, {"Authorization": "Bearer key-a"}) as client:
        told = client.http.get("/v1/steering/default").json()["default"]
        assert told["client_gates"] == "allow"
        assert told["vectors"][0]["steer"]["kind"] == "digest"
        answer = client.ask("chat")
        assert_equals(answer, reference(None, default=default))
        assert answer.fingerprint
        assert_equals(client.ask("completions", steering=False), reference(None))


# Opting out -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("default", ["vectors", "gates"])
def test_false_is_no_steering_at_all(api: Api, put_default: PutDefault, default: str) -> None:
    plain = {combination: api.ask(combination[0], stream=combination[1]) for combination in COMBINATIONS}
    put_default(DEFAULTS[default])
    for (route, stream), before in plain.items():
        for more in ({}, {"conversation_id": "nobody-s"}):
            answer = api.ask(route, stream=stream, steering=False, **more)
            assert (answer.tokens, answer.logprobs) == (before.tokens, before.logprobs)
            assert answer.fingerprint is None
            assert answer.report is None


def test_not_inheriting_leaves_the_requests_own(api: Api, reference: Any, put_default: PutDefault) -> None:
    """Its own gates run even where the default would have taken none: the default's gates are gone."""
    put_default({"vectors": VECTORS, "gates": [OPERATOR_GATE], "client_gates": "reject"})
    own = {"vectors": OWN_VECTORS, "gates": [OWN_GATE], "inherit_default": False, "report": "summary"}
    for route, stream in COMBINATIONS:
        answer = api.ask(route, stream=stream, steering=own)
        assert_equals(answer, reference({**own, "inherit_default": True}))
        assert answer.fingerprint
        assert answer.report is not None
        assert answer.report["default"] == "overridden"
        assert [given["label"] for given in gates_of(answer)] == ["own"]
        assert len(answer.report["vectors"]) == len(OWN_VECTORS)
    unreported = api.ask("completions", steering={**own, "report": "none"})
    assert (unreported.tokens, unreported.fingerprint) == (answer.tokens, answer.fingerprint)
    assert_equals(api.ask("completions", steering={"inherit_default": False}), reference(None))


def test_without_a_default_the_report_says_none(api: Api) -> None:
    for steering in ({"report": "summary"}, {"inherit_default": False, "report": "summary"}):
        report = api.ask("completions", steering=steering).report
        assert report is not None
        assert (report["default"], report["vectors"]) == ("none", [])


# A lock -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("default", ["locked", "locked-gates"])
def test_a_locked_default_takes_no_opting_out(api: Api, put_default: PutDefault, default: str) -> None:
    put_default(DEFAULTS[default])
    for route, stream in COMBINATIONS:
        for more in ({}, {"conversation_id": "a"}):
            assert_refused(api.ask(route, stream=stream, steering=False, **more), 403, "default_locked", "steering")
        out = {"inherit_default": False, "vectors": OWN_VECTORS}
        answer = api.ask(route, stream=stream, steering=out)
        assert_refused(answer, 403, "default_locked", "steering.inherit_default")
        assert answer.error["type"] == "permission_error"


def test_nothing_a_client_sends_attenuates_a_locked_default(api: Api, put_default: PutDefault) -> None:
    put_default(DEFAULTS["locked"])
    assert_refused(api.ask("chat", steering=[ATTENUATING]), 400, "nothing_to_attenuate", "steering[0].apply")
    put_default({**DEFAULTS["locked"], "locked": False})
    assert api.ask("chat", steering=[ATTENUATING]).status == 200


# Whose gates run --------------------------------------------------------------------------------------------------

GATED: Json = {"vectors": VECTORS, "gates": [OPERATOR_GATE]}


@pytest.mark.parametrize("more", [{}, {"client_gates": "reject"}], ids=["by-default", "spelled-out"])
def test_reject(api: Api, reference: Any, put_default: PutDefault, more: Json) -> None:
    put_default({**GATED, **more})
    for route, stream in COMBINATIONS:
        answer = api.ask(route, stream=stream, steering=[OWN_GATE])
        assert_refused(answer, 403, "gates_overridden", "steering")
        assert answer.error["type"] == "permission_error"
        answer = api.ask(route, stream=stream, steering={"gates": [OWN_GATE], "vectors": OWN_VECTORS})
        assert_refused(answer, 403, "gates_overridden", "steering.gates")
    own = {"vectors": OWN_VECTORS}
    assert_equals(api.ask("chat", steering=own), expected_under(reference, GATED, own))


def test_a_default_without_gates_takes_a_clients(api: Api, reference: Any, put_default: PutDefault) -> None:
    default = {"vectors": VECTORS, "client_gates": "reject"}
    put_default(default)
    assert_equals(api.ask("completions", steering=[OWN_GATE]), expected_under(reference, default, [OWN_GATE]))


def test_ignore(api: Api, reference: Any, put_default: PutDefault) -> None:
    put_default({**GATED, "client_gates": "ignore"})
    own = {"vectors": OWN_VECTORS, "gates": [OWN_GATE] * 4, "report": "summary"}
    expected = expected_under(reference, GATED, {"vectors": OWN_VECTORS})
    for route, stream in COMBINATIONS:
        answer = api.ask(route, stream=stream, steering=own)
        assert_equals(answer, expected)
        assert answer.headers["x-steering-overridden"] == "gates"
        assert answer.fingerprint
        assert answer.report is not None
        assert answer.report["default"] == "inherited"
        told = [(given["label"], given["status"]) for given in gates_of(answer)]
        assert told == [("operator's", "ran"), *[("own", "overridden")] * 4]
        for given in gates_of(answer)[1:]:
            assert (given["evaluated"], given["fired"], given["latched"]) == (0, 0, False)
            assert given["first_answer_token"] == "untouched"
        unreported = api.ask(route, stream=stream, steering=[OWN_GATE])
        assert_equals(unreported, expected_under(reference, GATED, None))
        assert unreported.headers["x-steering-overridden"] == "gates"
        assert unreported.report is None
        plain = api.ask(route, stream=stream, steering={"vectors": OWN_VECTORS})
        assert "x-steering-overridden" not in plain.headers


def test_allow_takes_lanes_for_the_operator_first(api: Api, reference: Any, put_default: PutDefault) -> None:
    """The server has four lanes."""
    default = {**GATED, "gates": [OPERATOR_GATE] * 3, "client_gates": "allow"}
    put_default(default)
    fits = {"gates": [OWN_GATE], "report": "summary"}
    for route, stream in COMBINATIONS:
        answer = api.ask(route, stream=stream, steering=fits)
        assert_equals(answer, expected_under(reference, default, fits))
        told = [(given["label"], given["status"]) for given in gates_of(answer)]
        assert told == [*[("operator's", "ran")] * 3, ("own", "ran")]
        two = [OWN_GATE, OWN_GATE]
        assert_refused(api.ask(route, stream=stream, steering=two), 400, "too_many_gates", "steering")
        answer = api.ask(route, stream=stream, steering={"gates": two})
        assert_refused(answer, 400, "too_many_gates", "steering.gates")
    alone = {"gates": [OWN_GATE] * 4, "inherit_default": False}
    assert_equals(api.ask("chat", steering=alone), reference([OWN_GATE] * 4))


# What cannot carry it ---------------------------------------------------------------------------------------------

NOT_GENERATING = ("ping", "tokenize", "render", "count_tokens", "cancel", "lora_adapter", "elastic_ep")
"""What the paths of POST routes that generate nothing hold."""


def test_routes_that_cannot_carry_the_default_are_refused(api: Api, key: str, put_default: PutDefault) -> None:
    paths = api.http.get("/openapi.json").json()["paths"]
    others = [
        path
        for path, methods in paths.items()
        if "post" in methods and path not in CARRYING_ROUTES and not path.startswith("/v1/steering/")
    ]
    generating = [path for path in others if not any(word in path for word in NOT_GENERATING)]
    assert {"/generative_scoring", "/v1/systemone"} <= set(generating)
    put_default(DEFAULTS["vectors"])
    counted = api.metric("vllm:generation_tokens_total")
    body = {**request_body("completions"), **request_body("chat"), "input": "t5 t6", "max_output_tokens": 4}
    answers = {path: api.send(path, body) for path in generating}
    codes = {path: answer.body.get("error", {}).get("code") for path, answer in answers.items()}
    assert codes == dict.fromkeys(generating, "steering_not_supported_here")
    for answer in answers.values():
        assert_refused(answer, 400, "steering_not_supported_here", None)
    assert api.metric("vllm:generation_tokens_total") == counted
    form = api.http.post("/v1/audio/transcriptions", files={"file": b"x"}, data={"model": "tiny"})
    assert form.json()["error"]["code"] == "steering_not_supported_here"
    assert api.send("/tokenize", {"model": "tiny", "prompt": "t5 t6"}).body["tokens"] == [5, 6]
    api.clear_default(key)
    answer = api.send("/v1/systemone", body)
    assert (answer.body.get("error") or {}).get("code") != "steering_not_supported_here"


def test_every_carrying_route_inherits(api: Api, put_default: PutDefault) -> None:
    put_default(DEFAULTS["vectors"])
    messages = [{"role": "user", "content": "t5 t6"}]
    bodies = {
        "/v1/responses": {"input": "t5 t6", "max_output_tokens": 4},
        "/v1/messages": {"messages": messages, "max_tokens": 4},
        "/v1/chat/completions/batch": {"messages": [messages, messages], "max_tokens": 4},
        "/invocations": {"messages": messages, "max_tokens": 4},
    }
    assert set(CARRYING_ROUTES) == {*bodies, *ROUTES.values()}
    for path, body in bodies.items():
        response = api.http.post(path, json={"model": "tiny", **body})
        assert response.status_code == 200, response.text
        assert response.headers["x-steering-applied"], path


def test_beam_search_cannot_carry_the_default(api: Api, put_default: PutDefault) -> None:
    beams = {"use_beam_search": True, "n": 2, "logprobs": None, "max_tokens": 3}
    put_default(DEFAULTS["vectors"])
    for more in ({}, {"steering": {"vectors": OWN_VECTORS}}):
        answer = api.ask("completions", **beams, **more)
        assert_refused(answer, 400, "steering_not_supported_here", "use_beam_search")
    assert api.ask("completions", **beams, steering=False).status == 200


def test_several_prompts_and_choices_inherit(api: Api, reference: Any, put_default: PutDefault) -> None:
    put_default(DEFAULTS["gates"])
    prompts = [PROMPT, PROMPT[:9]]
    answer = api.ask("completions", prompts)
    for index, prompt in enumerate(prompts):
        assert_equals(answer, expected_under(reference, DEFAULTS["gates"], None, prompt=prompt), index)
    answer = api.ask("chat", n=2, temperature=1, top_k=1)
    for index in range(2):
        assert_equals(answer, expected_under(reference, DEFAULTS["gates"], None), index)
