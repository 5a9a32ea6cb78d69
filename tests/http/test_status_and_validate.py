"""What the server tells of itself, and validation of a plan without running it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from reference.models import random_direction
from reference.wire import ALWAYS, EVERYWHERE, Json, add, gate, inline, probe, static
from support.server import ROUTES, Answer, Api, Server, request_body

HIDDEN = 64
VECTOR = random_direction(71, HIDDEN, [1, 2])
PROBE = random_direction(3, HIDDEN, [1])
ADD_NAMED = {"kind": "add", "steer": {"kind": "name", "name": "happy"}}
LASTING = gate(ALWAYS, "rest_of_conversation", ADD_NAMED)
FIRES = gate(probe(PROBE, -1e4, at="answer"), "next_step", add(VECTOR))
OBSERVING = gate(probe(PROBE, 0.5), "this_token", {"kind": "observe"})
PutDefault = Callable[[Any], Answer]

METRICS = (
    "steergate_requests_total",
    "steergate_rejections_total",
    "steergate_gate_firings_total",
    "steergate_admission_seconds_count",
    "steergate_pool_used_bytes",
    "steergate_latches",
)


def scrape(api: Api) -> dict[str, float]:
    """Our metrics by name and labels, as they are written."""
    samples = [line.rsplit(" ", 1) for line in api.http.get("/metrics").text.splitlines() if line[:1] != "#"]
    return {name: float(value) for name, value in samples if name.startswith("steergate_")}


def moved(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """The counters that changed, and by how much."""
    names = [name for name in after if "_total" in name or name.endswith("seconds_count")]
    return {name: after[name] - before.get(name, 0) for name in names if after[name] != before.get(name, 0)}


def eventually(read: Callable[[], Any], wanted: Any) -> Any:
    """What was read last: the wanted value, or another one after twenty seconds."""
    deadline = time.monotonic() + 20
    found = read()
    while found != wanted and time.monotonic() < deadline:
        time.sleep(0.05)
        found = read()
    return found


# Status -----------------------------------------------------------------------------------------------------------


def test_status_needs_the_steering_key(api: Api) -> None:
    for headers in ({}, {"X-Steering-API-Key": "other"}):
        response = api.http.get("/v1/steering/status", headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (401, "unauthorized")


def test_status_of_a_server_that_rests(api: Api, key: str, shared: Server) -> None:
    assert eventually(lambda: api.status(key)["live_requests"], 0) == 0
    status = api.status(key)
    assert status["gates_installed"] == 0
    assert 0 <= status["pool_used"] <= status["pool_capacity"]
    assert status["pool_capacity"] > 0
    assert status["one_principal"] is True
    capabilities = api.http.get("/v1/steering/capabilities").json()
    (worker,) = status["workers"]
    assert worker == {
        "rank": 0,
        "graph_mode": capabilities["graph_mode"],
        "pool_used": status["pool_used"],
        "pool_capacity": status["pool_capacity"],
    }
    with Api(shared, {"Authorization": "Bearer key-b"}) as client:
        assert client.status(key)["one_principal"] is False


def test_status_while_requests_run_and_after(api: Api, key: str) -> None:
    """Three requests with two gates each, and one without steering, which does not count."""
    steering = {"vectors": [static(VECTOR)], "gates": [FIRES, OBSERVING]}
    body = request_body("completions", max_tokens=480, steering=steering)
    seen: list[Json] = []
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):  # requests that are over before status is asked tell nothing
            sent = (body, body, body, {**body, "steering": False})
            running = [pool.submit(api.send, ROUTES["completions"], one) for one in sent]
            while not all(request.done() for request in running):
                seen.append(api.status(key))
            names = [request.result().body["id"] for request in running]
            fullest = max(seen, key=lambda status: status["live_requests"])
            if fullest["live_requests"] == 3:
                break
    assert (fullest["live_requests"], fullest["gates_installed"]) == (3, 6)
    told = json.dumps(seen) + api.http.get("/metrics").text
    assert not [name for name in names if name.removeprefix("cmpl-") in told], "requests are counted, not named"
    assert 0 < fullest["pool_used"] <= fullest["pool_capacity"]
    assert eventually(lambda: api.status(key)["live_requests"], 0) == 0
    assert api.status(key)["gates_installed"] == 0


def test_latches_are_counted_by_conversation(api: Api, key: str, conversation: str) -> None:
    before = api.status(key)["latches"]
    names = [conversation, f"{conversation}-other"]
    for name in (*names, names[0]):
        api.ask("completions", max_tokens=2, steering=[LASTING], conversation_id=name)
    assert eventually(lambda: api.status(key)["latches"], before + 2) == before + 2
    assert scrape(api)["steergate_latches"] == before + 2
    for number, name in enumerate(names):
        api.forget(name)
        left = before + 1 - number
        assert eventually(lambda: api.status(key)["latches"], left) == left, "no other request may be needed for it"
    assert scrape(api)["steergate_latches"] == before


# Metrics ----------------------------------------------------------------------------------------------------------


def test_every_metric_is_there(api: Api) -> None:
    api.ask("completions", max_tokens=2, steering={"vectors": [static(VECTOR)]})
    api.ask("completions", steering={"vectors": 1})
    text = api.http.get("/metrics").text
    for name in METRICS:
        assert any(line.startswith((f"{name} ", f"{name}{{")) for line in text.splitlines()), name


KINDS: dict[str, tuple[Json, dict[str, float]]] = {
    "unsteered": ({}, {}),
    "static": (
        {"steering": {"vectors": [static(VECTOR)]}},
        {'steergate_requests_total{kind="static"}': 1, "steergate_admission_seconds_count": 1},
    ),
    "gates": (
        {"steering": [FIRES]},
        {
            'steergate_requests_total{kind="gates"}': 1,
            "steergate_gate_firings_total": 12,
            "steergate_admission_seconds_count": 1,
        },
    ),
    "both": (
        {"steering": {"vectors": [static(VECTOR)], "gates": [FIRES, OBSERVING], "report": "summary"}},
        {'steergate_requests_total{kind="both"}': 1, "steergate_admission_seconds_count": 1},
    ),
    "conversation": (
        {"conversation_id": "metrics"},
        {'steergate_requests_total{kind="conversation"}': 1, "steergate_admission_seconds_count": 1},
    ),
    "refused": (
        {"steering": {"vectors": [{**static(VECTOR), "algorithm": "directt"}]}},
        {'steergate_rejections_total{code="unknown_algorithm"}': 1, "steergate_admission_seconds_count": 1},
    ),
    "refused-by-its-prompt": (
        {"steering": {"vectors": [static(VECTOR, {"prompt_positions": [400]})]}},
        {'steergate_rejections_total{code="selects_nothing"}': 1},
    ),
}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("members", "counted"), KINDS.values(), ids=KINDS)
def test_counters_move(api: Api, key: str, members: Json, counted: dict[str, float], stream: bool) -> None:
    """Twelve answer tokens are twelve answer rows, the prompt's end among them."""
    before = scrape(api)
    answer = api.ask("completions", stream=stream, **members)
    difference = moved(before, scrape(api))
    for name, value in counted.items():
        assert difference.get(name) == value, difference
    if answer.report is not None:
        fired = sum(given["fired"] for given in answer.report["choices"][0]["gates"])
        assert difference["steergate_gate_firings_total"] == fired >= 12
    kinds = {"steergate_requests_total", "steergate_rejections_total"}
    other = {name for name in difference if name.partition("{")[0] in kinds} - set(counted)
    if answer.status == 200:
        assert not other, "one request is counted once"
    counters = api.status(key)["counters"]
    scraped = scrape(api)
    for name, value in counters.items():
        assert scraped[name] == value
    assert set(counted) - {"steergate_admission_seconds_count"} <= set(counters)


