"""What the builders make. What they refuse is in test_faults."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import numpy as np
import pytest

from steergate import Steering, VectorSet, When, Where, payloads
from steergate._generated import models

ANSWER = Where.answer()


def probe(source: Any = "refusal", **more: Any) -> When:
    return When.probe(source, **{"layer": 3, "threshold": 1.0, **more})


def wire(value: Any) -> Any:
    return json.loads(msgspec.json.encode(value))


# What is made


def test_a_gate_in_three_steps():
    gate = (
        When.probe(
            "refusal", layer=14, hook="mlp_out", threshold=3, sharpness=8, fires="below", score="cosine", at="answer"
        )
        .scope("next_step")
        .add("calm", strength=-2, layers=range(14, 17), hook="post_block", label="calm down")
    )
    assert wire(gate) == {
        "when": {
            "kind": "probe",
            "probe": {"kind": "name", "name": "refusal", "layers": [14], "hook": "mlp_out"},
            "threshold": 3.0,
            "sharpness": 8.0,
            "fires": "below",
            "score": "cosine",
            "at": "answer",
        },
        "scope": "next_step",
        "apply": {
            "kind": "add",
            "steer": {"kind": "name", "name": "calm", "layers": [14, 15, 16], "hook": "post_block"},
            "strength": -2.0,
        },
        "label": "calm down",
    }


def test_defaults_are_left_out():
    assert wire(When.always().scope("this_token").add("calm")) == {
        "when": {"kind": "always"},
        "scope": "this_token",
        "apply": {"kind": "add", "steer": {"kind": "name", "name": "calm"}},
    }
    assert wire(Steering().request) == {}


def test_a_plan_of_everything():
    damp = probe().scope("this_token").attenuate(keep=0.25)
    plan = (
        Steering()
        .vector("happy", where=ANSWER, scale=2, layers=[3, 4], hook="mlp_out", label="joy")
        .vector([0.5, -1.0], where=ANSWER | Where.prompt_positions(-2), layers=5, normalize=True)
        .vector("calm", where=Where.generation(), algorithm="clamp", scale=0.5, params={"max": 2})
        .gate(damp)
        .conflict("priority")
        .inherit_default(False)
        .report("scores")
    )
    assert wire(plan.request) == {
        "vectors": [
            {
                "where": {"answer": "all"},
                "steer": {"kind": "name", "name": "happy", "layers": [3, 4], "hook": "mlp_out"},
                "scale": 2.0,
                "label": "joy",
            },
            {
                "where": {"answer": "all", "prompt_positions": [-2]},
                "steer": {
                    "kind": "inline",
                    "packed": {
                        "post_block": {
                            "dtype": "float32",
                            "shape": [1, 2],
                            "layer_indices": [5],
                            "data": "AAAAPwAAgL8=",
                        }
                    },
                },
                "normalize": True,
            },
            {
                "where": {"generation": "all"},
                "steer": {"kind": "name", "name": "calm"},
                "algorithm": "clamp",
                "scale": 0.5,
                "params": {"max": 2},
            },
        ],
        "conflict": "priority",
        "gates": [wire(damp)],
        "inherit_default": False,
        "report": "scores",
    }


def test_payloads_that_name_no_site_leave_layers_and_hook_to_the_vector():
    turn = payloads.linear([[0.0, -1.0], [1.0, 0.0]], bias=[1.0, 2.0])
    spec = Steering().vector(turn, algorithm="linear", layers=[3], hook="mlp_in", where=ANSWER).request.vectors[0]
    assert (spec.steer.payload, spec.layers, spec.hook) == (turn, [3], "mlp_in")
    spec = (
        Steering().vector("turn", algorithm="linear", layers=range(3), hook="mlp_in", where=ANSWER).request.vectors[0]
    )
    assert (wire(spec.steer), spec.layers, spec.hook) == ({"kind": "name", "name": "turn"}, [0, 1, 2], "mlp_in")


def test_an_algorithm_that_this_sdk_does_not_know_passes():
    spec = Steering().vector("x", algorithm="my_own", layers=[1], params={"a": [1, 2]}, where=ANSWER).request.vectors[0]
    assert (spec.layers, spec.params) == ([1], {"a": [1, 2]})


def test_wire_structs_are_taken_as_they_are():
    named = models.NamedVec(name="calm", layers=[3])
    clause = models.Where(answer="all")
    assert Steering().vector(named, where=clause) == Steering().vector("calm", layers=[3], where=ANSWER)
    assert When.always().scope("this_token").add(named) == When.always().scope("this_token").add("calm", layers=[3])
    request = models.SteeringRequest(gates=[When.always().scope("this_token").add(named)])
    assert Steering(request) == Steering().gate(request.gates[0])
    with pytest.raises(TypeError, match="leave `layer`"):
        When.always().scope("this_token").add(named, layers=[4])


def test_numbers_of_numpy_are_numbers():
    gate = probe(threshold=np.float32(0.5), sharpness=np.float64(2), layer=np.int64(3)).scope("this_token").observe()
    assert gate == probe(threshold=0.5, sharpness=2.0).scope("this_token").observe()
    added = When.always().scope("this_token").add("calm", np.float64(2.5), layers=np.arange(3))
    assert added == When.always().scope("this_token").add("calm", 2.5, layers=[0, 1, 2])


@pytest.mark.parametrize("array", [np.array([0.5, -1.0], dtype="f4"), [0.5, -1.0], (0.5, -1)], ids=str)
def test_an_array_is_an_inline_vector(array):
    gate = When.always().scope("this_token").add(array, layers=[7])
    assert gate.apply.steer == models.InlineVec(packed=VectorSet.from_rows({7: [0.5, -1.0]}).packed())


def test_only_the_rows_that_were_asked_for_are_sent():
    vectors = VectorSet.from_rows({3: [1.0], 4: [2.0], 5: [3.0]})
    gate = When.always().scope("this_token").add(vectors, layers=[4])
    assert gate.apply.steer.packed["post_block"].layer_indices == [4]
    plan = Steering().vector(vectors, layers=range(4, 6), where=ANSWER)
    assert plan.request.vectors[0].steer.packed["post_block"].layer_indices == [4, 5]


def test_nothing_changes_what_is_there():
    plan = Steering()
    longer = plan.gate(When.always().scope("this_token").add("calm"))
    assert plan == Steering() != longer
    assert (len(plan.request.gates), len(longer.request.gates)) == (0, 1)
    when = probe()
    assert when.scope("this_token") != when.scope("next_step")
    assert (when, hash(when)) == (probe(), hash(probe()))
    assert when != probe(threshold=2)
    assert len({longer, plan.gate(longer.request.gates[0])}) == 1


def test_reprs_are_readable():
    plan = (
        Steering()
        .vector("happy", scale=2, where=ANSWER.exclude(generation_tokens=[5]))
        .gate(probe([1.0, 2.0]).scope("this_token").observe(label="watch"))
    )
    assert repr(plan.report("summary")) == (
        "Steering().vector('happy', where=Where.answer().exclude(generation_tokens=[5]), scale=2.0)"
        ".gate(<watch>).report('summary')"
    )
    assert repr(probe([1.0, 2.0])) == "<When.probe(an inline vector at 3:post_block, threshold=1.0, ...)>"
    assert repr(When.always().scope("next_step")) == "<When.always(at='generated').scope('next_step')>"
    router = Steering().vector(
        None, algorithm="moe_router", layers=[1], params={"mode": "soft", "expert_ids": [1]}, where=ANSWER
    )
    assert "params={'mode': 'soft', 'expert_ids': [1]}" in repr(router)


def test_a_forgotten_step_is_named():
    with pytest.raises(AttributeError, match=r"comes after \.scope\(\.\.\.\).*rest_of_request"):
        When.probe("topic", threshold=1.0).add("calm")  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="no attribute 'ad'"):
        When.always().ad("calm")  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=r"not finished: say \.add"):
        Steering().gate(When.always().scope("this_token"))  # type: ignore[arg-type]
