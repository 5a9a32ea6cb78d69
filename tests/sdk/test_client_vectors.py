"""The client's registered vectors, capabilities and `check`."""

from __future__ import annotations

import json

import pytest

from sdk.player import CAPABILITIES, Played
from sdk.test_client import CALM, PLAN
from steergate import (
    InvalidSteering,
    Steering,
    VectorSet,
    When,
    Where,
    payloads,
    wire,
)
from steergate._messages import Answer, Call
from steergate._protocol import parse, parse_reply, register_call
from steergate_server.schema import registry, reports
from steergate_server.schema.decode import decode, encode

# Vectors

INFO = {
    "name": "calm", "kind": "steer", "digest": "0" * 64, "hooks": ["post_block"], "layers": [3], "width": 2,
    "bytes": 8, "created": "2026-11-30T09:00:00Z", "metadata": {"from": "a test"}, "a newer member": 1,
}  # fmt: skip
REGISTERED = {"status": "created", "name": "calm", "kind": "steer", "digest": "0" * 64}


def test_registering(server, client):
    server.play(Played(body=REGISTERED))
    vectors = VectorSet.from_rows({3: [0.5, -1.0]}).scaled(2)
    answer = client.vectors.register("calm", vectors, kind="steer", metadata={"from": "é"}, replace=True)
    assert (answer.status, answer.digest) == ("created", "0" * 64)
    (request,) = server.requests
    assert request.headers["x-steering-api-key"] == "steering-secret"
    assert (request.method, request.path) == ("POST", "/v1/steering/vectors/register")
    row = {"dtype": "float32", "shape": [1, 2], "layer_indices": [3], "data": "AAAAPwAAgL8=", "scales": [2.0]}
    assert request.json == {
        "name": "calm", "kind": "steer", "packed": {"post_block": row}, "metadata": {"from": "é"}, "replace": True,
    }  # fmt: skip


def test_registering_another_payload(server, client):
    server.play(Played(body=REGISTERED))
    client.vectors.register("turn", payloads.linear([[1.0]]), kind="steer")
    weight = {"dtype": "float32", "shape": [1, 1], "data": "AACAPw=="}
    assert server.requests[0].json["payload"] == {"kind": "linear", "weight": weight}


def test_numbers_that_are_not_in_order_are_not_sent(server, client):
    broken = payloads.LinearPayload(weight=payloads.PackedTensor(dtype="float32", shape=[1, 1], data=b""))
    with pytest.raises(InvalidSteering) as caught:
        client.vectors.register("turn", broken, kind="steer")
    assert (caught.value.code, caught.value.param) == ("shape_mismatch", "payload.weight.data")
    with pytest.raises(TypeError, match="list cannot be registered"):
        client.vectors.register("turn", [1.0], kind="steer")
    with pytest.raises(ValueError, match="JSON"):
        client.vectors.register("turn", VectorSet.from_rows({1: [1.0]}), kind="steer", metadata={"a": float("nan")})
    assert server.requests == []


def test_listing_and_showing(server, client):
    server.play(Played(body=[INFO]), Played(body=INFO))
    (found,) = client.vectors.list(kind="steer", name="ca lm")
    assert (found.layers, found.metadata) == ([3], {"from": "a test"})
    assert client.vectors.show("steer", "ca/lm") == found
    assert [request.path for request in server.requests] == [
        "/v1/steering/vectors?kind=steer&name=ca+lm",
        "/v1/steering/vectors/steer/ca%2Flm",
    ]


def test_unregistering(server, client):
    server.play(Played(body={"status": "unregistered", "name": "calm", "kind": "probe"}))
    assert client.vectors.unregister("calm", "probe").status == "unregistered"
    assert server.requests[0].json == {"name": "calm", "kind": "probe"}
    assert server.requests[0].headers["x-steering-api-key"] == "steering-secret"


# Capabilities and check


def test_capabilities_are_asked_once(server, client):
    server.play(Played(body=CAPABILITIES))
    assert client.capabilities().layers == 6
    assert client.capabilities().algorithms["direct"].enabled
    assert len(server.requests) == 1


def vector(source, **more):
    return Steering().vector(source, **{"where": Where.answer(), **more})


def off(**more):
    return {**json.loads(json.dumps(CAPABILITIES)), **more}


