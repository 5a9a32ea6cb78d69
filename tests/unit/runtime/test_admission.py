"""The model ring: what only the server can refuse, with code and param, for registered names as for inline numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from steergate_server.algorithms import registry
from steergate_server.algorithms.direct import DirectAlgorithm
from steergate_server.algorithms.erase import EraseAlgorithm
from steergate_server.capabilities import ALGORITHM_CAPABILITIES, AlgorithmCapabilities
from steergate_server.registry.names import NameIndex
from steergate_server.registry.spool import Spool
from steergate_server.runtime.admission import Admission
from steergate_server.runtime.capacity import Capacity
from steergate_server.runtime.config import EngineConfig
from steergate_server.runtime.sites import Site
from steergate_server.runtime.sources import ModelFacts
from steergate_server.schema import payloads
from steergate_server.schema.decode import decode_steering, encode
from steergate_server.schema.errors import SteeringError
from unit.runtime.test_fields_reach_the_engine import WIDTH, packed

ALGORITHMS = ("direct", "erase", "clamp", "lm_steer", "moe_router")


@pytest.fixture
def admission(tmp_path: Path) -> Admission:
    sites = [Site(layer, hook, WIDTH) for layer in range(4) for hook in ("pre_attn", "post_block")]
    sites += [Site(layer, "router_logits", 8) for layer in (1, 3)]
    config = EngineConfig(hooks=("pre_attn", "router_logits", "post_block"), algorithms=ALGORITHMS, graph_max_rank=2)
    names = NameIndex(Spool(tmp_path))
    zero = packed(0, data="A" * 42 + "A=")
    for name, rows in {"one": packed(1), "two": packed(2), "zero": zero}.items():
        names.register(name, "steer", msgspec.convert({"kind": "direction", "packed": rows}, payloads.DirectionPayload))
    capacity = Capacity(3, {"hidden_states": 5, "router_logits": 9})
    return Admission(config, ModelFacts("m", 4, WIDTH, tuple(sites), capacity), names)


def vector(name: str, where: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    return {"steer": {"kind": "name", "name": name}, "where": where or {"generation": "all"}, **more}


ALWAYS_ADD = {
    "when": {"kind": "always"},
    "scope": "this_token",
    "apply": {"kind": "add", "steer": {"kind": "name", "name": "two"}},
}
PROBE = {"kind": "probe", "probe": {"kind": "inline", "packed": packed(3, layers=(1,))}, "threshold": 0.5}


def probing(scope: str = "this_token", **source: Any) -> dict[str, Any]:
    """A gate that observes with a probe of these numbers."""
    when = {**PROBE, "probe": {"kind": "inline", "packed": packed(3, **{"layers": (1,), **source})}}
    return {"when": when, "scope": scope, "apply": {"kind": "observe"}}


def adding(scope: str = "this_token", when: dict[str, Any] | None = None, **source: Any) -> dict[str, Any]:
    """A gate that adds a vector of these numbers."""
    steer = {"kind": "inline", "packed": packed(4, **source)}
    return {"when": when or {"kind": "always"}, "scope": scope, "apply": {"kind": "add", "steer": steer}}


LOW_RANK = {"dtype": "float32", "shape": [4, 3], "data": "AAAAAAAA" * 8}
TWO_WIDTHS = packed(1) | packed(2, hook="pre_attn", shape=[4, 2], layer_indices=[0, 1, 2, 3])
ROUTER = {"algorithm": "moe_router", "where": {"prompt": "all"}, "params": {"mode": "soft", "expert_ids": [7]}}

REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "named-conflict": (
        {"conflict": "error", "vectors": [vector("one"), vector("two", {"answer": "all"})]},
        "vector_conflict",
        "steering.vectors[1]",
    ),
    "named-zero": ({"vectors": [vector("zero", algorithm="erase")]}, "zero_vector", "steering.vectors[0].steer"),
    "layer-of-name": (
        {"vectors": [vector("one", layers=[3])]},
        "layer_not_in_payload",
        "steering.vectors[0].layers[0]",
    ),
    "kind-of-name": (
        {"vectors": [vector("one", algorithm="lm_steer", layers=[1])]},
        "payload_kind",
        "steering.vectors[0].steer",
    ),
    "rank": (
        {
            "vectors": [
                {
                    "steer": {
                        "kind": "payload",
                        "payload": {"kind": "lowrank", "projector1": LOW_RANK, "projector2": LOW_RANK},
                    },
                    "algorithm": "lm_steer",
                    "layers": [1],
                    "where": {"prompt": "all"},
                }
            ]
        },
        "rank_too_large",
        "steering.vectors[0].steer",
    ),
    "expert": (
        {"vectors": [{**ROUTER, "layers": [1], "params": {"mode": "soft", "expert_ids": [8]}}]},
        "out_of_range",
        "steering.vectors[0].params.expert_ids",
    ),
    "no-router": ({"vectors": [{**ROUTER, "layers": [0]}]}, "hook_not_steerable", "steering.vectors[0].layers[0]"),
    "selects-nothing": (
        {"vectors": [vector("one"), vector("one", {"prompt_positions": [9]})]},
        "selects_nothing",
        "steering.vectors[1].where",
    ),
    "two-clamps": (
        {
            "vectors": [
                vector("one", algorithm="clamp", params={"max": 1}),
                vector("two", algorithm="clamp", params={"max": 1}),
            ]
        },
        "not_lowerable",
        "steering.vectors[1]",
    ),
    "second-hook-of-another-width": (
        {"vectors": [{**vector("one"), "steer": {"kind": "inline", "packed": TWO_WIDTHS}}]},
        "width_mismatch",
        "steering.vectors[0].steer.packed.pre_attn.shape[1]",
    ),
    "probe-where-nothing-looks": (
        {"gates": [probing(hook="mlp_out")]},
        "hook_not_steerable",
        "steering.gates[0].when.probe.packed.mlp_out",
    ),
    "probe-where-no-layer-is": (
        {"gates": [probing(layers=(4,))]},
        "unknown_layer",
        "steering.gates[0].when.probe.packed.post_block.layer_indices[0]",
    ),
    "gate-adds-where-nothing-steers": (
        {"gates": [adding(hook="mlp_out")]},
        "hook_not_steerable",
        "steering.gates[0].apply.steer.packed.mlp_out",
    ),
    "gate-adds-where-no-layer-is": (
        {"gates": [adding(layers=(1, 9))]},
        "unknown_layer",
        "steering.gates[0].apply.steer.packed.post_block.layer_indices[1]",
    ),
    "gate-adds-another-width": (
        {"gates": [adding(shape=[4, 2], layer_indices=[0, 1, 2, 3])]},
        "width_mismatch",
        "steering.gates[0].apply.steer.packed.post_block.shape[1]",
    ),
    "named-vector-before-its-probe": (
        {"gates": [{**ALWAYS_ADD, "when": {**PROBE, "probe": {"kind": "inline", "packed": packed(3, layers=(2,))}}}]},
        "steer_before_probe",
        "steering.gates[0].apply.steer",
    ),
    "attenuates-what-it-never-meets": (
        {
            "vectors": [vector("one", {"prompt_positions": [0]})],
            "gates": [{**ALWAYS_ADD, "apply": {"kind": "attenuate", "keep": 0.5}}],
        },
        "nothing_to_attenuate",
        "steering.gates[0].apply",
    ),
    "slots": (
        {"vectors": [vector("one", {"generation_positions": [number]}, scale=number + 1.0) for number in range(4)]},
        "over_capacity",
        "steering",
    ),
    "rows": (
        {"vectors": [vector("one"), vector("two", {"generation_positions": [1]}, scale=3.0)], "gates": [ALWAYS_ADD]},
        "over_capacity",
        "steering",
    ),
}


def test_clauses_that_cut_rows_into_very_many_sets_are_refused_at_once(admission: Admission) -> None:
    positions = [[row for row in range(4096) if row >> bit & 1] for bit in range(12)]
    request = {
        "vectors": [vector("one", {"generation_positions": rows}, scale=1.0 + n) for n, rows in enumerate(positions)]
    }
    facts = admission.facts._replace(capacity=Capacity(4095, {"hidden_states": 1 << 20}))
    roomy = Admission(admission.config, facts, admission.names)
    decoded = decode_steering(encode(request))
    assert decoded
    admitted = roomy.admit(decoded)
    with pytest.raises(SteeringError, match="more than 1023 different sets") as refused:
        roomy.admit_prompt(admitted, [1, 2, 3], 5000)
    assert refused.value.code == "over_capacity"
    roomy.release(admitted.digests)


def test_a_transposed_payload_is_refused(admission: Admission) -> None:
    transposed = {"dtype": "float32", "shape": [2, 4], "data": "AAAAAAAA" * 5 + "AAA="}
    payload = {"kind": "lowrank", "projector1": transposed, "projector2": transposed}
    steer = {"kind": "payload", "payload": payload}
    with pytest.raises(SteeringError) as refused:
        decide(
            admission,
            {"vectors": [{"steer": steer, "algorithm": "lm_steer", "layers": [1], "where": {"prompt": "all"}}]},
        )
    assert refused.value.code == "width_mismatch"
    assert refused.value.param == "steering.vectors[0].steer.payload.projector1.shape[0]"


@pytest.mark.parametrize("name", REFUSED)
def test_refused(admission: Admission, name: str) -> None:
    request, code, param = REFUSED[name]
    with pytest.raises(SteeringError) as refused:
        decide(admission, request)
    assert (refused.value.code, refused.value.param) == (code, param)
    assert held(admission) == {"one", "two", "zero"}


LASTING_PROBES = [{**probing(scope), "apply": ALWAYS_ADD["apply"]} for scope in ("next_step", "rest_of_request")]


@pytest.mark.parametrize("gate", LASTING_PROBES, ids=lambda gate: str(gate["scope"]))
def test_validation_knows_of_speculative_decoding(admission: Admission, gate: dict[str, Any]) -> None:
    """What admission refuses for it is not called valid."""
    drafting = Admission(admission.config, admission.facts._replace(speculative=True), admission.names)
    request = {"gates": [gate]}
    with pytest.raises(SteeringError) as refused:
        decide(drafting, request)
    assert (refused.value.code, refused.value.param) == ("gates_unavailable", "steering.gates[0].scope")
    assert problems(admission, request) == []
    assert problems(drafting, request) == [("gates_unavailable", "steering.gates[0].scope")]


def decide(admission: Admission, request: dict[str, Any]) -> None:
    """Both stages of admission, for a prompt of five tokens; what was held is given back."""
    decoded = decode_steering(encode(request))
    assert decoded
    admitted = admission.admit(decoded)
    admission.release(admitted.digests)
    admission.admit_prompt(admitted, [1, 2, 3, 4, 5], 64)


def problems(admission: Admission, request: dict[str, Any]) -> list[tuple[str, str | None]]:
    """What validation says of a request, with paths as `decide` gives them."""
    decoded = decode_steering(encode(request))
    assert decoded
    return [(problem.code, f"steering.{problem.param}") for problem in admission.problems(decoded)]


def held(admission: Admission) -> set[str]:
    """Names whose payload is held by nobody but the name."""
    found = set()
    for info in admission.names.list():
        admission.names.hold(info.digest)
        admission.names.release(info.digest)
        found.add(info.name)
    return found


def test_accepted_where_nothing_overlaps(admission: Admission) -> None:
    apart = [vector("one", {"prompt": "all"}), vector("two", {"generation": "all"})]
    decide(admission, {"conflict": "error", "vectors": apart})
    decide(admission, {"vectors": [{**ROUTER, "layers": [1, 3]}]})
    decide(admission, {"vectors": [vector("zero")]})


class Doubled(DirectAlgorithm):
    """An addition of somebody else's, to attention's heads."""


class Erased(EraseAlgorithm):
    """What needs a complete row."""


@pytest.mark.parametrize(
    ("algorithm", "normalize", "code"),
    [("doubled", False, None), ("doubled", True, "hook_not_allowed"), ("erased", False, "hook_not_allowed")],
)
def test_rows_that_are_split_over_ranks_take_plain_additions(
    admission: Admission, monkeypatch: pytest.MonkeyPatch, algorithm: str, normalize: bool, code: str | None
) -> None:
    made = {"doubled": Doubled, "erased": Erased}[algorithm]
    able = AlgorithmCapabilities("direction", "gguf", normalize=True, target_component="attention_heads")
    monkeypatch.setitem(registry._ALGORITHMS, algorithm, made)
    monkeypatch.setitem(ALGORITHM_CAPABILITIES, algorithm, able)
    config = msgspec.structs.replace(admission.config, hooks=("attn_heads",), algorithms=(algorithm,))
    request = {
        "vectors": [
            {
                "steer": {"kind": "inline", "packed": packed(layers=(1,), hook="attn_heads")},
                "algorithm": algorithm,
                "where": {"generation": "all"},
                "normalize": normalize,
            }
        ]
    }
    for part in (None, (0, WIDTH // 2)):
        facts = ModelFacts("m", 4, WIDTH, (Site(1, "attn_heads", WIDTH, part),), Capacity(9, {"attention_heads": 9}))
        one = Admission(config, facts, admission.names)
        if part is None or code is None:
            decide(one, request)
            continue
        with pytest.raises(SteeringError) as refused:
            decide(one, request)
        assert (refused.value.code, refused.value.param) == (code, "steering.vectors[0].steer")
