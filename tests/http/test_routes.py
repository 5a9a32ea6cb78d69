"""Every route that takes a body either carries steering, is ours, or refuses it."""

from __future__ import annotations

from typing import Any

import pytest

from reference.models import random_direction
from reference.wire import ALWAYS, add, gate, static
from support.server import EVERY_ROUTE, Api, request_body

VECTOR = random_direction(1, 64, [1])

MEMBERS: dict[str, tuple[dict[str, Any], str]] = {
    "object": ({"steering": {"vectors": [static(VECTOR)]}}, "steering_not_supported_here"),
    "list": ({"steering": [gate(ALWAYS, "this_token", add(VECTOR))]}, "steering_not_supported_here"),
    "malformed": ({"steering": 1}, "steering_not_supported_here"),
    "conversation": ({"conversation_id": "a"}, "steering_not_supported_here"),
    "misspelt": ({"steerings": []}, "unknown_field"),
    "reserved": ({"vllm_xargs": {"steergate": "x"}}, "reserved_field"),
}

KNOWN = ("/tokenize", "/generative_scoring", "/v1/systemone", "/v1/messages/count_tokens")
"""Routes that this test must meet, or it looks at the wrong list."""


@pytest.fixture(scope="module")
def other_routes(api: Api) -> list[str]:
    """The POST routes that neither carry steering nor are ours."""
    paths = api.http.get("/openapi.json").json()["paths"]
    posts = [path for path, methods in paths.items() if "post" in methods]
    assert set(EVERY_ROUTE.values()) <= set(posts)
    others = [path for path in posts if path not in EVERY_ROUTE.values() and not path.startswith("/v1/steering/")]
    assert set(KNOWN) <= set(others)
    return others


def test_bodies_are_posted(api: Api) -> None:
    """The middleware looks at POST alone; a route that generates by another method would be left open."""
    paths = api.http.get("/openapi.json").json()["paths"]
    others = [
        (method, path)
        for path, methods in paths.items()
        for method, route in methods.items()
        if method != "post" and "requestBody" in route and not path.startswith("/v1/steering/")
    ]
    assert others == []


@pytest.mark.parametrize(("members", "code"), MEMBERS.values(), ids=MEMBERS)
def test_other_routes_refuse_steering(api: Api, other_routes: list[str], members: dict[str, Any], code: str) -> None:
    counted = api.metric("vllm:generation_tokens_total")
    for route in ("completions", "chat"):
        body = {**request_body(route), **members}
        for path in other_routes:
            answer = api.send(path.replace("{response_id}", "resp_1"), body)
            assert (answer.status, answer.body.get("error", {}).get("code")) == (400, code), (path, answer.body)
            assert answer.fingerprint is None
            assert answer.headers["x-steering-contract"] == "1.0"
    assert api.metric("vllm:generation_tokens_total") == counted


def test_the_refusal_names_the_member_that_was_sent(api: Api) -> None:
    answer = api.send("/tokenize", {"model": "tiny", "prompt": "t5", "conversation_id": "a"})
    assert answer.error["param"] == "conversation_id"


def test_other_routes_work_without_steering(api: Api) -> None:
    assert api.send("/tokenize", {"model": "tiny", "prompt": "t5 t6"}).body["tokens"] == [5, 6]


def test_a_form_with_steering_is_refused(api: Api) -> None:
    response = api.http.post("/v1/audio/transcriptions", files={"file": b"x"}, data={"steering": "[]"})
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "steering_not_supported_here"
