"""Whose latch it is: names that move, operators' gates, clients with other API keys."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from reference.models import random_direction
from reference.results import Result
from reference.wire import ALWAYS, Json, add, gate, probe, static
from support.checks import assert_equals, assert_refused, gates_of
from support.server import ROUTES, Answer, Api, Server, request_body

HIDDEN = 64
OWN = random_direction(33, HIDDEN, [0, 2], norm=3.0)
ADD = {"kind": "add", "steer": {"kind": "name", "name": "happy"}, "strength": 0.7}
HALF = {"kind": "attenuate", "keep": 0.25}
FIRES = probe(random_direction(3, HIDDEN, [1]), -1e4, at="answer")
REPORT = {"report": "summary"}
COMBINATIONS = list(itertools.product(ROUTES, (False, True)))
PutDefault = Callable[[Any], Answer]


def lasting(when: Json, apply: Json = ADD) -> Json:
    """A gate of scope rest_of_conversation."""
    return gate(when, "rest_of_conversation", apply)


# Names and operators ----------------------------------------------------------------------------------------------


def test_a_name_that_moves_or_goes_changes_no_latch(api: Api, reference: Any, key: str, conversation: str) -> None:
    before, after = random_direction(62, HIDDEN, [3], norm=8.0), random_direction(63, HIDDEN, [2], norm=8.0)
    moving = {"kind": "add", "steer": {"kind": "name", "name": "moving"}}
    assert api.register("moving", "steer", before, key).status == 200
    api.ask("completions", max_tokens=1, steering=[lasting(ALWAYS, moving)], conversation_id=conversation)
    was, new = lasting(ALWAYS, add(before)), lasting(ALWAYS, add(after))
    bridged = reference(None, bridged=[was])
    assert_equals(api.ask("chat", conversation_id=conversation), bridged)

    assert api.register("moving", "steer", after, key, replace=True).status == 200
    assert_equals(api.ask("chat", conversation_id=conversation), bridged)
    other = f"{conversation}-other"
    api.ask("completions", max_tokens=1, steering=[lasting(ALWAYS, moving)], conversation_id=other)
    assert_equals(api.ask("chat", conversation_id=other), reference(None, bridged=[new]))

    assert api.unregister("moving", "steer", key).status == 200
    assert_equals(api.ask("chat", conversation_id=conversation), bridged)
    steering = [lasting(ALWAYS, moving)]
    answer = api.ask("chat", steering=steering, conversation_id=conversation)
    assert_refused(answer, 400, "unknown_vector", "steering[0].apply.steer.name")


def test_an_operators_lasting_gate(api: Api, reference: Any, conversation: str, put_default: PutDefault) -> None:
    """Without a conversation it lasts for the request, and the report says so; in one it latches."""
    own = lasting(FIRES)
    put_default({"gates": [own]})
    for_this = reference(None, default={"gates": [{**own, "scope": "rest_of_request"}]})
    for route, stream in COMBINATIONS:
        answer = api.ask(route, stream=stream, steering=REPORT)
        assert_equals(answer, for_this)
        (told,) = gates_of(answer)
        assert (told["scope"], told["latched"], told["status"]) == ("rest_of_request", False, "ran")
        name = f"{conversation}-{route}-{stream}"
        answer = api.ask(route, stream=stream, steering=REPORT, conversation_id=name)
        assert_equals(answer, for_this)
        (told,) = gates_of(answer)
        assert (told["scope"], told["latched"], told["status"]) == ("rest_of_conversation", True, "ran")
        answer = api.ask(route, stream=stream, steering=REPORT, conversation_id=name)
        assert_equals(answer, reference(None, bridged=[own]))
        assert [told["status"] for told in gates_of(answer)] == ["bridged"]
    put_default({})
    assert_equals(api.ask("chat", conversation_id=name), reference(None, bridged=[own]))
    assert api.ask("chat", steering=False, conversation_id=name).status == 200


def test_what_a_locked_default_latched_takes_no_opting_out(
    api: Api, key: str, reference: Any, plain: Result, conversation: str, put_default: PutDefault
) -> None:
    put_default({"gates": [lasting(FIRES)], "locked": True})
    api.ask("chat", conversation_id=conversation)
    api.clear_default(key)
    for route, stream in COMBINATIONS:
        answer = api.ask(route, stream=stream, steering=False, conversation_id=conversation)
        assert_refused(answer, 403, "default_locked", "steering")
    assert_equals(api.ask("chat", conversation_id=conversation), reference(None, bridged=[lasting(FIRES)]))
    assert_equals(api.ask("chat", steering=False, conversation_id=f"{conversation}-other"), plain)


# Principals -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(shared: Server) -> Iterator[tuple[Api, Api]]:
    """Clients with two API keys of one server."""
    with (
        Api(shared, {"Authorization": "Bearer key-a"}) as first,
        Api(shared, {"Authorization": "Bearer key-b"}) as second,
    ):
        yield first, second


def test_conversations_of_other_keys_are_apart(
    two: tuple[Api, Api], reference: Any, conversation: str, file_default: Json
) -> None:
    """The default of that server carries a gate of this scope, which latches in any conversation."""
    first, second = two
    default = {name: file_default[name] for name in ("vectors", "gates")}
    steering = {"vectors": [static(OWN)], "gates": [lasting(FIRES, HALF)]}
    first.ask("chat", steering=steering, conversation_id=conversation)
    bridged = reference(
        {"vectors": [static(OWN)]}, default=default, bridged=[*file_default["gates"], lasting(FIRES, HALF)]
    )
    fresh = reference({"vectors": [static(OWN)]}, default=default)
    assert bridged.logprobs != fresh.logprobs
    static_alone = {"vectors": [static(OWN)]}

    def ask(client: Api, **headers: str) -> Answer:
        body = request_body("completions", steering=static_alone, conversation_id=conversation)
        return client.send(ROUTES["completions"], body, headers)

    assert_equals(ask(second), fresh)
    assert second.forget(conversation).status_code == 200
    assert_equals(ask(first), bridged)
    # It is the key that counts, however the header is spelled.
    assert_equals(ask(second, Authorization="bearer key-a"), bridged)
    assert first.forget(conversation).status_code == 200
    assert_equals(ask(first), fresh)
