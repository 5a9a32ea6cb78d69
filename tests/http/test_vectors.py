"""The registry's routes: what registering answers, what it refuses, and that running requests keep their numbers."""

from __future__ import annotations

import base64
import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest

from reference.models import pack, random_direction
from reference.wire import EVERYWHERE, Json, static
from support.server import PROMPT, ROUTES, Api, request_body

HIDDEN = 64
VECTOR = random_direction(11, HIDDEN, [1, 2], norm=4.0)
OTHER = random_direction(12, HIDDEN, [1, 2], norm=4.0)
PROBE = random_direction(13, HIDDEN, [1])
ROW = VECTOR["post_block"]
BODY: Json = {"name": "never", "kind": "steer", "packed": VECTOR}
REGISTER = "/v1/steering/vectors/register"
UNREGISTER = "/v1/steering/vectors/unregister"


def rows(hook: str = "post_block", **changes: Any) -> Json:
    return {"packed": {hook: {**ROW, **changes}}}


def without(member: str) -> Json:
    return {member: ...}


def number_bytes(value: float) -> str:
    return base64.b64encode(np.full((2, HIDDEN), value, dtype="<f4").tobytes()).decode()


class Case(NamedTuple):
    """A register body that must be refused: `BODY` with `changes`; `...` takes a member out; or the `raw` bytes."""

    name: str
    code: str
    param: str | None
    changes: Json | None = None
    raw: bytes | None = None
    status: int = 400


ROWS = "packed.post_block"
TENSOR = {"dtype": "float32", "shape": [1, 1], "data": "AAAAAA=="}

CASES = [
    Case("no-json", "invalid_json", None, raw=b"{"),
    Case("empty", "invalid_json", None, raw=b""),
    Case("list", "invalid_type", None, raw=b"[]"),
    Case("member-twice", "invalid_json", "name", raw=json.dumps(BODY).encode()[:-1] + b', "name": "other"}'),
    Case("unknown-field", "unknown_field", "nmae", {"nmae": "a"}),
    Case("digest", "unknown_field", "digest", {"digest": "0" * 64}),
    Case("no-name", "missing_field", "name", without("name")),
    Case("no-kind", "missing_field", "kind", without("kind")),
    Case("wrong-kind", "unknown_kind", "kind", {"kind": "both"}),
    Case("bad-name", "invalid_name", "name", {"name": "../../etc"}),
    Case("name-too-long", "invalid_name", "name", {"name": "a" * 129}),
    Case("no-numbers", "missing_field", "packed", without("packed")),
    Case("both-numbers", "missing_field", "packed", {"payload": {"kind": "direction", "packed": VECTOR}}),
    Case("no-hooks", "out_of_range", "packed", {"packed": {}}),
    Case("replace-as-text", "invalid_type", "replace", {"replace": "yes"}),
    Case("metadata-as-text", "invalid_type", "metadata", {"metadata": "mine"}),
    Case("metadata-too-large", "invalid_metadata", "metadata", {"metadata": {"note": "a" * 20_000}}),
    Case("misspelt-in-rows", "unknown_field", f"{ROWS}.layers", rows(layers=[1])),
    Case("wrong-width", "width_mismatch", f"{ROWS}.shape[1]", {"packed": random_direction(1, 32, [1])}),
    Case("layer-out-of-range", "unknown_layer", f"{ROWS}.layer_indices[1]", rows(layer_indices=[1, 4])),
    Case("negative-layer", "out_of_range", f"{ROWS}.layer_indices[0]", rows(layer_indices=[-1, 1])),
    Case("unknown-hook", "unknown_hook", "packed.mlp_middle", rows("mlp_middle")),
    Case("hook-not-declared", "hook_not_steerable", "packed.mlp_out", rows("mlp_out")),
    Case("nan-literal", "not_finite", f"{ROWS}.scales[0]", rows(scales=[float("nan"), 1.0])),
    Case("nan-bytes", "not_finite", f"{ROWS}.data", rows(data=number_bytes(float("nan")))),
    Case("overflowing-scale", "not_finite", f"{ROWS}.data", rows(data=number_bytes(1e30), scales=[1e30, 1])),
    Case("bad-base64", "invalid_base64", f"{ROWS}.data", rows(data="AAA")),
    Case("too-few-bytes", "shape_mismatch", f"{ROWS}.data", rows(data=ROW["data"][:-8])),
    Case("layers-for-other-rows", "shape_mismatch", f"{ROWS}.layer_indices", rows(layer_indices=[1])),
    Case("scales-for-other-rows", "shape_mismatch", f"{ROWS}.scales", rows(scales=[1.0])),
    Case("duplicate-layer", "duplicate_layer", f"{ROWS}.layer_indices[1]", rows(layer_indices=[1, 1])),
    Case("too-large", "payload_too_large", None, rows(data="A" * 200_000), status=413),
    Case("probe-of-two-sites", "probe_not_single_site", "packed", {"kind": "probe"}),
    Case(
        "zero-probe",
        "zero_vector",
        f"{ROWS}.data",
        {"kind": "probe", "packed": pack("post_block", {1: np.zeros(HIDDEN)})},
    ),
    Case("wrong-payload-kind", "unknown_kind", "payload.kind", {"packed": ..., "payload": {"kind": "matrix"}}),
    Case(
        "in-payload",
        "shape_mismatch",
        "payload.packed.post_block.data",
        {"packed": ..., "payload": {"kind": "direction", **rows(data="AAAA")}},
    ),
]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_bad_registrations_are_refused(api: Api, key: str, case: Case) -> None:
    before = api.http.get("/v1/steering/vectors").json()
    body = {name: value for name, value in {**BODY, **(case.changes or {})}.items() if value is not ...}
    answer = api.send(REGISTER, case.raw if case.raw is not None else body, {"X-Steering-API-Key": key})
    assert (answer.status, answer.body.get("error", {}).get("code")) == (case.status, case.code), answer.body
    assert answer.error["param"] == case.param
    assert answer.error["type"] == "invalid_request_error"
    assert answer.headers["x-steering-contract"] == "1.0"
    assert api.http.get("/v1/steering/vectors").json() == before


