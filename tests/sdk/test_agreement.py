"""The server, the SDK and the published schema give one verdict on a request, valid or not."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import pytest

from sdk.random_requests import mutated, program, request
from steergate import Steering
from steergate._capabilities import packaged
from steergate._generated import decode as sdk_decode
from steergate._generated import errors as sdk_errors
from steergate._generated import models as sdk_models
from steergate._generated import rules as sdk_rules
from steergate_server.capabilities import ALGORITHM_CAPABILITIES
from steergate_server.schema import decode as server_decode
from steergate_server.schema import errors as server_errors
from steergate_server.schema import requests as server_requests
from steergate_server.schema import rules as server_rules

ROOT = Path(__file__).parents[2]
SCHEMA = json.loads((ROOT / "contracts/request.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)

PROGRAMS = 500
REQUESTS = 5_000

Verdict = tuple[str, str | None, str]
FINE: Verdict = ("fine", None, "")


def server_verdict(raw: bytes) -> tuple[Verdict, bool]:
    """What the server says, and whether it was decoding that said it."""
    try:
        plan = server_decode.decode_steering(raw)
    except server_errors.SteeringError as error:
        return (error.code, error.param, error.message), True
    return _ruled(plan, server_rules.check, ALGORITHM_CAPABILITIES, server_errors.format_path), False


def sdk_verdict(raw: bytes) -> tuple[Verdict, bool]:
    """The same of the SDK."""
    try:
        plan = sdk_decode.decode_steering(raw)
    except sdk_errors.SteeringError as error:
        return (error.code, error.param, error.message), True
    return _ruled(plan, sdk_rules.check, packaged().algorithms, sdk_errors.format_path), False


def _ruled(plan: Any, check: Any, capabilities: Any, format_path: Any) -> Verdict:
    for code, message, path in check(plan, capabilities) if plan else ():
        return code, format_path(path, "steering"), message
    return FINE


def schema_verdict(raw: bytes) -> bool | None:
    """Whether the published schema takes a request; None where it says nothing, because it is no object."""
    document = json.loads(raw)
    return VALIDATOR.is_valid(document) if isinstance(document, dict) else None


def documents() -> list[bytes]:
    """Valid requests, and mutations of them: one, or two at once."""
    made = []
    for seed in range(REQUESTS):
        rng = Random(seed)
        document = request(rng)
        for _ in range(rng.choice([0, 1, 1, 1, 1, 2])):
            document = mutated(document, rng)
        made.append(json.dumps(document).encode())
    return made


def is_bad_router_key(server: Verdict, sdk: Verdict) -> bool:
    """Tell the one place where the two differ: a router's layer that is no layer.

    The server finds it while decoding, the SDK among its rules, for the generated struct does not carry the pattern
    of the keys. Code and path are the same; the words differ, and the SDK finds other faults of shape first.
    """
    return server[0] == "invalid_name" and ".payload.layers" in str(server[1]) and sdk != FINE


@pytest.fixture(scope="module")
def all_documents() -> list[bytes]:
    return documents()


def test_random_requests_are_valid():
    for seed in range(500):
        raw = json.dumps(request(Random(seed))).encode()
        assert server_verdict(raw)[0] == FINE, raw
        assert schema_verdict(raw) is True


def test_server_and_sdk_agree(all_documents):
    codes: Counter[str] = Counter()
    for raw in all_documents:
        server, sdk = server_verdict(raw)[0], sdk_verdict(raw)[0]
        codes[server[0]] += 1
        if not is_bad_router_key(server, sdk):
            assert server == sdk, raw
    assert codes["fine"] > REQUESTS / 5
    assert len(codes) > 20, "the mutations find too few kinds of fault"


def test_a_bad_router_key_differs_in_words_only():
    layers = {"03": {"mode": "activate", "expert_ids": [1]}}
    raw = json.dumps({"vectors": [{"where": {"answer": "all"}, "algorithm": "moe_router", "steer": None}]})
    steer = {"kind": "payload", "payload": {"kind": "router", "layers": layers}}
    raw = raw.replace("null", json.dumps(steer))
    server, sdk = server_verdict(raw.encode())[0], sdk_verdict(raw.encode())[0]
    assert server[:2] == sdk[:2] == ("invalid_name", 'steering.vectors[0].steer.payload.layers["03"]')
    assert is_bad_router_key(server, sdk)


# The published schema

PROBE = {"kind": "probe", "probe": {"kind": "name", "name": "refusal"}, "threshold": 1}
OBSERVE = {"when": PROBE, "scope": "this_token", "apply": {"kind": "observe"}}

SCHEMA_CANNOT_SAY = [
    # 1.0 is an integer of JSON Schema; the wire wants integers written as such.
    ("invalid_type", {"vectors": [{"where": {"answer": "all"}, "layers": [1.0]}]}),
    # NaN and infinity are no JSON, but Python's reader lets them in, and no bound of a schema catches them all.
    ("not_finite", {"gates": [{**OBSERVE, "when": {**PROBE, "threshold": float("nan")}}]}),
    ("not_finite", {"gates": [{**OBSERVE, "when": {**PROBE, "sharpness": float("inf")}}]}),
    # Numbers that no float64 holds.
    ("out_of_range", {"gates": [{**OBSERVE, "when": {**PROBE, "threshold": 10**400}}]}),
    # Half of a surrogate pair: a string for JSON Schema, no text for anybody else.
    ("invalid_json", {"gates": [{**OBSERVE, "label": "\ud800"}]}),
]


@pytest.mark.parametrize(("code", "document"), SCHEMA_CANNOT_SAY, ids=lambda value: str(value)[:40])
def test_what_the_schema_cannot_say(code, document):
    raw = json.dumps(document).encode()
    assert schema_verdict(raw) is True
    assert server_verdict(raw)[0][0] == sdk_verdict(raw)[0][0] == code


def test_the_schema_cannot_say_that_a_member_is_given_twice():
    raw = b'{"report": "none", "report": "summary"}'
    assert schema_verdict(raw) is True
    assert server_verdict(raw)[0] == sdk_verdict(raw)[0]
    assert server_verdict(raw)[0][:2] == ("invalid_json", "steering.report")


def test_the_schema_cannot_say_that_an_exponent_is_no_integer():
    raw = b'{"vectors": [{"where": {"answer": "all"}, "layers": [1e1]}]}'
    assert schema_verdict(raw) is True
    assert server_verdict(raw)[0] == sdk_verdict(raw)[0]
    assert server_verdict(raw)[0][0] == "invalid_type"


def is_listed(verdict: Verdict) -> bool:
    """Tell whether a verdict is one that the schema cannot give, by the list above."""
    code, _, message = verdict
    return code == "not_finite" or (code == "invalid_type" and "without a fraction or an exponent" in message)


def test_the_schema_agrees_about_shape(all_documents):
    compared = 0
    for raw in all_documents:
        verdict, is_shape = server_verdict(raw)
        valid = schema_verdict(raw)
        if valid is None or is_listed(verdict):
            continue
        assert valid is not is_shape, (verdict, raw)
        compared += 1
    assert compared > REQUESTS * 0.9


# Programs


def test_programs_come_back_as_they_were_sent():
    """SDK -> bytes -> server -> bytes -> SDK."""
    kinds: Counter[str] = Counter()
    for seed in range(PROGRAMS):
        plan = program(Random(seed))
        sent = sdk_decode.encode(plan.request)
        received = server_decode.decode(sent, server_requests.SteeringRequest)
        assert server_rules.check(received, ALGORITHM_CAPABILITIES) == []
        returned = server_decode.encode(received)
        assert Steering(sdk_decode.decode(returned, sdk_models.SteeringRequest)) == plan
        assert VALIDATOR.is_valid(json.loads(sent))
        kinds.update(spec.algorithm for spec in plan.request.vectors)
        kinds.update(type(gate.apply).__name__ for gate in plan.request.gates)
    assert len(kinds) == 10