ROW = [1.0, 2.0, 3.0, 4.0]
SQUARE = payloads.linear([[1.0] * 4] * 4)
CHECKS = [
    (CAPABILITIES, vector("x", algorithm="theirs"), "unknown_algorithm", "steering.vectors[0].algorithm"),
    (CAPABILITIES, vector("x", algorithm="erase"), "algorithm_not_enabled", "steering.vectors[0].algorithm"),
    (CAPABILITIES, vector("x", algorithm="my_own", params={"a": 1}), "unknown_param", "steering.vectors[0].params.a"),
    (CAPABILITIES, [CALM] * 3, "too_many_gates", "steering"),
    (CAPABILITIES, Steering().gate(CALM).gate(CALM).gate(CALM), "too_many_gates", "steering.gates"),
    (off(gates=False), CALM, "gates_unavailable", "steering"),
    (off(sources=["name"]), vector(ROW, layers=1), "inline_not_allowed", "steering.vectors[0].steer"),
    (CAPABILITIES, vector(ROW, layers=6), "unknown_layer",
     "steering.vectors[0].steer.packed.post_block.layer_indices[0]"),
    (CAPABILITIES, vector(ROW, layers=1, hook="middle"), "unknown_hook", "steering.vectors[0].steer.packed.middle"),
    (CAPABILITIES, vector(ROW, layers=1, hook="mlp_in"), "hook_not_steerable",
     "steering.vectors[0].steer.packed.mlp_in"),
    (CAPABILITIES, vector(ROW[:3], layers=1), "width_mismatch", "steering.vectors[0].steer.packed.post_block.shape[1]"),
    (CAPABILITIES, vector(SQUARE, algorithm="linear", layers=[1, 6]), "unknown_layer", "steering.vectors[0].layers[1]"),
    (CAPABILITIES, vector(payloads.linear([[1.0]]), algorithm="linear", layers=1), "width_mismatch",
     "steering.vectors[0].steer.payload.weight.shape[0]"),
    (CAPABILITIES, vector([ROW] * 5, layers=range(5)), "payload_too_large", "steering"),
    (CAPABILITIES, [When.always().scope("this_token").add(ROW, layers=9)], "unknown_layer",
     "steering[0].apply.steer.packed.post_block.layer_indices[0]"),
    (CAPABILITIES, [When.probe(ROW[:2], layer=1, threshold=1).scope("next_step").attenuate(keep=0)], "width_mismatch",
     "steering[0].when.probe.packed.post_block.shape[1]"),
]  # fmt: skip


@pytest.mark.parametrize(("capabilities", "plan", "code", "param"), CHECKS, ids=[row[2] + row[3] for row in CHECKS])
def test_check_adds_what_the_server_can_do(server, client, capabilities, plan, code, param):
    server.play(Played(body=capabilities))
    with pytest.raises(InvalidSteering) as caught:
        client.check(plan)
    assert (caught.value.code, caught.value.param) == (code, param)
    assert caught.value.message.endswith(".")


def test_check_lets_through_what_the_server_can_do(server, client):
    server.play(Played(body=CAPABILITIES))
    for plan in (
        None,
        False,
        PLAN,
        [CALM, CALM],
        vector(ROW, layers=5),
        vector("x", algorithm="my_own", params={"depth": 2}),
    ):
        client.check(plan)
    client.check(When.always().scope("rest_of_conversation").add("calm"))
    client.check(vector(SQUARE, algorithm="linear", layers=[1]))


# The bodies and answers of the real server's structs


@pytest.mark.parametrize(
    "source",
    [VectorSet.from_rows({3: [0.5, -1.0]}).scaled(2), payloads.linear([[1.0]], [2.0]), payloads.reft([[1.0]], [[1.0]])],
    ids=["direction", "linear", "reft"],
)
def test_the_server_reads_what_is_registered(source):
    body = register_call("calm", source, "steer", {"a": [1]}, True).body
    read = decode(body, registry.RegisterRequest)
    assert (read.name, read.kind, read.metadata, read.replace) == ("calm", "steer", {"a": [1]}, True)
    assert (read.packed is None) != (read.payload is None)


def test_the_sdk_reads_what_the_server_answers():
    vector = reports.VectorReport(label=None, digest=None, algorithm="moe_router", sites=["3:router_logits"])
    report = reports.SteeringReport(
        fingerprint="5f1d",
        default="none",
        vectors=[vector],
        choices=[reports.ChoiceReport(index=0, vectors=[vector], gates=[])],
    )
    body = b'{"choices":[{"index":0,"text":"a"}],"steering_report":%s}' % encode(report)
    reply = parse_reply(Call("POST", "/"), Answer(200, {}, body))
    assert reply.steering_report.choices[0].vectors[0].sites == ["3:router_logits"]
    info = registry.VectorInfo(
        name="a", kind="probe", digest="0" * 64, hooks=[], layers=[], width=None, bytes=0, created="", metadata={}
    )
    assert parse(Answer(200, {}, encode([info])), list[wire.VectorInfo])[0].kind == "probe"
    capabilities = registry.CapabilitiesAnswer(
        contract="1.0", model="m", hidden_width=4, layers=2, hooks=[], algorithms={}, sources=["name"], gates=True,
        graph_mode="split",
        limits=registry.Limits(vectors=1, gates=1, inline_bytes=1, graph_rank=1, slots=1, pool_rows={}),
    )  # fmt: skip
    read = parse(Answer(200, {}, encode(capabilities)), wire.CapabilitiesAnswer)
    assert (read.graph_mode, read.gates_reason) == ("split", None)
