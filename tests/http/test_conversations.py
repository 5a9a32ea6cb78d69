"""Conversations over HTTP: what fires in one turn acts in later ones, for the client whose conversation it is."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest

from reference.models import random_direction
from reference.results import Result
from reference.wire import ALWAYS, ALWAYS_IN_ANSWER, EVERYWHERE, Json, add, gate, probe, static
from support.checks import assert_equals, assert_refused, gates_of
from support.server import PROMPT, ROUTES, Answer, Api, Server, request_body

HIDDEN = 64
PROBE = random_direction(3, HIDDEN, [1])
OWN = random_direction(33, HIDDEN, [0, 2], norm=3.0)
OTHER = gate(ALWAYS, "this_token", add(random_direction(61, HIDDEN, [3], norm=5.0)))
ADD = {"kind": "add", "steer": {"kind": "name", "name": "happy"}, "strength": 0.7}
ADD_EARLY = {"kind": "add", "steer": {"kind": "name", "name": "happy", "layers": [1]}, "strength": -0.6}
HALF = {"kind": "attenuate", "keep": 0.25}
REPORT = {"report": "summary"}
SECOND = [254, *(7 + 13 * i % 240 for i in range(20)), 255]
COMBINATIONS = list(itertools.product(ROUTES, (False, True)))
PutDefault = Callable[[Any], Answer]


def lasting(when: Json, apply: Json = ADD) -> Json:
    """A gate of scope rest_of_conversation."""
    return gate(when, "rest_of_conversation", apply)


FIRES, NEVER = probe(PROBE, -1e4, at="answer"), probe(PROBE, 1e4, at="answer")

GATES = {
    "always": lasting(ALWAYS),
    "always-in-answer": lasting(ALWAYS_IN_ANSWER, ADD_EARLY),
    "probe": lasting(FIRES),
    "prompt-end": lasting(probe(PROBE, -1e4, at="prompt_end"), ADD_EARLY),
    "attenuate": lasting(FIRES, HALF),
    "never": lasting(NEVER),
}


# Turns ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("route", "stream"), COMBINATIONS)
@pytest.mark.parametrize("own", GATES.values(), ids=GATES)
def test_three_turns(api: Api, reference: Any, conversation: str, own: Json, route: str, stream: bool) -> None:
    first = {"gates": [own], "vectors": [static(OWN)], **REPORT}
    answer = api.ask(route, stream=stream, steering=first, conversation_id=conversation)
    expected = reference(first)
    assert_equals(answer, expected)
    (told,), (trace,) = gates_of(answer), expected.gates
    assert (told["status"], told["latched"], told["fired"]) == ("ran", trace.latched, len(trace.fired_rows))
    assert trace.latched == (own is not GATES["never"])
    bridged = [own] if trace.latched else []

    # Only static steering, so that an attenuation has something to act on; no gates.
    second = {"vectors": [static(OWN, {"answer": "all"}, scale=-1.5)], **REPORT}
    answer = api.ask(route, SECOND, stream=stream, steering=second, conversation_id=conversation)
    expected = reference(second, SECOND, bridged=bridged)
    assert_equals(answer, expected)
    assert bool(bridged) == (expected.logprobs != reference(second, SECOND).logprobs), "or it tests nothing"
    assert [(told["status"], told["latched"], told["evaluated"], told["fired"]) for told in gates_of(answer)] == [
        ("bridged", True, 0, 0) for _ in bridged
    ]
    for told in gates_of(answer):
        assert (told["scope"], told["first_answer_token"]) == ("rest_of_conversation", "steered")

    third = {"gates": [OTHER, own], "vectors": [static(OWN)], **REPORT}
    answer = api.ask(route, stream=stream, steering=third, conversation_id=conversation)
    assert_equals(answer, reference(third, bridged=bridged))
    told = [(given["status"], given["latched"]) for given in gates_of(answer)]
    assert told == [("ran", False), ("bridged", True) if bridged else ("ran", False)]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_chat_that_goes_on(api: Api, reference: Any, conversation: str, stream: bool) -> None:
    """Its second turn holds the first one's question and answer, so what is cached of them must not be mixed up."""
    words = [f"t{token}" for token in range(5, 45)]
    messages = [{"role": "user", "content": " ".join(words)}]
    first = api.ask("chat", messages=messages, stream=stream, steering=[lasting(FIRES)], conversation_id=conversation)
    prompt = [254, *range(5, 45), 255]
    assert_equals(first, reference([lasting(FIRES)], prompt))
    said = first.text.split()
    messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "t9 t8"}]
    prompt += [*(int(word[1:]) for word in said), 255, 9, 8, 255]
    for name, bridged in ((conversation, [lasting(FIRES)]), (f"{conversation}-other", []), (None, [])):
        answer = api.ask("chat", messages=messages, stream=stream, conversation_id=name)
        assert_equals(answer, reference(None, prompt, bridged=bridged))


