"""The SDK's methods for the server default, conversations, status and validation, against a running server."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from reference.models import pack, random_direction
from reference.results import Result
from reference.wire import ALWAYS, EVERYWHERE, add, gate, static
from steergate import (
    AuthenticationError,
    BadRequestError,
    InvalidSteering,
    PermissionDeniedError,
    Steering,
    SteeringClient,
    SteeringOverriddenWarning,
    When,
    Where,
)
from steergate.wire import SteeringGate, SteeringRequest
from support.server import MODEL_NAME, PROMPT, Server

HIDDEN = 64
ASKED: dict[str, Any] = {"model": MODEL_NAME, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
EVERYWHERE_TOO = Where.prompt() | Where.generation()
HAPPY = Steering().vector("happy", where=EVERYWHERE_TOO)
AS_WIRE = {"vectors": [{"steer": {"kind": "name", "name": "happy"}, "where": EVERYWHERE}]}
LASTING = When.always().scope("rest_of_conversation").add("happy")
LASTING_AS_WIRE = gate(ALWAYS, "rest_of_conversation", {"kind": "add", "steer": {"kind": "name", "name": "happy"}})
UNOBSERVABLE = msgspec.convert(gate(ALWAYS, "next_step", {"kind": "observe"}), SteeringGate)
"""A gate that no builder would make."""


class Counting(httpx.HTTPTransport):
    """Counts what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        self.sent += 1
        return super().handle_request(request)


@pytest.fixture
def counting() -> Counting:
    return Counting()


@pytest.fixture
def client(server: Server, key: str, counting: Counting) -> Iterator[SteeringClient]:
    """A client with the steering key; the default it leaves is cleared."""
    with (
        httpx.Client(transport=counting, timeout=60) as http,
        SteeringClient(server.url, steering_api_key=key, max_retries=0, http_client=http) as made,
    ):
        yield made
        made.default.clear()


def words(result: Result) -> list[str]:
    return [f"t{token}" for token in result.tokens if token < 253]


def said(client: SteeringClient, **more: Any) -> list[str]:
    return client.complete(**ASKED, ignore_eos=True, **more).text.split()


def test_the_default(client: SteeringClient, reference: Any) -> None:
    assert client.default.show() is None
    numbers = np.random.default_rng(5).standard_normal((2, HIDDEN)).astype("f4")
    plan = HAPPY.vector(numbers, layers=[0, 3], where=Where.answer(), label="inline")
    assert client.default.put(plan, client_gates="allow", locked=True) == client.default.show()
    inline = static(pack("post_block", {0: numbers[0], 3: numbers[1]}), {"answer": "all"})
    expected = reference(None, default={"vectors": [*AS_WIRE["vectors"], inline]})
    assert said(client) == words(expected)
    before = client.default.show()
    assert before is not None
    assert (before["locked"], before["client_gates"]) == (True, "allow")
    assert "data" not in json.dumps(before)
    with pytest.raises(PermissionDeniedError) as refused:
        said(client, steering=False)
    assert refused.value.code == "default_locked"
    assert client.default.restore({**before, "locked": False}) == client.default.show()
    assert said(client) == words(expected)
    assert said(client, steering=False) == words(reference(None))
    client.default.clear()
    assert client.default.show() is None
    assert said(client) == words(reference(None))


def test_a_default_may_latch_its_own_numbers(client: SteeringClient, reference: Any, conversation: str) -> None:
    """A client's own may not: nobody would keep them."""
    latched = gate(ALWAYS, "rest_of_conversation", add(random_direction(6, HIDDEN, [1], norm=5.0)))
    client.default.put([msgspec.convert(latched, SteeringGate)])
    said(client, conversation_id=conversation)
    client.default.clear()
    assert said(client, conversation_id=conversation) == words(reference(None, bridged=[latched]))


