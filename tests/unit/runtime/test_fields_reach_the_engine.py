"""Every wire field reaches the engine: each is set to something else, and the plan that is shipped must change.

A field that is added to the wire and to nothing else turns this red, because it is not in the table.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from steergate_server.registry.names import NameIndex
from steergate_server.registry.spool import Spool
from steergate_server.runtime.admission import Admission
from steergate_server.runtime.capacity import Capacity
from steergate_server.runtime.config import EngineConfig
from steergate_server.runtime.plan import decode_plan, encode_plan, fingerprint
from steergate_server.runtime.sites import Site
from steergate_server.runtime.sources import ModelFacts
from steergate_server.schema import payloads, requests
from steergate_server.schema.decode import decode_steering, encode

WIDTH = 4


def packed(seed: int = 0, layers: tuple[int, ...] = (1, 2), hook: str = "post_block", **more: Any) -> dict[str, Any]:
    data = np.random.default_rng(seed).normal(size=(len(layers), WIDTH)).astype("<f4")
    text = base64.b64encode(data.tobytes()).decode()
    rows = {"dtype": "float32", "shape": list(data.shape), "layer_indices": list(layers), "data": text}
    return {hook: {**rows, **more}}


def inline(**more: Any) -> dict[str, Any]:
    return {"kind": "inline", "packed": packed(**more)}


VECTOR = {"steer": inline(), "where": {"generation": "all"}, "label": "a"}
PROBE = {"kind": "probe", "probe": inline(layers=(1,)), "threshold": 1.0}
GATE = {
    "when": PROBE,
    "scope": "rest_of_request",
    "apply": {"kind": "add", "steer": inline(seed=1)},
}
BASE: dict[str, Any] = {"vectors": [VECTOR], "gates": [GATE], "report": "summary"}


def with_vector(**changes: Any) -> dict[str, Any]:
    return {**BASE, "vectors": [{**VECTOR, **changes}]}


def with_gate(**changes: Any) -> dict[str, Any]:
    return {**BASE, "gates": [{**GATE, **changes}]}


def with_when(**changes: Any) -> dict[str, Any]:
    return with_gate(when={**PROBE, **changes})


def with_where(**clauses: Any) -> dict[str, Any]:
    return with_vector(where=clauses)


ZEROS = {"dtype": "float32", "shape": [4, 4], "data": "AAAA" * 21 + "AA=="}
LINEAR: dict[str, Any] = {
    "steer": {"kind": "payload", "payload": {"kind": "linear", "weight": ZEROS}},
    "algorithm": "linear",
    "layers": [1],
}
NAMED = {"kind": "name", "name": "both"}
ATTENUATE = {"kind": "attenuate", "keep": 0.5}
TWO = [VECTOR, {**VECTOR, "steer": inline(seed=2)}]

CHANGES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "SteeringRequest.vectors": (BASE, {**BASE, "vectors": TWO}),
    "SteeringRequest.conflict": ({**BASE, "vectors": TWO}, {**BASE, "vectors": TWO, "conflict": "priority"}),
    "SteeringRequest.gates": (BASE, {**BASE, "gates": [GATE, GATE]}),
    "SteeringRequest.report": (BASE, {**BASE, "report": "none"}),
    "VectorSpec.steer": (BASE, with_vector(steer=inline(seed=3))),
    "VectorSpec.algorithm": (BASE, with_vector(algorithm="erase")),
    "VectorSpec.scale": (BASE, with_vector(scale=2.0)),
    "VectorSpec.layers": (BASE, with_vector(layers=[2])),
    "VectorSpec.hook": (with_vector(**LINEAR), with_vector(**LINEAR, hook="pre_attn")),
    "VectorSpec.normalize": (BASE, with_vector(normalize=True)),
    "VectorSpec.where": (BASE, with_where(prompt="all")),
    "VectorSpec.params": (
        with_vector(algorithm="clamp", params={"max": 1.0}),
        with_vector(algorithm="clamp", params={"max": 2.0}),
    ),
    "VectorSpec.label": (BASE, with_vector(label="b")),
    "SteeringGate.when": (BASE, with_gate(when={"kind": "always"})),
    "SteeringGate.scope": (BASE, with_gate(scope="next_step")),
    "SteeringGate.apply": (BASE, with_gate(apply=ATTENUATE)),
    "SteeringGate.label": (BASE, with_gate(label="b")),
    "AlwaysWhen.at": (with_gate(when={"kind": "always"}), with_gate(when={"kind": "always", "at": "answer"})),
    "ProbeWhen.probe": (BASE, with_when(probe=inline(seed=4, layers=(1,)))),
    "ProbeWhen.threshold": (BASE, with_when(threshold=2.0)),
    "ProbeWhen.sharpness": (BASE, with_when(sharpness=3.0)),
    "ProbeWhen.fires": (BASE, with_when(fires="below")),
    "ProbeWhen.score": (BASE, with_when(score="cosine")),
    "ProbeWhen.at": (BASE, with_when(at="answer")),
    "AddApply.steer": (BASE, with_gate(apply={"kind": "add", "steer": inline(seed=5)})),
    "AddApply.strength": (BASE, with_gate(apply={**GATE["apply"], "strength": 2.0})),
    "AttenuateApply.keep": (with_gate(apply=ATTENUATE), with_gate(apply={**ATTENUATE, "keep": 0.25})),
    "NamedVec.name": (with_vector(steer=NAMED), with_vector(steer={**NAMED, "name": "other"})),
    "NamedVec.layers": (with_vector(steer=NAMED), with_vector(steer={**NAMED, "layers": [1]})),
    "NamedVec.hook": (with_vector(steer=NAMED), with_vector(steer={**NAMED, "hook": "pre_attn"})),
    "InlineVec.packed": (BASE, with_vector(steer=inline(seed=6))),
    "InlinePayload.payload": (
        with_vector(steer={"kind": "payload", "payload": {"kind": "direction", "packed": packed()}}),
        with_vector(steer={"kind": "payload", "payload": {"kind": "direction", "packed": packed(7)}}),
    ),
    "SteeringHookPacked.dtype": (
        with_vector(steer=inline()),
        with_vector(steer=inline(dtype="float16", data="ADwAPAA8ADwAPAA8ADwAPA==")),
    ),
    "SteeringHookPacked.layer_indices": (BASE, with_vector(steer=inline(layer_indices=[2, 1]))),
    "SteeringHookPacked.scales": (BASE, with_vector(steer=inline(scales=[2.0, 1.0]))),
}
"""By field, a request and the same with another value in that field."""

NO_EFFECT = {
    "SteeringRequest.inherit_default": "there is no server default yet, so there is nothing to inherit",
    "SteeringHookPacked.shape": "says how `data` is cut; the numbers decide",
    "SteeringHookPacked.data": "the numbers: changed with `VectorSpec.steer`",
}
"""Fields that cannot change a plan by themselves, and why."""

STRUCTS = (
    requests.SteeringRequest, requests.VectorSpec, requests.SteeringGate, requests.AlwaysWhen, requests.ProbeWhen,
    requests.AddApply, requests.AttenuateApply, requests.ObserveApply, requests.NamedVec, requests.InlineVec,
    requests.InlinePayload, payloads.SteeringHookPacked,
)  # fmt: skip


@pytest.fixture
def admission(tmp_path: Path) -> Admission:
    sites = tuple(Site(layer, hook, WIDTH) for layer in range(4) for hook in ("pre_attn", "post_block"))
    config = EngineConfig(hooks=("pre_attn", "post_block"), algorithms=("direct", "erase", "clamp", "linear"))
    names = NameIndex(Spool(tmp_path))
    for name, seed in (("both", 8), ("other", 9)):
        rows = packed(seed, hook="pre_attn") | packed(seed + 10)
        names.register(name, "steer", msgspec.convert({"kind": "direction", "packed": rows}, payloads.DirectionPayload))
    return Admission(config, ModelFacts("m", 4, WIDTH, sites, Capacity(8, {"hidden_states": 99})), names)


def shipped(admission: Admission, request: dict[str, Any]) -> tuple[bytes, str]:
    """What an engine gets for a request, and its fingerprint."""
    decoded = decode_steering(encode(request))
    assert decoded
    plan = admission.admit(decoded).plan
    assert decode_plan(encode_plan(plan)) == plan
    return encode_plan(plan), fingerprint(plan)


@pytest.mark.parametrize("field", CHANGES)
def test_a_changed_field_changes_what_is_shipped(admission: Admission, field: str) -> None:
    request, changed = CHANGES[field]
    before, after = shipped(admission, request), shipped(admission, changed)
    assert before[0] != after[0]
    identity = field.rpartition(".")[2] not in ("label", "report")
    assert (before[1] != after[1]) == identity


def test_every_field_is_in_the_table() -> None:
    clauses = {f"Where.{name}" for name in requests.Where.__struct_fields__}
    fields = {f"{struct.__name__}.{name}" for struct in STRUCTS for name in struct.__struct_fields__}
    assert fields == set(CHANGES) | set(NO_EFFECT)
    assert clauses == {f"Where.{name}" for name in WHERE}


WHERE: dict[str, Any] = {
    "prompt": "all",
    "generation": "all",
    "answer": "all",
    **{f"{part}{name}": value for part in ("", "exclude_") for name, value in (
        ("prompt_tokens", [1]), ("prompt_positions", [1]), ("prompt_window", [1, 2]),
        ("generation_tokens", [1]), ("generation_positions", [1]), ("generation_window", [1, 2]),
    )},
}  # fmt: skip


@pytest.mark.parametrize("name", WHERE)
def test_every_clause_is_shipped(admission: Admission, name: str) -> None:
    base = {"prompt_tokens": [5], "generation_tokens": [5]}
    assert shipped(admission, with_where(**base)) != shipped(admission, with_where(**base | {name: WHERE[name]}))