@pytest.mark.parametrize(("route", "stream"), COMBINATIONS)
def test_the_conversation_alone_is_enough(
    api: Api, reference: Any, plain: Result, conversation: str, route: str, stream: bool
) -> None:
    """No `steering` bridges; `steering: false` does not, and keeps the latch; forgetting ends it."""
    unsteered = api.ask(route, stream=stream)
    own = lasting(ALWAYS)
    api.ask(route, stream=stream, max_tokens=1, steering=[own], conversation_id=conversation)
    expected = reference(None, bridged=[own])
    assert expected.logprobs != plain.logprobs
    for steering in ({}, {"steering": None}, {"steering": []}):
        answer = api.ask(route, stream=stream, conversation_id=conversation, **steering)
        assert_equals(answer, expected)
        assert answer.report is None
    out = api.ask(route, stream=stream, steering=False, conversation_id=conversation)
    assert (out.tokens, out.logprobs, out.fingerprint) == (unsteered.tokens, unsteered.logprobs, None)
    assert_equals(api.ask(route, stream=stream, conversation_id=conversation), expected)
    assert_equals(api.ask(route, stream=stream, conversation_id=f"{conversation}-other"), plain)
    forgotten = api.forget(conversation)
    assert forgotten.status_code == 200
    assert forgotten.json() == {"status": "forgotten", "conversation_id": conversation}
    after = api.ask(route, stream=stream, conversation_id=conversation)
    assert (after.tokens, after.logprobs) == (unsteered.tokens, unsteered.logprobs)
    assert api.forget(conversation).status_code == 200


def test_what_is_inherited_runs_beside_the_bridge(
    api: Api, reference: Any, conversation: str, put_default: PutDefault
) -> None:
    own = lasting(ALWAYS)
    api.ask("chat", max_tokens=1, steering=[own], conversation_id=conversation)
    put_default({"vectors": [static(OWN, EVERYWHERE)]})
    steering = {"gates": [OTHER], **REPORT}
    answer = api.ask("chat", steering=steering, conversation_id=conversation)
    assert_equals(answer, reference(steering, bridged=[own], default={"vectors": [static(OWN, EVERYWHERE)]}))
    assert [told["status"] for told in gates_of(answer)] == ["ran", "bridged"]


def test_a_bridge_takes_no_lanes(api: Api, reference: Any, conversation: str) -> None:
    """The server has four lanes."""
    declared = [lasting(when, apply) for when in (ALWAYS, FIRES) for apply in (ADD, ADD_EARLY)]
    api.ask("completions", steering=declared, conversation_id=conversation)
    steering = [OTHER] * 4
    answer = api.ask("completions", steering=steering, conversation_id=conversation)
    assert_equals(answer, reference(steering, bridged=declared))


# One answer to go on from -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_conversation_has_one_answer(api: Api, plain: Result, conversation: str, stream: bool) -> None:
    choices = {"n": 2, "temperature": 1, "top_k": 1}
    for steering in ([lasting(ALWAYS)], {"gates": [lasting(FIRES)]}):
        more = {"steering": steering, "conversation_id": conversation, "stream": stream}
        for route in ROUTES:
            assert_refused(api.ask(route, **choices, **more), 400, "conversation_single_choice", "n")
        answer = api.ask("completions", [PROMPT, PROMPT[:9]], **more)
        assert_refused(answer, 400, "conversation_single_choice", "prompt")
    assert_equals(api.ask("completions", conversation_id=conversation), plain)