BAD_REMOVALS: dict[str, tuple[Json, str, str, int]] = {
    "unknown": ({"name": "nobody", "kind": "steer"}, "unknown_vector", "name", 404),
    "other-namespace": ({"name": "topic", "kind": "steer"}, "unknown_vector", "name", 404),
    "no-kind": ({"name": "happy"}, "missing_field", "kind", 400),
    "wrong-kind": ({"name": "happy", "kind": "both"}, "unknown_kind", "kind", 400),
    "unknown-field": ({"name": "happy", "kind": "steer", "force": True}, "unknown_field", "force", 400),
}


@pytest.mark.parametrize(("body", "code", "param", "status"), BAD_REMOVALS.values(), ids=BAD_REMOVALS)
def test_bad_removals_are_refused(api: Api, key: str, body: Json, code: str, param: str, status: int) -> None:
    answer = api.send(UNREGISTER, body, {"X-Steering-API-Key": key})
    assert (answer.status, answer.error["code"], answer.error["param"]) == (status, code, param)
    assert answer.error["type"] == ("not_found_error" if status == 404 else "invalid_request_error")
    assert api.http.get("/v1/steering/vectors/steer/happy").status_code == 200


def test_lists_show_what_is_registered(api: Api, key: str) -> None:
    answer = api.register("listed", "steer", VECTOR, key, metadata={"from": "a test"})
    assert answer.status == 200
    info = api.http.get("/v1/steering/vectors/steer/listed").json()
    assert info["digest"] == answer.body["digest"]
    assert (info["hooks"], info["layers"], info["width"]) == (["post_block"], [1, 2], HIDDEN)
    assert info["metadata"] == {"from": "a test"}
    assert info in api.http.get("/v1/steering/vectors").json()
    assert api.http.get("/v1/steering/vectors", params={"name": "listed", "kind": "steer"}).json() == [info]
    assert api.http.get("/v1/steering/vectors", params={"name": "listed", "kind": "probe"}).json() == []
    assert api.unregister("listed", "steer", key).body == {"status": "unregistered", "name": "listed", "kind": "steer"}
    missing = api.http.get("/v1/steering/vectors/steer/listed")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_vector")
    wrong = api.http.get("/v1/steering/vectors", params={"kind": "both"})
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (400, "unknown_kind")


