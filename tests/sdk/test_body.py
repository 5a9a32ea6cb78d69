"""Steering for clients that are not ours, the official one above all."""

from __future__ import annotations

import json

import httpx
import openai
import pytest

from sdk.player import APPLIED, CONTRACT, Played, chat_body
from steergate import InvalidSteering, Steering, SteeringNotAppliedError, When, Where, assert_applied, steering_body
from steergate._generated import models

CALM = When.always().scope("rest_of_conversation").add("calm")
PLAN = Steering().vector([0.5, -1.0], layers=3, where=Where.answer()).gate(CALM)


def test_a_body_is_plain_json():
    body = steering_body(PLAN, conversation_id="c1")
    assert json.loads(json.dumps(body)) == body
    assert body["conversation_id"] == "c1"
    assert body["steering"]["vectors"][0]["steer"]["packed"]["post_block"]["data"] == "AAAAPwAAgL8="


def test_gates_are_sent_as_a_list():
    assert steering_body(CALM, "c1")["steering"] == steering_body([CALM], "c1")["steering"]
    assert isinstance(steering_body((CALM, CALM), "c1")["steering"], list)
    assert steering_body(PLAN.request, "c1") == steering_body(PLAN, "c1")


@pytest.mark.parametrize(
    ("plan", "body"), [(None, {}), (Steering(), {}), ([], {}), (False, {"steering": False})], ids=str
)
def test_nothing_asked_is_nothing_sent(plan, body):
    assert steering_body(plan) == body


def test_keys_that_are_one_member_in_json_are_refused():
    steer = models.NamedVec(name="calm")
    spec = models.VectorSpec(steer=steer, where=models.Where(answer="all"), algorithm="own", params={1: 2, "1": 3})
    with pytest.raises(InvalidSteering, match="twice") as refused:
        steering_body(models.SteeringRequest(vectors=[spec]))
    assert (refused.value.code, refused.value.param) == ("invalid_json", 'steering.vectors[0].params["1"]')


def test_what_is_no_plan_is_a_type_error():
    with pytest.raises(TypeError, match="str is no steering"):
        steering_body("calm")


def test_the_official_client_carries_it(server):
    server.play(Played(body=chat_body(steering_report={"fingerprint": "5f1d"}), headers=APPLIED))
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="x") as client:
        raw = client.chat.completions.with_raw_response.create(
            model="demo",
            messages=[{"role": "user", "content": "Hello"}],
            extra_body=steering_body(PLAN, conversation_id="c1"),
        )
        assert assert_applied(raw) == "5f1d"
        assert server.requests[0].json["steering"] == steering_body(PLAN, "c1")["steering"]
        assert server.requests[0].json["conversation_id"] == "c1"
        parsed = raw.parse()
        assert parsed.model_extra["steering_report"] == {"fingerprint": "5f1d"}
        with pytest.raises(TypeError, match="with_raw_response"):
            assert_applied(parsed)


def test_applied_is_read_from_whatever_has_headers(server):
    server.play(Played(body=chat_body(), headers=APPLIED), Played(body=chat_body(), headers=CONTRACT))
    assert assert_applied(httpx.get(server.url)) == "5f1d"
    with pytest.raises(SteeringNotAppliedError):
        assert_applied(httpx.get(server.url))
    assert assert_applied({"X-STEERING-APPLIED": "a"}) == "a"
    with pytest.raises(SteeringNotAppliedError, match="did not apply it"):
        assert_applied({})