# Validation -------------------------------------------------------------------------------------------------------


def validate(api: Api, plan: Any) -> Json:
    answer = api.send("/v1/steering/validate", plan)
    assert answer.status == 200, answer.body
    assert set(answer.body) == {"valid", "errors"}
    assert answer.body["valid"] == (not answer.body["errors"])
    for error in answer.body["errors"]:
        assert set(error) == {"message", "type", "param", "code"}
    body: Json = answer.body
    return body


VALID: dict[str, Any] = {
    "null": None,
    "false": False,
    "empty-object": {},
    "empty-list": [],
    "vectors": {"vectors": [static(VECTOR)], "report": "summary"},
    "name": {"vectors": [{"steer": {"kind": "name", "name": "happy"}, "where": EVERYWHERE}]},
    "gates": [FIRES, OBSERVING],
    "conversation": [LASTING],
}


@pytest.mark.parametrize("plan", VALID.values(), ids=VALID)
def test_what_would_be_admitted_is_valid(server: Server, api: Api, plan: Any) -> None:
    counted = api.metric("vllm:prompt_tokens_total")
    stored = {path.name for path in server.spool().iterdir()}
    assert validate(api, plan) == {"valid": True, "errors": []}
    assert {path.name for path in server.spool().iterdir()} == stored, "nothing is kept"
    assert api.metric("vllm:prompt_tokens_total") == counted, "nothing runs"


