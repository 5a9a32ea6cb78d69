"""Generation with the client: what it sends, and what it makes of each answer."""

from __future__ import annotations

import sys

import pytest

from sdk.player import APPLIED, REPORT, Played, chat_body
from steergate import (
    APIConnectionError,
    InvalidAnswerError,
    InvalidSteering,
    Steering,
    SteeringClient,
    SteeringNotAppliedError,
    SteeringOverriddenWarning,
    When,
    Where,
)

CALM = When.always().scope("this_token").add("calm")
PLAN = Steering().vector("happy", where=Where.answer(), scale=2).gate(CALM)
MESSAGES = [{"role": "user", "content": "Hello"}]


def ask(client: SteeringClient, **more):
    return client.chat(model="demo", messages=MESSAGES, **more)


def test_a_steered_chat(server, client):
    headers = {**APPLIED, "X-Request-Id": "r1"}
    server.play(Played(body=chat_body("line\u2028separated", steering_report=REPORT), headers=headers))
    reply = ask(client, steering=PLAN, conversation_id="c1", temperature=0.5, n=1)
    (request,) = server.requests
    assert (request.method, request.path) == ("POST", "/v1/chat/completions")
    assert request.json == {
        "model": "demo",
        "messages": MESSAGES,
        "temperature": 0.5,
        "n": 1,
        "steering": {
            "vectors": [{"where": {"answer": "all"}, "steer": {"kind": "name", "name": "happy"}, "scale": 2.0}],
            "gates": [
                {
                    "when": {"kind": "always"},
                    "scope": "this_token",
                    "apply": {"kind": "add", "steer": {"kind": "name", "name": "calm"}},
                }
            ],
        },
        "conversation_id": "c1",
    }
    assert reply.text == "line\u2028separated"
    assert (reply.applied, reply.request_id, reply.raw["id"]) == ("5f1d", "r1", "c")
    gate = reply.steering_report.choices[0].gates[0]
    assert (gate.fired, gate.apply, gate.scores) == (2, "a word of a newer server", [(11, 1.5)])


def test_a_completion_of_several_choices(server, client):
    choices = [{"index": 1, "text": "two"}, {"index": 0, "text": "one"}]
    server.play(Played(body={"choices": choices}, headers=APPLIED))
    reply = client.complete(model="demo", prompt=["a", "b"], steering=[CALM])
    assert server.requests[0].path == "/v1/completions"
    assert isinstance(server.requests[0].json["steering"], list)
    assert (reply.texts, reply.text, reply.steering_report) == (["one", "two"], "one", None)


@pytest.mark.parametrize(
    ("steering", "sent"),
    [(None, None), (Steering(), None), ([], None), (False, False)],
    ids=["none", "empty", "[]", "false"],
)
def test_unsteered_chats_need_no_header(server, client, steering, sent):
    server.play(Played(body=chat_body(None)))
    reply = ask(client, steering=steering)
    assert reply.text == ""
    assert server.requests[0].json.get("steering") is sent
    assert reply.applied is None


@pytest.mark.parametrize("steering", [PLAN, CALM, [CALM]], ids=["plan", "gate", "list"])
def test_steering_that_was_not_applied_is_an_error(server, client, steering):
    server.play(Played(body=chat_body()))
    with pytest.raises(SteeringNotAppliedError, match="X-Steering-Applied"):
        ask(client, steering=steering)


def test_a_vector_of_scale_0_is_no_steering(server, client):
    server.play(Played(body=chat_body()))
    assert ask(client, steering=Steering().vector("happy", where=Where.answer(), scale=0)).text == "hi"


def test_what_was_overridden_is_a_warning(server, client):
    server.play(Played(body=chat_body(), headers={**APPLIED, "X-Steering-Overridden": "gates"}))
    with pytest.warns(SteeringOverriddenWarning, match="gates overridden") as caught:
        reply = ask(client, steering=CALM)
    assert reply.overridden == "gates"
    assert caught[0].filename == __file__


def test_a_bad_plan_is_not_sent(server, client):
    with pytest.raises(InvalidSteering) as caught:
        ask(client, steering=[When.always().scope("rest_of_conversation").add("calm")])
    assert (caught.value.code, caught.value.param) == ("conversation_id_required", "steering[0].scope")
    assert server.requests == []


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"stream": True}, NotImplementedError),
        ({"extra_body": {}}, TypeError),
        ({"timeout": 3}, TypeError),
        ({"temperature": float("nan")}, ValueError),
    ],
    ids=str,
)
def test_fields_that_would_be_lost_are_refused(server, client, fields, error):
    with pytest.raises(error):
        ask(client, **fields)
    assert server.requests == []


@pytest.mark.parametrize(
    "body",
    [b"<html>", [], {}, {"choices": [{}]}, {"choices": 5}, chat_body(steering_report={"fingerprint": 1})],
    ids=str,
)
def test_an_answer_that_is_none(server, client, body):
    server.play(Played(body=body, headers=APPLIED))
    with pytest.raises(InvalidAnswerError, match=r"contract 1\.0"):
        ask(client, steering=CALM)


# Headers, keys, environment


def test_headers_and_keys(server, client):
    server.play(Played(body=[]))
    client.vectors.list()
    headers = server.requests[0].headers
    assert headers["user-agent"] == f"steergate/0.1.0 python/{sys.version.split()[0]}"
    assert headers["x-steering-contract"] == "1.0"
    assert headers["authorization"] == "Bearer server-secret"
    assert "x-steering-api-key" not in headers


def test_the_environment_is_asked_last(server, monkeypatch):
    server.play(Played(body=[]))
    monkeypatch.setenv("STEERGATE_BASE_URL", f"{server.url}/v1/")
    monkeypatch.setenv("STEERGATE_API_KEY", "from-env")
    monkeypatch.setenv("STEERGATE_STEERING_API_KEY", "steering-from-env")
    with SteeringClient() as client:
        client.vectors.list()
    with SteeringClient(api_key="given") as client:
        client.vectors.list()
    assert [request.headers["authorization"] for request in server.requests] == ["Bearer from-env", "Bearer given"]


def test_secrets_are_never_shown(client):
    transport = client._transport
    shown = repr([client, client.__dict__, transport.__dict__, client.vectors.__dict__])
    assert "secret" not in shown
    with SteeringClient("http://user:secret@127.0.0.1:1/v1", max_retries=0) as other:
        assert repr(other) == "SteeringClient('http://127.0.0.1:1')"
        with pytest.raises(APIConnectionError) as caught:
            other.capabilities()
    assert "secret" not in str(caught.value)


def test_settings_that_make_no_sense(monkeypatch):
    with pytest.raises(ValueError, match="is no address"):
        SteeringClient("localhost:8000")
    monkeypatch.setenv("STEERGATE_TIMEOUT", "soon")
    with pytest.raises(ValueError, match="STEERGATE_TIMEOUT is 'soon'"):
        SteeringClient()
