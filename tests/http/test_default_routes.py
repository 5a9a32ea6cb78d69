"""The default's own routes: who may change it, what GET tells, what PUT refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from reference.models import random_direction
from reference.wire import ALWAYS, EVERYWHERE, Json, add, gate, inline, probe, static
from support.checks import assert_equals
from support.server import Answer, Api

HIDDEN = 64
VECTOR = random_direction(51, HIDDEN, [1, 2], norm=4.0)
OTHER = random_direction(52, HIDDEN, [1, 2], norm=4.0)
PROBE = random_direction(53, HIDDEN, [1])
PATH = "/v1/steering/default"
NAMED = {"kind": "name", "name": "happy"}
PutDefault = Callable[[Any], Answer]

FULL: Json = {
    "vectors": [
        static(VECTOR, {"answer": "all"}, scale=1.5, label="inline"),
        {"steer": {**NAMED, "layers": [2]}, "where": EVERYWHERE},
        {
            "steer": {"kind": "payload", "payload": {"kind": "direction", "packed": OTHER}},
            "where": {"generation": "all"},
            "layers": [1],
        },
    ],
    "conflict": "priority",
    "gates": [
        {**gate(probe(PROBE, 0.5, sharpness=0.5), "this_token", add(OTHER, 0.7)), "label": "soft"},
        gate(ALWAYS, "rest_of_conversation", {"kind": "add", "steer": NAMED, "strength": 0.5}),
    ],
    "client_gates": "ignore",
}
"""A default with a source of every kind."""


def told(api: Api) -> Any:
    """The default as GET tells it."""
    return api.http.get(PATH).json()["default"]


def steering_of(default: Json) -> Json:
    """The steering of a default, for a request that is no turn of a conversation."""
    steering = {name: value for name, value in default.items() if name not in ("client_gates", "locked")}
    scopes = {"rest_of_conversation": "rest_of_request"}
    gates = [{**given, "scope": scopes.get(given["scope"], given["scope"])} for given in default.get("gates", ())]
    return {**steering, "gates": gates}


# GET and PUT ------------------------------------------------------------------------------------------------------


def test_there_is_none_at_first(api: Api) -> None:
    assert told(api) is None


def test_what_get_tells_can_be_put(api: Api, reference: Any, key: str, put_default: PutDefault) -> None:
    answered = put_default(FULL).body["default"]
    definition = told(api)
    assert answered == definition
    for secret in ("packed", "payload", '"data"'):
        assert secret not in json.dumps(definition)
    digest = api.register("numbers", "steer", VECTOR, key).body["digest"]
    assert api.unregister("numbers", "steer", key).status == 200
    vector = definition["vectors"][0]
    assert (vector["steer"]["kind"], vector["steer"]["digest"]) == ("digest", digest)
    assert (vector["scale"], vector["label"], vector["where"]) == (1.5, "inline", {"answer": "all"})
    assert (definition["client_gates"], definition["conflict"]) == ("ignore", "priority")
    assert definition["gates"][0]["when"]["probe"]["kind"] == "digest"

    expected = reference(None, default=steering_of(FULL))
    assert_equals(api.ask("completions"), expected)
    fingerprint = api.ask("completions").fingerprint
    for _ in range(2):
        put_default(told(api))
        assert told(api) == definition
        again = api.ask("completions")
        assert_equals(again, expected)
        assert again.fingerprint == fingerprint
    put_default({**definition, "locked": True})
    assert told(api) == {**definition, "locked": True}


@pytest.mark.parametrize("becomes", ["unregistered", "another vector"])
def test_the_default_outlives_its_names(
    api: Api, reference: Any, key: str, put_default: PutDefault, becomes: str
) -> None:
    """Names are resolved when the default is put: what becomes of them changes neither answers nor the round trip."""
    spot = random_direction(54, HIDDEN, [1])
    assert api.register("temporary", "steer", VECTOR, key).status == 200
    assert api.register("temporary", "probe", spot, key).status == 200
    name = {"kind": "name", "name": "temporary"}
    picked = {**name, "layers": [2], "hook": "post_block"}
    soft = {"kind": "probe", "threshold": 0.2, "sharpness": 0.5}
    default = {
        "vectors": [{"steer": picked, "where": EVERYWHERE}],
        "gates": [gate({**soft, "probe": name}, "this_token", {"kind": "add", "steer": name})],
    }
    row = VECTOR["post_block"]
    same = {
        "vectors": [static(VECTOR, layers=[2])],
        "gates": [gate({**soft, "probe": inline(spot)}, "this_token", add({"post_block": row}))],
    }
    expected = reference(None, default=same)
    put_default(default)
    assert_equals(api.ask("completions"), expected)
    for kind in ("steer", "probe"):
        if becomes == "unregistered":
            assert api.unregister("temporary", kind, key).status == 200
        else:
            other = OTHER if kind == "steer" else random_direction(55, HIDDEN, [1])
            assert api.register("temporary", kind, other, key, replace=True).status == 200
    assert_equals(api.ask("completions"), expected)
    put_default(told(api))
    assert_equals(api.ask("completions"), expected)
    if becomes != "unregistered":
        for kind in ("steer", "probe"):
            assert api.unregister("temporary", kind, key).status == 200


def test_the_numbers_go_with_the_default(api: Api, key: str, put_default: PutDefault) -> None:
    put_default({"vectors": [static(OTHER)]})
    definition = told(api)
    api.clear_default(key)
    answer = api.put_default(definition, key)
    assert (answer.status, answer.error["code"]) == (400, "unknown_vector")
    assert answer.error["param"] == "vectors[0].steer.digest"


def test_digests_are_for_the_default_alone(api: Api, put_default: PutDefault) -> None:
    put_default({"vectors": [static(VECTOR)]})
    answer = api.ask("completions", steering={"vectors": told(api)["vectors"]})
    assert (answer.status, answer.error["code"]) == (400, "unknown_kind")
    assert answer.error["param"] == "steering.vectors[0].steer.kind"


def test_clearing(api: Api, key: str, put_default: PutDefault) -> None:
    plain = api.ask("completions")
    put_default({"vectors": [static(VECTOR)]})
    assert api.ask("completions").fingerprint
    for _ in range(2):
        api.clear_default(key)
        assert told(api) is None
        after = api.ask("completions")
        assert (after.logprobs, after.fingerprint) == (plain.logprobs, None)


# Keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("headers", [{}, {"X-Steering-API-Key": "other"}, {"Authorization": "Bearer other"}])
@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_changes_need_the_steering_key(api: Api, put_default: PutDefault, method: str, headers: Json) -> None:
    put_default({"vectors": [static(VECTOR)]})
    before = told(api)
    answer = api.send(PATH, {}, headers, method)
    assert (answer.status, answer.error["code"]) == (401, "unauthorized")
    assert told(api) == before


# Bad bodies -------------------------------------------------------------------------------------------------------


class Case(NamedTuple):
    """A default that must be refused, as JSON values or bytes."""

    code: str
    param: str | None
    body: Any
    status: int = 400


def vector(**changes: Any) -> Json:
    return {"vectors": [{**static(VECTOR), **changes}]}


def gated(*gates: Json) -> Json:
    return {"gates": list(gates)}


OBSERVING = gate(probe(PROBE, 0.5), "this_token", {"kind": "observe"})
GATE = gate(ALWAYS, "this_token", add(VECTOR))
UNKNOWN = {"kind": "name", "name": "nobody"}

CASES = {
    "no-json": Case("invalid_json", None, b"{"),
    "empty": Case("invalid_json", None, b""),
    "twice": Case("invalid_json", "locked", b'{"locked": true, "locked": false}'),
    "null": Case("invalid_type", None, None),
    "false": Case("invalid_type", None, False),
    "list": Case("invalid_type", None, [GATE]),
    "unknown-field": Case("unknown_field", "lockd", {"lockd": True}),
    "conversation": Case("unknown_field", "conversation_id", {"conversation_id": "a"}),
    "client-gates": Case("unknown_kind", "client_gates", {"client_gates": "deny"}),
    "locked": Case("invalid_type", "locked", {"locked": 1}),
    "misspelt": Case("unknown_field", "vectors[0].scael", vector(scael=1)),
    "no-where": Case("missing_field", "vectors[0].where", {"vectors": [{"steer": inline(VECTOR)}]}),
    "empty-where": Case("empty_selection", "vectors[0].where", vector(where={})),
    "unknown-name": Case("unknown_vector", "vectors[0].steer.name", vector(steer=UNKNOWN)),
    "unknown-digest": Case(
        "unknown_vector", "vectors[0].steer.digest", vector(steer={"kind": "digest", "digest": "0" * 64})
    ),
    "no-digest": Case("missing_field", "vectors[0].steer.digest", vector(steer={"kind": "digest"})),
    "width": Case(
        "width_mismatch",
        "vectors[0].steer.packed.post_block.shape[1]",
        vector(steer=inline(random_direction(1, 32, [1]))),
    ),
    "layer": Case("layer_not_in_payload", "vectors[0].layers[0]", vector(layers=[3])),
    "hook": Case(
        "hook_not_steerable",
        "vectors[0].steer.packed.mlp_out",
        vector(steer=inline(random_direction(1, HIDDEN, [1], "mlp_out"))),
    ),
    "algorithm": Case("unknown_algorithm", "vectors[0].algorithm", vector(algorithm="directt")),
    "base64": Case(
        "invalid_base64",
        "vectors[0].steer.packed.post_block.data",
        vector(steer=inline({"post_block": {**VECTOR["post_block"], "data": "!!!!"}})),
    ),
    "too-large": Case(
        "payload_too_large",
        None,
        vector(steer=inline({"post_block": {**VECTOR["post_block"], "data": "A" * 400_000}})),
        status=413,
    ),
    "probe-sites": Case(
        "probe_not_single_site", "gates[0].when.probe", gated(gate(probe(VECTOR, 0), "this_token", {"kind": "observe"}))
    ),
    "observe-scope": Case("observe_scope", "gates[1].scope", gated(GATE, {**OBSERVING, "scope": "next_step"})),
    "unknown-probe": Case(
        "unknown_vector",
        "gates[0].when.probe.name",
        gated({**OBSERVING, "when": {"kind": "probe", "probe": UNKNOWN, "threshold": 0}}),
    ),
    "too-many": Case("too_many_gates", "gates", gated(*[GATE] * 5)),
    "conflict": Case(
        "vector_conflict", "vectors[1]", {"vectors": [static(VECTOR), static(VECTOR)], "conflict": "error"}
    ),
}


@pytest.fixture(scope="module")
def in_force(api: Api, key: str) -> Iterator[Json]:
    """A default that no failing PUT may touch."""
    assert api.put_default({"vectors": [static(VECTOR)], "client_gates": "ignore"}, key).status == 200
    before = api.ask("completions")
    definition: Json = told(api)
    yield definition
    after = api.ask("completions")
    api.clear_default(key)
    assert (after.tokens, after.logprobs, after.fingerprint) == (before.tokens, before.logprobs, before.fingerprint)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_bad_default_is_refused_and_the_old_one_stays(api: Api, key: str, in_force: Json, case: Case) -> None:
    answer = api.put_default(case.body, key)
    assert (answer.status, answer.body.get("error", {}).get("code")) == (case.status, case.code), answer.body
    assert answer.error["param"] == case.param
    assert told(api) == in_force