def name(of: str) -> Json:
    return {"kind": "name", "name": of}


def probing(source: Json, **more: Any) -> Json:
    when = {"kind": "probe", "probe": source, "threshold": 0}
    return {**gate(when, "this_token", {"kind": "observe"}), **more}


UNKNOWN = {"steer": name("nobody"), "where": EVERYWHERE}
WIDE = static(random_direction(1, 32, [1]))
ROWS = "steer.packed.post_block"

SEVERAL: dict[str, tuple[Any, set[tuple[str, str]]]] = {
    "vectors": (
        {"vectors": [UNKNOWN, static(VECTOR), WIDE, {**static(VECTOR), "algorithm": "directt"}]},
        {
            ("unknown_vector", "vectors[0].steer.name"),
            ("width_mismatch", f"vectors[2].{ROWS}.shape[1]"),
            ("unknown_algorithm", "vectors[3].algorithm"),
        },
    ),
    "rules-and-model": (
        {
            "vectors": [UNKNOWN, static(VECTOR, {})],
            "gates": [{**OBSERVING, "scope": "next_step"}, FIRES, probing(name("nobody"))],
        },
        {
            ("unknown_vector", "vectors[0].steer.name"),
            ("empty_selection", "vectors[1].where"),
            ("observe_scope", "gates[0].scope"),
            ("unknown_vector", "gates[2].when.probe.name"),
        },
    ),
    "list": (
        [
            gate(ALWAYS, "rest_of_conversation", add(VECTOR)),
            gate(ALWAYS, "this_token", {"kind": "add", "steer": name("nobody")}),
        ],
        {("inline_conversation_steer", "[0].apply.steer"), ("unknown_vector", "[1].apply.steer.name")},
    ),
    "one-gate": (
        {
            "gates": [
                gate(
                    {"kind": "probe", "probe": name("nobody"), "threshold": 0},
                    "next_step",
                    {"kind": "add", "steer": name("none")},
                )
            ]
        },
        {("unknown_vector", "gates[0].when.probe.name"), ("unknown_vector", "gates[0].apply.steer.name")},
    ),
    "too-many-and-unknown": (
        {"gates": [FIRES, FIRES, FIRES, FIRES, probing(name("nobody"))]},
        {("too_many_gates", "gates"), ("unknown_vector", "gates[4].when.probe.name")},
    ),
    "nothing-to-attenuate-and-unknown": (
        {"gates": [gate(ALWAYS, "this_token", {"kind": "attenuate", "keep": 0.5}), probing(name("nobody"))]},
        {("nothing_to_attenuate", "gates[0].apply"), ("unknown_vector", "gates[1].when.probe.name")},
    ),
    "two-attenuate-nothing": (
        {"gates": [gate(ALWAYS, "this_token", {"kind": "attenuate", "keep": keep}) for keep in (0.5, 0.25)]},
        {("nothing_to_attenuate", "gates[0].apply"), ("nothing_to_attenuate", "gates[1].apply")},
    ),
}