def test_a_bridged_turn_may_have_several(api: Api, reference: Any, conversation: str) -> None:
    own = lasting(ALWAYS)
    api.ask("completions", max_tokens=1, steering=[own], conversation_id=conversation)
    answer = api.ask("chat", n=2, temperature=1, top_k=1, conversation_id=conversation)
    for index in range(2):
        assert_equals(answer, reference(None, bridged=[own]), index)
    answer = api.ask("completions", [PROMPT, SECOND], conversation_id=conversation)
    for index, prompt in enumerate((PROMPT, SECOND)):
        assert_equals(answer, reference(None, prompt, bridged=[own]), index)


# Refusals ---------------------------------------------------------------------------------------------------------

BAD: dict[str, tuple[Any, Any, str, str]] = {
    "no-id": ([lasting(ALWAYS)], None, "conversation_id_required", "steering[0].scope"),
    "no-id-object": ({"gates": [OTHER, lasting(FIRES)]}, None, "conversation_id_required", "steering.gates[1].scope"),
    "no-id-attenuate": (
        {"vectors": [static(OWN)], "gates": [lasting(ALWAYS, HALF)]},
        None,
        "conversation_id_required",
        "steering.gates[0].scope",
    ),
    "inline": ([lasting(ALWAYS, add(OWN))], "a", "inline_conversation_steer", "steering[0].apply.steer"),
    "unknown": (
        [lasting(ALWAYS, {"kind": "add", "steer": {"kind": "name", "name": "nobody"}})],
        "a",
        "unknown_vector",
        "steering[0].apply.steer.name",
    ),
    "attenuate-nothing": ([lasting(ALWAYS, HALF)], "a", "nothing_to_attenuate", "steering[0].apply"),
    "empty-id": ([lasting(ALWAYS)], "", "invalid_name", "conversation_id"),
    "id-with-space": (None, "a b", "invalid_name", "conversation_id"),
    "id-not-ascii": (None, "ä", "invalid_name", "conversation_id"),
    "long-id": (False, "a" * 257, "invalid_name", "conversation_id"),
    "id-as-number": (None, 7, "invalid_type", "conversation_id"),
}


@pytest.mark.parametrize(("steering", "name", "code", "param"), BAD.values(), ids=BAD)
def test_bad_conversations_are_refused(api: Api, steering: Any, name: Any, code: str, param: str) -> None:
    for route, stream in COMBINATIONS:
        answer = api.ask(route, stream=stream, steering=steering, conversation_id=name)
        assert_refused(answer, 400, code, param)


def test_an_id_may_be_as_long_as_that(api: Api, reference: Any, conversation: str) -> None:
    name = f"{conversation}._:-".ljust(256, "Z")
    api.ask("completions", max_tokens=1, steering=[lasting(ALWAYS)], conversation_id=name)
    assert_equals(api.ask("chat", conversation_id=name), reference(None, bridged=[lasting(ALWAYS)]))
    assert api.forget(name).status_code == 200


@pytest.mark.parametrize("name", ["a%20b", "%C3%A4", "a" * 257])
def test_forgetting_what_can_be_no_conversation(api: Api, name: str) -> None:
    response = api.forget(name)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_name")


# The end of a turn ------------------------------------------------------------------------------------------------


class Stopping(NamedTuple):
    """A prompt and a gate that fires first at a row whose input is token `place` of the answer.

    `after`: text of that token, so that the firing lies beyond the stop; `before`: of the next one, so it counts.
    """

    prompt: list[int]
    own: Json
    place: int
    after: str
    before: str


def stopping_cases(reference: Any) -> Iterator[Stopping]:
    """Prompts whose scores climb, and whose tokens' texts can be told apart."""
    for seed in range(40):
        prompt = [254, *(int(token) for token in np.random.default_rng(seed).integers(5, 250, 12)), 255]
        seen = reference([lasting(probe(PROBE, 1e4))], prompt)
        scores = [row.score for row in seen.gates[0].rows[1:]]
        for place in range(2, 7):
            low = max(scores[:place])
            own = lasting(probe(PROBE, low + 0.5 * (scores[place] - low)))
            if scores[place] < low + 0.1 or not is_new(seen.tokens, place):
                continue
            fired = reference([own], prompt)
            assert fired.gates[0].fired_rows[0] == len(prompt) + place
            if is_new(fired.tokens, place + 1):
                yield Stopping(prompt, own, place, f"t{seen.tokens[place]}", f"t{fired.tokens[place + 1]}")


