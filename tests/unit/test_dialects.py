"""How each route's answers are edited, on bytes alone."""

from __future__ import annotations

import json

import pytest

from steergate_server.schema.errors import SteeringError
from steergate_server.vllm_plugin.dialects import (
    CARRYING_ROUTES,
    MessagesDialect,
    ResponsesDialect,
    dialect_of,
    with_member,
)

REPORT = b'{"fingerprint":"x"}'


def data(events: bytes) -> list[str]:
    return [line.removeprefix("data: ") for line in events.decode().splitlines() if line.startswith("data: ")]


def edit(route: str, *pieces: bytes) -> bytes:
    """A stream in the pieces in which a handler sends it."""
    dialect = dialect_of(route)
    return b"".join(dialect.with_report(piece, lambda: REPORT) for piece in pieces)


CHUNK = b'data: {"id":"a","object":"o","created":1,"model":"m","choices":[{"text":"data: [DONE]"}]}\n\n'
DONE = b"data: [DONE]\n\n"
COMPLETED = b'event: response.completed\ndata: {"type":"response.completed","response":{"id":"a"}}\n\n'
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/invocations"])
def test_a_chunk_before_done(route: str) -> None:
    for pieces in (
        [CHUNK, b"data: [DONE]\n\n"],
        [CHUNK + b"data: [DONE]\n\n"],
        [b": alive\n\n", CHUNK, b"data: [DONE]\n\n"],
    ):
        found = data(edit(route, *pieces))
        assert found[-1] == "[DONE]"
        last = json.loads(found[-2])
        assert last == {
            "id": "a",
            "object": "o",
            "created": 1,
            "model": "m",
            "choices": [],
            "steering_report": {"fingerprint": "x"},
        }
        assert len(found) == 3


@pytest.mark.parametrize(("route", "event"), [("/v1/responses", COMPLETED), ("/v1/messages", STOP)])
def test_the_last_named_event(route: str, event: bytes) -> None:
    other = b'event: delta\ndata: {"delta":"event: message_stop\\ndata: {}"}\n\n'
    for pieces in ([other, event], [other + event], [event]):
        edited = edit(route, *pieces)
        assert json.loads(data(edited)[-1]) == {**json.loads(data(event)[0]), "steering_report": {"fingerprint": "x"}}
        assert edited.endswith(b"}\n\n")
        assert edited.count(b"steering_report") == 1
    assert edit(route, other) == other


def test_bodies() -> None:
    for body in (b"{}", b' {"a": 1} \n', b'{"a":{}}'):
        assert json.loads(with_member(body, REPORT)) == {**json.loads(body), "steering_report": {"fingerprint": "x"}}
    assert with_member(b"no object", REPORT) == b"no object"


def test_errors() -> None:
    error = SteeringError("algorithm_failed", "It failed.", "steering")
    assert set(MessagesDialect().error_body(error)) == {"type", "error"}
    assert set(ResponsesDialect().error_body(error)) == {"error"}
    for dialect in (MessagesDialect(), ResponsesDialect()):
        event = dialect.error_event(error)
        assert event.startswith(b"event: error\ndata: {")
        told = json.loads(data(event)[0])
        assert told["type"] == "error"
        assert told["error"]["code"] == "algorithm_failed"
    assert (told["code"], told["message"], told["param"]) == ("algorithm_failed", "It failed.", "steering")
    assert data(dialect_of("/v1/completions").error_event(error))[-1] == "[DONE]"


def test_routes_that_do_not_carry_steering_have_a_shape_for_saying_so() -> None:
    assert "/v1/messages/count_tokens" not in CARRYING_ROUTES
    assert isinstance(dialect_of("/v1/messages/count_tokens"), MessagesDialect)
    assert set(dialect_of("/tokenize").error_body(SteeringError("invalid_json", "No."))) == {"error"}
