"""Every fault that needs no server is found at the earliest call that can know, in the server's words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from steergate import InvalidSteering, Steering, VectorSet, When, Where, payloads, steering_body
from steergate._generated import errors as sdk_errors
from steergate._generated import models
from steergate_server.schema.decode import decode_steering
from steergate_server.schema.errors import SteeringError

INF, NAN = float("inf"), float("nan")
ANSWER = Where.answer()
TWO_NAMED = models.NamedVec(name="a", layers=[3, 4])
TWO_LAYERS = VectorSet.from_rows({3: [1.0], 4: [1.0]})
ROUTER = {"algorithm": "moe_router", "layers": [1]}


def refused(build: Any) -> tuple[str, str | None]:
    """Code and param of the refusal that a program ends with."""
    with pytest.raises(InvalidSteering) as caught:
        build()
    assert caught.value.message.endswith((".", "?"))
    assert caught.value.code in sdk_errors.ERROR_CODES
    return caught.value.code, caught.value.param


def probe(source: Any = "refusal", **more: Any) -> When:
    return When.probe(source, **{"layer": 3, "threshold": 1.0, **more})


def observe(source: Any = "refusal", **more: Any) -> models.SteeringGate:
    return probe(source, **more).scope("this_token").observe()


ONES = {"dtype": "float32", "shape": [1, 2], "layer_indices": [3], "data": b"\0\0\x80?" * 2}


def packed(**more: Any) -> models.InlineVec:
    return models.InlineVec(packed={"post_block": models.SteeringHookPacked(**{**ONES, **more})})


def add(source: Any, scope: Any = "this_token", **more: Any) -> Any:
    return When.always().scope(scope).add(source, **more)


def vector(source: Any = "calm", where: Any = ANSWER, **more: Any) -> Steering:
    return Steering().vector(source, where=where, **more)


def two(source: Any, **more: Any) -> Steering:
    return vector().vector(source, where=ANSWER, **more)


ONE = vector([1.0], layers=3)

GATE_FAULTS: list[tuple[str, str, Any]] = [
    ("invalid_json", "label", lambda: add("calm", label="\ud800")),
    ("invalid_type", "when.threshold", lambda: observe(threshold="3")),
    ("invalid_type", "when.threshold", lambda: observe(threshold=True)),
    ("unknown_kind", "scope", lambda: add("calm", scope="this_tokens")),
    ("unknown_kind", "when.at", lambda: observe(at="prompt")),
    ("out_of_range", "when.sharpness", lambda: observe(sharpness=0)),
    ("out_of_range", "apply.keep", lambda: probe().scope("this_token").attenuate(keep=1.5)),
    ("out_of_range", "apply.steer.layers[0]", lambda: add("calm", layers=[-1])),
    ("out_of_range", "apply.steer.layers[0]", lambda: add("calm", layers=[2**70])),
    ("out_of_range", "apply.steer.layers", lambda: add("calm", layers=[])),
    ("out_of_range", "label", lambda: add("calm", label="x" * 257)),
    ("not_finite", "when.threshold", lambda: observe(threshold=NAN)),
    ("not_finite", "when.sharpness", lambda: observe(sharpness=INF)),
    ("not_finite", "apply.keep", lambda: probe().scope("this_token").attenuate(keep=NAN)),
    ("not_finite", "apply.strength", lambda: add("calm", strength=-INF)),
    ("not_finite", "when.probe.packed.post_block.data", lambda: probe([1.0, NAN])),
    ("not_finite", "apply.steer.packed.mlp_out.data", lambda: add(np.array([INF]), layers=1, hook="mlp_out")),
    ("invalid_name", "when.probe.name", lambda: observe("a b")),
    ("invalid_name", "apply.steer.name", lambda: add("")),
    ("shape_mismatch", "apply.steer.packed.post_block.data", lambda: add(packed(data=b"\0"))),
    ("shape_mismatch", "apply.steer.packed.post_block.layer_indices", lambda: add(packed(layer_indices=[1, 2]))),
    ("shape_mismatch", "apply.steer", lambda: add([[1.0], [2.0]], layers=[3])),
    ("invalid_type", "apply.steer", lambda: add([1.0, "x"], layers=[3])),
    ("duplicate_layer", "apply.steer.layers[2]", lambda: add("calm", layers=[3, 4, 3])),
    ("layers_required", "when.probe", lambda: When.probe([1.0], threshold=1)),
    ("layer_not_in_payload", "apply.steer", lambda: add(VectorSet.from_rows({3: [1.0]}), layers=[4])),
    ("probe_not_single_site", "when.probe", lambda: observe(TWO_LAYERS, layer=None)),
    ("probe_not_single_site", "when.probe", lambda: observe(TWO_NAMED, layer=None)),
    ("zero_vector", "when.probe.packed.post_block.data", lambda: observe([0.0, 0.0])),
    ("hook_not_allowed", "when.probe.hook", lambda: observe(hook="attn_heads")),
    ("hook_not_allowed", "apply.steer.hook", lambda: add("calm", hook="router_logits")),
    ("hook_not_allowed", "apply.steer.packed.attn_heads", lambda: add([1.0], layers=3, hook="attn_heads")),
    ("steer_before_probe", "apply.steer", lambda: probe(layer=9).scope("this_token").add("calm", layers=[8])),
    ("observe_scope", "scope", lambda: probe().scope("rest_of_request").observe()),
    ("inline_conversation_steer", "apply.steer", lambda: add([1.0], scope="rest_of_conversation", layers=3)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "param", "build"), GATE_FAULTS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_gate_by_itself_names_paths_inside_of_it(code, param, build):
    assert refused(build) == (code, param)


VECTOR_FAULTS: list[tuple[str, str, Any]] = [
    ("too_many_vectors", "vectors", lambda: many(17)),
    ("invalid_type", "vectors[0].where", lambda: vector(where="answer")),
    ("unknown_kind", "conflict", lambda: Steering().conflict("first")),
    ("unknown_kind", "report", lambda: Steering().report("all")),
    ("invalid_type", "inherit_default", lambda: Steering().inherit_default("no")),
    ("not_finite", "vectors[0].scale", lambda: vector(scale=NAN)),
    ("not_finite", "vectors[0].params.max", lambda: vector(algorithm="clamp", params={"max": NAN})),
    ("not_finite", "vectors[1].params.a", lambda: two("x", algorithm="own", params={"a": INF})),
    ("not_finite", "vectors[0].steer.packed.post_block.scales[0]", lambda: vector(packed(scales=[NAN]))),
    ("not_finite", "vectors[1].steer.packed.post_block.data", lambda: two([NAN], layers=1)),
    ("invalid_name", "vectors[0].steer.name", lambda: vector("a\n")),
    ("out_of_range", "vectors[0].scale", lambda: vector(algorithm="clamp", scale=2, params={"max": 1})),
    ("out_of_range", "vectors[0].algorithm", lambda: vector(algorithm="")),
    ("out_of_range", "vectors[0].params.min", lambda: vector(algorithm="clamp", params={"min": 2, "max": 1})),
    ("missing_field", "vectors[0].params", lambda: vector(algorithm="clamp")),
    ("missing_field", "vectors[0].steer", lambda: vector(None)),
    ("missing_field", "vectors[0].params.mode", lambda: vector(None, **ROUTER)),
    ("shape_mismatch", "vectors[0].steer.packed.post_block.scales", lambda: vector(packed(scales=[1, 2]))),
    ("duplicate_layer", "vectors[0].steer.layers[1]", lambda: vector(layers=[3, 3])),
    ("empty_selection", "vectors[0].where", lambda: vector(where=models.Where())),
    ("empty_selection", "vectors[0].where.prompt_tokens", lambda: vector(where=models.Where(prompt_tokens=[]))),
    ("exclude_without_phase", "vectors[0].where.exclude_prompt_tokens",
     lambda: vector(where=models.Where(generation="all", exclude_prompt_tokens=[1]))),
    ("invalid_window", "vectors[0].where.prompt_window", lambda: vector(where=models.Where(prompt_window=(3, 3)))),
    ("invalid_position", "vectors[0].where.generation_positions[0]",
     lambda: vector(where=models.Where(generation_positions=[-1]))),
    ("vector_conflict", "vectors[1]", lambda: ONE.conflict("error").vector([2.0], layers=3, where=ANSWER)),
    ("vector_conflict", "vectors[1]", lambda: ONE.vector([2.0], layers=3, where=ANSWER).conflict("error")),
    ("payload_kind", "vectors[0].steer.kind", lambda: vector([1.0], layers=3, algorithm="linear")),
    ("payload_kind", "vectors[0].steer.payload.kind", lambda: vector(payloads.linear([[1.0]]), layers=[3])),
    ("unknown_param", "vectors[0].params.max", lambda: vector(params={"max": 1})),
    ("normalize_not_supported", "vectors[0].normalize", lambda: vector(algorithm="clamp", normalize=True)),
    ("layers_required", "vectors[0].layers", lambda: vector(payloads.linear([[1.0]]), algorithm="linear")),
    ("layers_required", "vectors[0].steer", lambda: vector([1.0])),
    ("hook_not_allowed", "vectors[0].steer.hook", lambda: vector(hook="attn_heads")),
    ("hook_not_allowed", "vectors[0].hook", lambda: vector(models.NamedVec(name="a"), hook="mlp_out")),
    ("zero_vector", "vectors[0].steer.packed.post_block.data", lambda: vector([0.0], layers=1, algorithm="erase")),
    ("invalid_type", "vectors[0].params.max", lambda: vector(algorithm="clamp", params={"max": "1"})),
    ("unknown_kind", "vectors[0].params.mode", lambda: vector(None, **ROUTER, params={"mode": "x"})),
    ("observe_scope", "gates[1].scope", lambda: Steering().gate(add("calm")).gate(broken_gate())),
]  # fmt: skip


def many(count: int) -> Steering:
    plan = Steering()
    for _ in range(count):
        plan = plan.vector("calm", where=ANSWER)
    return plan


def broken_gate() -> models.SteeringGate:
    return models.SteeringGate(when=models.AlwaysWhen(), scope="next_step", apply=models.ObserveApply())


@pytest.mark.parametrize(
    ("code", "param", "build"), VECTOR_FAULTS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_plan_names_paths_from_its_root(code, param, build):
    assert refused(build) == (code, param)


BODY_FAULTS: list[tuple[str, str, Any]] = [
    ("conversation_id_required", "steering.gates[0].scope",
     lambda: steering_body(Steering().gate(add("calm", scope="rest_of_conversation")))),
    ("conversation_id_required", "steering[1].scope",
     lambda: steering_body([add("calm"), add("calm", scope="rest_of_conversation")])),
    ("conversation_id_required", "steering[0].scope", lambda: steering_body(add("calm", scope="rest_of_conversation"))),
    ("observe_scope", "steering[0].scope", lambda: steering_body([broken_gate()])),
    ("observe_scope", "steering.gates[0].scope", lambda: steering_body(models.SteeringRequest(gates=[broken_gate()]))),
    ("invalid_name", "conversation_id", lambda: steering_body(None, conversation_id="a b")),
    ("invalid_type", "conversation_id", lambda: steering_body(None, conversation_id=5)),
    ("invalid_type", "steering", lambda: steering_body(True)),
    ("invalid_type", "steering[0]", lambda: steering_body([5])),
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "param", "build"), BODY_FAULTS, ids=lambda value: value if isinstance(value, str) else ""
)
def test_a_body_names_paths_as_sent(code, param, build):
    assert refused(build) == (code, param)


RULES = {code for code, entry in sdk_errors.ERROR_CODES.items() if entry.ring == "rules"}


def test_every_rule_has_its_fault_above():
    assert {code for code, *_ in [*GATE_FAULTS, *VECTOR_FAULTS, *BODY_FAULTS]} & RULES == RULES


@pytest.mark.parametrize(
    ("when", "sent"),
    [
        ({"threshold": NAN}, b'"threshold":NaN'),
        ({"threshold": -INF}, b'"threshold":-Infinity'),
        ({"threshold": "1"}, b'"threshold":"1"'),
        ({"threshold": 10**400}, b'"threshold":1' + b"0" * 400),
        ({"sharpness": -1}, b'"threshold":1.0,"sharpness":-1'),
        ({"fires": "abov"}, b'"threshold":1.0,"fires":"abov"'),
    ],
    ids=str,
)
def test_the_words_are_the_servers(when, sent):
    probed = b'{"kind":"probe","probe":{"kind":"name","name":"refusal","layers":[3]},%s}' % sent
    with pytest.raises(SteeringError) as server:
        decode_steering(b'[{"when":%s,"scope":"this_token","apply":{"kind":"observe"}}]' % probed)
    with pytest.raises(InvalidSteering) as sdk:
        observe(**when)
    assert (sdk.value.code, sdk.value.message) == (server.value.code, server.value.message)
    assert f"steering[0].{sdk.value.param}" == server.value.param


@pytest.mark.parametrize("unfinished", [When.always(), When.always().scope("this_token")], ids=repr)
def test_a_gate_that_is_not_finished_is_no_gate(unfinished):
    for build in (
        lambda: Steering().gate(unfinished),
        lambda: steering_body(unfinished),
        lambda: steering_body([unfinished]),
    ):
        with pytest.raises(TypeError, match="is not finished"):
            build()


def test_what_is_no_vector_is_a_type_error():
    with pytest.raises(TypeError, match="object is no vector"):
        add(object())
    with pytest.raises(TypeError, match="no place in a steering request"):
        observe(threshold=object())