def is_new(tokens: list[int], place: int) -> bool:
    """Whether a stop at a token's text is a stop at this very token."""
    text = " ".join(f"t{token}" for token in tokens[:place])
    return tokens[place] < 253 and f"t{tokens[place]}" not in text


@pytest.fixture(scope="module")
def stopping(reference: Any) -> list[Stopping]:
    """Two such prompts."""
    return list(itertools.islice(stopping_cases(reference), 2))


def test_a_firing_beyond_a_stop_string_does_not_latch(
    api: Api, reference: Any, stopping: list[Stopping], conversation: str
) -> None:
    """The API server finds stop strings, and the engine may have run on: what the client was not given does not count.

    All at once, so that the API server has its hands full.
    """
    turns = [
        (case, stop, length, route, stream)
        for case in stopping
        for stop, length in ((case.after, case.place + 1), (case.before, case.place + 2))
        for route, stream in COMBINATIONS
    ]
    answers = [reference(with_report(case), case.prompt, length) for case, _, length, _, _ in turns]
    later = [reference(None, bridged=[case.own] if stop == case.before else []) for case, stop, _, _, _ in turns]

    def ask(number: int) -> None:
        case, stop, _, route, stream = turns[number]
        more = {"stream": stream, "conversation_id": f"{conversation}-{number}"}
        answer = api.ask(route, case.prompt, max_tokens=60, stop=[stop], steering=with_report(case), **more)
        assert answer.tokens == answers[number].tokens
        counts = stop == case.before
        (told,) = gates_of(answer)
        assert (told["fired"] > 0, told["latched"]) == (counts, counts)
        assert_equals(api.ask(route, **more), later[number])

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(len(turns))))


def with_report(case: Stopping) -> Json:
    """A case's request."""
    return {"gates": [case.own], **REPORT}


@pytest.mark.parametrize("stop", [None, ["never said"]], ids=["plain", "with-stop"])
def test_a_client_that_goes_away_keeps_what_fired(
    server: Server, api: Api, reference: Any, plain: Result, conversation: str, stop: Any
) -> None:
    body = request_body("completions", stream=True, max_tokens=450, stop=stop, steering=[lasting(FIRES)])
    with Api(server) as leaving:
        content = {**body, "conversation_id": conversation}
        with leaving.http.stream("POST", ROUTES["completions"], json=content) as response:
            assert response.status_code == 200
            lines = (line for line in response.iter_lines() if line)
            for _ in range(3):
                assert next(lines).startswith("data: {")
    expected = reference(None, bridged=[lasting(FIRES)])
    # With a stop string, what counts is known once the server has heard that the client is gone.
    deadline = time.monotonic() + 20
    answer = api.ask("completions", conversation_id=conversation)
    while stop and answer.tokens == plain.tokens and time.monotonic() < deadline:
        time.sleep(0.1)
        answer = api.ask("completions", conversation_id=conversation)
    assert_equals(answer, expected)


def test_turns_at_the_same_time_keep_apart(api: Api, reference: Any, conversation: str) -> None:
    """Conversations by turns with and without a latch, all at once."""
    names = [f"{conversation}-{number}" for number in range(12)]

    def ask(number: int) -> None:
        own = [lasting(FIRES), lasting(ALWAYS, ADD_EARLY), lasting(NEVER)][number % 3]
        route, stream = COMBINATIONS[number % 4]
        first = api.ask(route, stream=stream, steering=[own], conversation_id=names[number])
        assert_equals(first, expected[0][number % 3])
        assert_equals(api.ask(route, SECOND, conversation_id=names[number]), expected[1][number % 3])

    owns = [lasting(FIRES), lasting(ALWAYS, ADD_EARLY), lasting(NEVER)]
    expected = (
        [reference([own]) for own in owns],
        [reference(None, SECOND, bridged=[] if own is owns[2] else [own]) for own in owns],
    )
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(ask, range(len(names))))