@pytest.mark.parametrize(("plan", "wanted"), SEVERAL.values(), ids=SEVERAL)
def test_all_errors_are_listed(api: Api, plan: Any, wanted: set[tuple[str, str]]) -> None:
    errors = validate(api, plan)["errors"]
    assert {(error["code"], error["param"]) for error in errors} == wanted
    assert len(errors) == len(wanted)
    assert_first_agrees(api, plan, errors, {})


SINGLE: dict[str, tuple[Any, str, str | None]] = {
    "true": (True, "invalid_type", None),
    "text": ("[]", "invalid_type", None),
    "unknown-field": ({"vectors": [{**static(VECTOR), "scael": 1}]}, "unknown_field", "vectors[0].scael"),
    "unknown-field-in-list": ([{**FIRES, "scop": 1}], "unknown_field", "[0].scop"),
    "missing": ({"vectors": [{"steer": inline(VECTOR)}]}, "missing_field", "vectors[0].where"),
    "default-s-member": ({"client_gates": "allow"}, "unknown_field", "client_gates"),
    "digest": (
        {"vectors": [{"steer": {"kind": "digest", "digest": "0" * 64}, "where": EVERYWHERE}]},
        "unknown_kind",
        "vectors[0].steer.kind",
    ),
    "too-many-in-list": ([FIRES] * 5, "too_many_gates", None),
    "conflict": (
        {"vectors": [static(VECTOR), static(VECTOR)], "conflict": "error"},
        "vector_conflict",
        "vectors[1]",
    ),
}


@pytest.mark.parametrize(("plan", "code", "param"), SINGLE.values(), ids=SINGLE)
def test_one_error(api: Api, plan: Any, code: str, param: str | None) -> None:
    (error,) = validate(api, plan)["errors"]
    assert (error["code"], error["param"] or None) == (code, param)
    assert_first_agrees(api, plan, [error], {})


def assert_first_agrees(api: Api, plan: Any, errors: list[Json], more: Json) -> None:
    """What the generate route says is the first of these, with `steering` in front."""
    answer = api.ask("completions", steering=plan, **more)
    first = errors[0]
    inner = first["param"] or ""
    param = f"steering{inner}" if inner.startswith("[") or not inner else f"steering.{inner}"
    assert (answer.error["code"], answer.error["param"]) == (first["code"], param)
    assert (answer.error["type"], answer.error["message"]) == (first["type"], first["message"])


def test_what_is_no_json_is_one_error(api: Api) -> None:
    answer = api.send("/v1/steering/validate", b"{")
    assert [error["code"] for error in answer.body["errors"]] == ["invalid_json"]


def test_validation_knows_the_default(api: Api, put_default: PutDefault) -> None:
    put_default({"vectors": [static(VECTOR)], "gates": [FIRES], "locked": True})
    cases: list[tuple[Any, str, str | None]] = [
        (False, "default_locked", None),
        ({"inherit_default": False}, "default_locked", "inherit_default"),
        ({"gates": [OBSERVING]}, "gates_overridden", "gates"),
        ([OBSERVING], "gates_overridden", None),
    ]
    for plan, code, param in cases:
        (error,) = validate(api, plan)["errors"]
        assert (error["code"], error["param"] or None) == (code, param)
        assert_first_agrees(api, plan, [error], {})
    assert validate(api, {"vectors": [static(VECTOR)]})["valid"]
    two = validate(api, {"gates": [OBSERVING], "vectors": [UNKNOWN]})["errors"]
    assert {error["code"] for error in two} == {"gates_overridden", "unknown_vector"}
    put_default({"gates": [FIRES] * 3, "client_gates": "allow"})
    assert validate(api, [OBSERVING])["valid"]
    (error,) = validate(api, [OBSERVING] * 2)["errors"]
    assert error["code"] == "too_many_gates"


def test_validation_needs_the_server_key_alone(shared: Server) -> None:
    with Api(shared) as nobody:
        assert nobody.send("/v1/steering/validate", {}).status == 401
    with Api(shared, {"Authorization": "Bearer key-a"}) as client:
        assert validate(client, {"vectors": [static(VECTOR)]})["valid"]
