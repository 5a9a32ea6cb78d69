"""Who may do what: the server key guards every steering route, the steering key guards changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from reference.models import random_direction
from reference.wire import ALWAYS, EVERYWHERE, Json, add, gate, static
from support.server import ROUTES, Api, Server, request_body

VECTOR = random_direction(21, 64, [1], norm=4.0)
REGISTER = "/v1/steering/vectors/register"
UNREGISTER = "/v1/steering/vectors/unregister"
BODY: Json = {"name": "guarded", "kind": "steer", "packed": VECTOR}
SERVER_KEY = {"Authorization": "Bearer server-key"}

# A server without --api-key ---------------------------------------------------------------------------------------

WRONG: dict[str, dict[str, str]] = {
    "none": {},
    "wrong": {"X-Steering-API-Key": "other"},
    "empty": {"X-Steering-API-Key": ""},
    "prefix": {"X-Steering-API-Key": "steering-ke"},
    "not-ascii": {"X-Steering-API-Key": "schlüssel"},
    "wrong-bearer": {"Authorization": "Bearer other"},
    "other-scheme": {"Authorization": "Basic steering-key"},
    "bearer-without-key": {"Authorization": "Bearer"},
    "wrong-beside-right-bearer": {"X-Steering-API-Key": "other", "Authorization": "Bearer steering-key"},
}


@pytest.mark.parametrize("path", [REGISTER, UNREGISTER])
@pytest.mark.parametrize("headers", WRONG.values(), ids=WRONG)
def test_changes_need_the_steering_key(api: Api, path: str, headers: dict[str, str]) -> None:
    response = api.http.post(path, json=BODY, headers={k: v.encode() for k, v in headers.items()})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["type"]) == (401, "unauthorized", "authentication_error")
    assert error["param"] is None
    assert "steering-key" not in error["message"].replace("steering key", "")
    assert api.http.get("/v1/steering/vectors/steer/guarded").status_code == 404


RIGHT = {
    "header": {"X-Steering-API-Key": "steering-key"},
    "bearer": {"Authorization": "Bearer steering-key"},
    "bearer-in-lower-case": {"authorization": "bearer steering-key"},
}


@pytest.mark.parametrize("headers", RIGHT.values(), ids=RIGHT)
def test_changes_with_the_steering_key(api: Api, headers: dict[str, str]) -> None:
    assert api.send(REGISTER, BODY, headers).body["status"] == "created"
    assert api.send(UNREGISTER, {"name": "guarded", "kind": "steer"}, headers).body["status"] == "unregistered"


def test_reading_needs_no_key_there(api: Api) -> None:
    for path in ("capabilities", "vectors", "vectors/steer/happy"):
        assert api.http.get(f"/v1/steering/{path}").status_code == 200


# A server with --api-key ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked_out(keyed: Server) -> Iterator[Api]:
    """A client without the server key."""
    with Api(keyed) as client:
        yield client


@pytest.fixture(scope="module")
def let_in(keyed: Server) -> Iterator[Api]:
    """A client with the server key."""
    with Api(keyed, SERVER_KEY) as client:
        yield client


@pytest.mark.parametrize("headers", [{}, {"X-Steering-API-Key": "new-key"}, {"Authorization": "Bearer new-key"}])
def test_every_steering_route_needs_the_server_key(locked_out: Api, headers: dict[str, str]) -> None:
    paths = locked_out.http.get("/openapi.json").json()["paths"]
    ours = [(path, method) for path, methods in paths.items() for method in methods if path.startswith("/v1/steering")]
    assert len(ours) >= 11
    for path, method in ours:
        filled = path.format(kind="steer", name="guarded", id="guarded")
        response = locked_out.http.request(method, filled, headers=headers, json=BODY if method == "post" else None)
        assert response.status_code == 401, (method, path)
        assert "x-steering-applied" not in response.headers


@pytest.mark.parametrize("route", ROUTES)
def test_bad_steering_tells_nothing_without_the_server_key(locked_out: Api, route: str) -> None:
    for steering in ({"vectors": 1}, {"vectors": [static(VECTOR)]}):
        answer = locked_out.ask(route, steering=steering)
        assert answer.status == 401
        assert answer.fingerprint is None


def test_an_answer_without_the_server_key_names_the_contract_too(locked_out: Api) -> None:
    assert locked_out.http.get("/v1/steering/capabilities").headers["x-steering-contract"] == "1.0"


def test_the_server_key_is_no_steering_key(let_in: Api) -> None:
    assert let_in.http.get("/v1/steering/capabilities").status_code == 200
    for headers in ({}, {"X-Steering-API-Key": "server-key"}):
        answer = let_in.send(REGISTER, BODY, headers)
        assert (answer.status, answer.error["code"]) == (401, "unauthorized")


@pytest.mark.parametrize("steering_key", ["old-key", "new-key"])
def test_both_keys_of_a_rotation_work(let_in: Api, steering_key: str) -> None:
    assert let_in.register("guarded", "steer", VECTOR, steering_key).body["status"] == "created"
    steering = {"vectors": [{"steer": {"kind": "name", "name": "guarded"}, "where": EVERYWHERE}]}
    assert let_in.ask("completions", max_tokens=2, steering=steering).fingerprint
    assert let_in.unregister("guarded", "steer", steering_key).status == 200


# A server without a steering key, without gates, for registered vectors only --------------------------------------


@pytest.fixture(scope="module")
def narrow(restricted: Server) -> Iterator[Api]:
    with Api(restricted) as client:
        yield client


@pytest.mark.parametrize("path", [REGISTER, UNREGISTER])
def test_without_a_steering_key_nothing_changes(narrow: Api, path: str) -> None:
    headers: list[dict[str, str]] = [{}, {"X-Steering-API-Key": ""}, {"X-Steering-API-Key": "any"}]
    for given in [*headers, {"Authorization": "Bearer any"}]:
        answer = narrow.send(path, BODY, given)
        assert (answer.status, answer.error["code"]) == (403, "steering_key_required")
        assert answer.error["type"] == "permission_error"
    assert narrow.http.get("/v1/steering/vectors").json() == []


@pytest.mark.parametrize(("method", "path"), [("PUT", "default"), ("DELETE", "default"), ("GET", "status")])
def test_without_a_steering_key_there_is_no_default(narrow: Api, method: str, path: str) -> None:
    for given in ({}, {"X-Steering-API-Key": "any"}, {"Authorization": "Bearer any"}):
        answer = narrow.send(f"/v1/steering/{path}", {}, given, method)
        assert (answer.status, answer.error["code"]) == (403, "steering_key_required")
    assert narrow.http.get("/v1/steering/default").json() == {"default": None}


@pytest.mark.parametrize("route", ROUTES)
def test_what_the_operator_switched_off_is_refused(narrow: Api, route: str) -> None:
    inline = narrow.ask(route, steering={"vectors": [static(VECTOR)]})
    assert (inline.status, inline.error["code"]) == (403, "inline_not_allowed")
    assert inline.error["param"] == "steering.vectors[0].steer"
    gated = narrow.ask(route, steering=[gate(ALWAYS, "this_token", add(VECTOR))])
    assert (gated.status, gated.error["code"], gated.error["param"]) == (400, "gates_unavailable", "steering")
    named = narrow.ask(route, steering={"vectors": [{"steer": {"kind": "name", "name": "a"}, "where": EVERYWHERE}]})
    assert (named.status, named.error["code"]) == (400, "unknown_vector")
    assert narrow.send(ROUTES[route], request_body(route)).status == 200


def test_capabilities_tell_what_is_off(narrow: Api, api: Api) -> None:
    restricted = narrow.http.get("/v1/steering/capabilities").json()
    assert (restricted["gates"], restricted["sources"], restricted["limits"]["gates"]) == (False, ["name"], 0)
    assert [hook["hook"] for hook in restricted["hooks"]] == ["post_block"]
    full = api.http.get("/v1/steering/capabilities").json()
    assert (full["gates"], full["sources"], full["limits"]["gates"]) == (True, ["name", "inline"], 4)
    assert full["limits"]["inline_bytes"] == 65536
    assert (full["model"], full["layers"], full["hidden_width"]) == ("tiny", 4, 64)
    assert [hook["hook"] for hook in full["hooks"]] == ["pre_attn", "post_block"]