def test_overridden_gates_are_a_warning(client: SteeringClient, reference: Any) -> None:
    own = When.always().scope("this_token").add("happy", layers=1)
    default = [gate(ALWAYS, "this_token", {"kind": "add", "steer": {"kind": "name", "name": "happy"}})]
    client.default.put(When.always().scope("this_token").add("happy"), client_gates="ignore")
    with pytest.warns(SteeringOverriddenWarning, match="gates"):
        reply = client.complete(**ASKED, ignore_eos=True, steering=Steering().gate(own).report("summary"))
    assert (reply.overridden, bool(reply.applied)) == ("gates", True)
    assert reply.text.split() == words(reference(None, default={"gates": default}))
    assert [told.status for told in reply.steering_report.choices[0].gates] == ["ran", "overridden"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert client.complete(**ASKED, steering=HAPPY).overridden is None
    client.default.put(When.always().scope("this_token").add("happy"))
    with pytest.raises(PermissionDeniedError) as refused:
        said(client, steering=own)
    assert (refused.value.code, refused.value.param) == ("gates_overridden", "steering")


def test_forgetting(client: SteeringClient, reference: Any, conversation: str) -> None:
    said(client, steering=LASTING, conversation_id=conversation)
    assert said(client, conversation_id=conversation) == words(reference(None, bridged=[LASTING_AS_WIRE]))
    answer = client.forget(conversation)
    assert (answer.status, answer.conversation_id) == ("forgotten", conversation)
    assert said(client, conversation_id=conversation) == words(reference(None))


def test_status(client: SteeringClient, server: Server) -> None:
    said(client, steering=HAPPY)
    status = client.status()
    assert (status.one_principal, [worker.rank for worker in status.workers]) == (True, [0])
    assert status.counters['steergate_requests_total{kind="static"}'] >= 1
    with SteeringClient(server.url, max_retries=0) as keyless, pytest.raises(AuthenticationError) as refused:
        keyless.status()
    assert refused.value.code == "unauthorized"


def test_validation(client: SteeringClient) -> None:
    assert client.validate(HAPPY).valid
    assert client.validate(None).valid
    assert client.validate(False).valid
    plan = Steering().vector("nobody", where=EVERYWHERE_TOO).vector("happy", where=EVERYWHERE_TOO, layers=3)
    answer = client.validate(plan.gate(When.probe("happy", threshold=0).scope("this_token").observe()))
    assert not answer.valid
    assert [(error.code, error.param) for error in answer.errors] == [
        ("unknown_vector", "vectors[0].steer.name"),
        ("layer_not_in_payload", "vectors[1].steer.layers[0]"),
        ("unknown_vector", "gates[0].when.probe.name"),
    ]
    # Rules too, which elsewhere are checked before anything is sent.
    inline = gate(ALWAYS, "rest_of_conversation", add(random_direction(6, HIDDEN, [1])))
    plan = [msgspec.convert(inline, SteeringGate)]
    assert [error.code for error in client.validate(plan).errors] == ["inline_conversation_steer"]


def test_what_is_refused_before_it_is_sent(client: SteeringClient, counting: Counting) -> None:
    client.status()
    sent = counting.sent
    for nothing in (None, False, Steering(), []):
        with pytest.raises(TypeError):
            client.default.put(nothing)
    meeting = [static(pack("post_block", {1: np.ones(HIDDEN)}))] * 2
    wire = msgspec.convert({"vectors": meeting, "conflict": "error"}, SteeringRequest)
    for plan, code, param in (
        (wire, "vector_conflict", "vectors[1]"),
        ([When.always().scope("this_token").add("happy"), UNOBSERVABLE], "observe_scope", "gates[1].scope"),
    ):
        with pytest.raises(InvalidSteering) as refused:
            client.default.put(plan)
        assert (refused.value.code, refused.value.param) == (code, param)
    for name in ("", "a b", "a" * 257, "a/b"):
        with pytest.raises(InvalidSteering) as refused:
            client.forget(name)
        assert refused.value.code == "invalid_name"
    with pytest.raises(InvalidSteering) as refused:
        said(client, steering=LASTING)
    assert refused.value.code == "conversation_id_required"
    assert counting.sent == sent
    with pytest.raises(BadRequestError) as answered:
        client.default.put(HAPPY, client_gates="deny")  # type: ignore[arg-type]
    assert (answered.value.code, answered.value.param) == ("unknown_kind", "client_gates")