def test_replacing(api: Api, key: str, reference: Any) -> None:
    def answered() -> list[int]:
        steering = {"vectors": [{"steer": {"kind": "name", "name": "moving"}, "where": EVERYWHERE}]}
        return api.ask("completions", steering=steering).tokens

    first = api.register("moving", "steer", VECTOR, key)
    assert (first.status, first.body["status"]) == (200, "created")
    assert answered() == reference({"vectors": [static(VECTOR)]}).tokens
    again = api.register("moving", "steer", random_direction(11, HIDDEN, [1, 2], norm=4.0), key)
    assert (again.body["status"], again.body["digest"]) == ("unchanged", first.body["digest"])
    conflict = api.register("moving", "steer", OTHER, key)
    assert (conflict.status, conflict.error["code"], conflict.error["type"]) == (409, "name_conflict", "conflict_error")
    assert conflict.error["param"] == "name"
    assert answered() == reference({"vectors": [static(VECTOR)]}).tokens
    replaced = api.register("moving", "steer", OTHER, key, replace=True)
    assert replaced.body["status"] == "replaced"
    assert replaced.body["digest"] != first.body["digest"]
    assert answered() == reference({"vectors": [static(OTHER)]}).tokens
    assert api.register("moving", "probe", PROBE, key).body["status"] == "created", "namespaces are apart"
    assert api.unregister("moving", "steer", key).status == 200
    assert api.unregister("moving", "probe", key).status == 200
    gone = api.ask(
        "completions", steering={"vectors": [{"steer": {"kind": "name", "name": "moving"}, "where": EVERYWHERE}]}
    )
    assert (gone.status, gone.error["code"]) == (400, "unknown_vector")


@pytest.mark.parametrize("change", ["unregister", "replace"])
def test_a_running_stream_keeps_its_vector(api: Api, key: str, change: str) -> None:
    steering: Json = {"vectors": [{"steer": {"kind": "name", "name": "leaving"}, "where": EVERYWHERE}]}
    # Several prompts, so that the stream takes longer than the change.
    body = request_body("completions", [PROMPT] * 8, stream=True, max_tokens=480, steering=steering)
    expected = None
    for pause in (0.1, 0.2, 0.4, 0.8):
        assert api.register("leaving", "steer", VECTOR, key, replace=True).status == 200
        expected = expected or [choice.tokens for choice in api.send(ROUTES["completions"], body).choices]
        assert [len(tokens) for tokens in expected] == [480] * 8
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(api.send, ROUTES["completions"], body)
            time.sleep(pause)
            if change == "unregister":
                assert api.unregister("leaving", "steer", key).status == 200
            else:
                assert api.register("leaving", "steer", OTHER, key, replace=True).body["status"] == "replaced"
            in_time = not running.done()
            answer = running.result()
        later = api.ask("completions", steering=steering)
        if in_time and answer.status == 200:
            break
    else:
        pytest.fail("the change never fell into the life of a stream")
    assert [choice.tokens for choice in answer.choices] == expected
    if change == "unregister":
        assert later.error["code"] == "unknown_vector"
    else:
        assert later.tokens != expected[0][:12]
        assert api.unregister("leaving", "steer", key).status == 200
