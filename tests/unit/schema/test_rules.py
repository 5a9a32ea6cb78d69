"""The rules that need no model, one by one and together."""

import json
from typing import Any

import msgspec
import pytest

from steergate_server.capabilities import ALGORITHM_CAPABILITIES
from steergate_server.schema.decode import decode
from steergate_server.schema.errors import ERROR_CODES, format_path
from steergate_server.schema.requests import SteeringRequest
from steergate_server.schema.rules import check, check_conversation
from unit.schema.examples import FULL, WHERE, floats, gate, inline, named, packed, payload, tensor, vector

NAN = float("nan")


def found(document: dict[str, Any]) -> list[tuple[str, str]]:
    plan = decode(json.dumps(document).encode(), SteeringRequest)
    return told(plan)


def told(plan: SteeringRequest) -> list[tuple[str, str]]:
    problems = check(plan, ALGORITHM_CAPABILITIES)
    assert all(problem.code in ERROR_CODES and problem.message.endswith(".") for problem in problems)
    return [(problem.code, format_path(problem.path)) for problem in problems]


def of_vector(**members: Any) -> list[tuple[str, str]]:
    return [(code, path.removeprefix("vectors[0].")) for code, path in found({"vectors": [vector(**members)]})]


def of_where(**members: Any) -> list[tuple[str, str]]:
    return [(code, path.removeprefix("where").removeprefix(".")) for code, path in of_vector(where=members)]


def of_gate(**members: Any) -> list[tuple[str, str]]:
    return [(code, path.removeprefix("gates[0].")) for code, path in found({"gates": [gate(**members)]})]


def probe(source: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"kind": "probe", "probe": source, "threshold": 1, **more}


def add(source: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "add", "steer": source}


def test_the_full_example_breaks_no_rule():
    assert found(FULL) == []


# Where


@pytest.mark.parametrize(
    ("where", "problems"),
    [
        ({}, [("empty_selection", "")]),
        ({"exclude_prompt_tokens": [1]}, [("empty_selection", ""), ("exclude_without_phase", "exclude_prompt_tokens")]),
        ({"prompt": "all", "exclude_prompt_tokens": [1]}, []),
        (
            {"prompt": "all", "exclude_generation_tokens": [1]},
            [("exclude_without_phase", "exclude_generation_tokens")],
        ),
        (
            {"generation": "all", "exclude_prompt_window": [0, 2]},
            [("exclude_without_phase", "exclude_prompt_window")],
        ),
        ({"answer": "all", "exclude_prompt_positions": [1], "exclude_generation_positions": [1]}, []),
        ({"prompt_positions": [-1], "exclude_prompt_positions": [1]}, []),
        ({"generation_window": [0, 4], "exclude_generation_positions": [1]}, []),
        ({"prompt_window": [2, 2]}, [("invalid_window", "prompt_window")]),
        ({"prompt_window": [3, 2]}, [("invalid_window", "prompt_window")]),
        ({"prompt_window": [-2, -2]}, [("invalid_window", "prompt_window")]),
        ({"prompt_window": [-2, -3]}, [("invalid_window", "prompt_window")]),
        ({"prompt_window": [2, -3]}, []),
        ({"prompt_window": [-3, 2]}, []),
        ({"prompt_window": [-3, -1]}, []),
        ({"prompt_window": [-3, None]}, []),
        ({"prompt_window": [0, 1]}, []),
        ({"generation_window": [4, 4]}, [("invalid_window", "generation_window")]),
        ({"generation_window": [4, None]}, []),
        (
            {"prompt": "all", "exclude_prompt_window": [5, 1]},
            [("invalid_window", "exclude_prompt_window")],
        ),
    ],
    ids=str,
)
def test_where(where, problems):
    assert of_where(**where) == problems


def test_where_that_was_not_decoded():
    base = decode(json.dumps({"vectors": [vector()]}).encode(), SteeringRequest)

    def told_of(**members: Any) -> list[tuple[str, str]]:
        where = msgspec.structs.replace(base.vectors[0].where, **members)
        spec = msgspec.structs.replace(base.vectors[0], where=where)
        return told(msgspec.structs.replace(base, vectors=[spec]))

    assert told_of(generation_positions=[2, -1]) == [("invalid_position", "vectors[0].where.generation_positions[1]")]
    assert told_of(generation_window=(-2, 3)) == [("invalid_window", "vectors[0].where.generation_window")]
    assert told_of(prompt_tokens=[-1]) == [("out_of_range", "vectors[0].where.prompt_tokens[0]")]
    assert told_of(prompt_tokens=[]) == [("empty_selection", "vectors[0].where.prompt_tokens")]
    assert told_of(prompt_window=(None, 3)) == [("invalid_window", "vectors[0].where.prompt_window")]
    assert told_of(prompt_window=[1]) == [("invalid_window", "vectors[0].where.prompt_window")]


# Static vectors

ZERO_ROW = inline([3, 4])["packed"]["post_block"] | {"data": floats([1.0] * 4 + [0.0] * 4)}
PAIR = {"h1": inline()["packed"], "h2": inline()["packed"]}


@pytest.mark.parametrize(
    ("spec", "problems"),
    [
        # payload kinds
        ({"steer": None}, [("missing_field", "steer")]),
        ({"steer": payload("direction", packed=inline()["packed"])}, []),
        (
            {"steer": inline(), "algorithm": "linear"},
            [("payload_kind", "steer.kind")],
        ),
        (
            {"steer": payload("concept_pair", **PAIR)},
            [("payload_kind", "steer.payload.kind")],
        ),
        ({"algorithm": "concept_replace", "steer": payload("concept_pair", **PAIR)}, []),
        ({"algorithm": "someone_elses", "steer": payload("concept_pair", **PAIR), "params": {"x": 1}}, []),
        # layers
        ({"layers": [1, 2, 1]}, [("duplicate_layer", "layers[2]")]),
        ({"steer": named(layers=[4, 4])}, [("duplicate_layer", "steer.layers[1]")]),
        (
            {"algorithm": "linear", "steer": payload("linear", weight=tensor(4, 4))},
            [("layers_required", "layers")],
        ),
        (
            {
                "algorithm": "loreft",
                "steer": payload("reft", rotate_layer=tensor(4, 2), learned_source_weight=tensor(2, 4)),
            },
            [("layers_required", "layers")],
        ),
        ({"algorithm": "lm_steer"}, [("layers_required", "layers")]),
        ({"algorithm": "lm_steer", "layers": [1], "hook": "mlp_out"}, []),
        ({"algorithm": "loreft"}, []),
        # hooks
        ({"hook": "post_block"}, [("hook_not_allowed", "hook")]),
        ({"steer": inline(), "hook": "post_block"}, [("hook_not_allowed", "hook")]),
        ({"algorithm": "lm_steer", "layers": [1], "hook": "attn_heads"}, [("hook_not_allowed", "hook")]),
        ({"algorithm": "lm_steer", "layers": [1], "hook": "nowhere"}, []),
        ({"steer": named(hook="attn_heads")}, [("hook_not_allowed", "steer.hook")]),
        ({"steer": inline(hook="attn_heads")}, [("hook_not_allowed", "steer.packed.attn_heads")]),
        ({"steer": inline(hook="attn_heads"), "algorithm": "attention_add"}, []),
        ({"steer": inline(), "algorithm": "attention_add"}, [("hook_not_allowed", "steer.packed.post_block")]),
        (
            {
                "algorithm": "concept_replace",
                "steer": payload(
                    "concept_pair", h1=inline(hook="router_logits")["packed"], h2=inline(hook="router_logits")["packed"]
                ),
            },
            [
                ("hook_not_allowed", "steer.payload.h1.router_logits"),
                ("hook_not_allowed", "steer.payload.h2.router_logits"),
            ],
        ),
        # normalize
        ({"normalize": True}, []),
        ({"normalize": True, "algorithm": "clamp", "params": {"value": 0}}, [("normalize_not_supported", "normalize")]),
        # parameters
        ({"params": {"min": 1}}, [("unknown_param", "params.min")]),
        ({"params": {"a b": None}}, [("unknown_param", 'params["a b"]')]),
        ({"algorithm": "clamp"}, [("missing_field", "params")]),
        ({"algorithm": "clamp", "params": {"min": None}}, [("missing_field", "params")]),
        ({"algorithm": "clamp", "params": {"min": 1}}, []),
        ({"algorithm": "clamp", "params": {"min": 1, "max": 1}}, []),
        ({"algorithm": "clamp", "params": {"min": 2, "max": 1}}, [("out_of_range", "params.min")]),
        ({"algorithm": "clamp", "params": {"value": 2, "max": 1}}, [("unknown_param", "params.max")]),
        ({"algorithm": "clamp", "params": {"value": "2"}}, [("invalid_type", "params.value")]),
        ({"algorithm": "clamp", "params": {"value": True}}, [("invalid_type", "params.value")]),
        ({"algorithm": "clamp", "params": {"max": 1}, "scale": 1.1}, [("out_of_range", "scale")]),
        ({"algorithm": "clamp", "params": {"max": 1}, "scale": -0.1}, [("out_of_range", "scale")]),
        ({"algorithm": "clamp", "params": {"max": 1}, "scale": 0}, []),
        # zero vectors, where the algorithm divides by the norm
        ({"steer": {"kind": "inline", "packed": {"post_block": ZERO_ROW}}}, []),
        (
            {"steer": {"kind": "inline", "packed": {"post_block": ZERO_ROW}}, "algorithm": "erase"},
            [("zero_vector", "steer.packed.post_block.data")],
        ),
        (
            {"steer": inline([3, 4], scales=[1, 0]), "algorithm": "erase"},
            [("zero_vector", "steer.packed.post_block.scales[1]")],
        ),
        (
            {
                "algorithm": "concept_replace",
                "steer": payload("concept_pair", h1={"post_block": ZERO_ROW}, h2={"post_block": ZERO_ROW}),
            },
            [("zero_vector", "steer.payload.h1.post_block.data")],
        ),
    ],
    ids=str,
)
def test_static_vectors(spec, problems):
    assert of_vector(**spec) == problems


ROWS = packed([[1.0, 2.0], [3.0, 4.0]], [5, 6])


@pytest.mark.parametrize(
    ("rows", "problems"),
    [
        ({}, []),
        ({"shape": [2, 3]}, [("shape_mismatch", "data")]),
        ({"dtype": "float64"}, [("shape_mismatch", "data")]),
        ({"data": ""}, [("shape_mismatch", "data")]),
        ({"layer_indices": [5]}, [("shape_mismatch", "layer_indices")]),
        ({"layer_indices": [5, 6, 7]}, [("shape_mismatch", "layer_indices")]),
        ({"layer_indices": [5, 5]}, [("duplicate_layer", "layer_indices[1]")]),
        ({"scales": [1]}, [("shape_mismatch", "scales")]),
        ({"scales": []}, [("shape_mismatch", "scales")]),
    ],
    ids=str,
)
def test_packed_rows(rows, problems):
    at = "steer.packed.post_block."
    expected = [(code, at + path) for code, path in problems]
    assert of_vector(steer={"kind": "inline", "packed": {"post_block": ROWS | rows}}) == expected
    inside = payload("direction", packed={"post_block": ROWS | rows})
    expected = [(code, "steer.payload.packed.post_block." + path) for code, path in problems]
    assert of_vector(steer=inside) == expected


@pytest.mark.parametrize(
    ("algorithm", "source", "problems"),
    [
        ("linear", payload("linear", weight=tensor(4, 3)), [("shape_mismatch", "weight.shape")]),
        ("linear", payload("linear", weight=tensor(4)), [("shape_mismatch", "weight.shape")]),
        ("linear", payload("linear", weight=tensor(4, 4), bias=tensor(3)), [("shape_mismatch", "bias.shape")]),
        ("linear", payload("linear", weight=tensor(4, 4) | {"data": ""}), [("shape_mismatch", "weight.data")]),
        (
            "lm_steer",
            payload("lowrank", projector1=tensor(4, 2), projector2=tensor(2, 4)),
            [("shape_mismatch", "projector2.shape")],
        ),
        (
            "loreft",
            payload("reft", rotate_layer=tensor(4, 2), learned_source_weight=tensor(4, 2)),
            [("shape_mismatch", "learned_source_weight.shape")],
        ),
        (
            "loreft",
            payload(
                "reft",
                rotate_layer=tensor(4, 2),
                learned_source_weight=tensor(2, 4),
                learned_source_bias=tensor(2, 1),
            ),
            [("shape_mismatch", "learned_source_bias.shape")],
        ),
        (
            "concept_replace",
            payload("concept_pair", h1=inline([3])["packed"], h2=inline([4])["packed"]),
            [("shape_mismatch", "h2")],
        ),
        (
            "moe_router",
            payload("router", layers={"3": {"mode": "soft"}}),
            [("missing_field", 'layers["3"].expert_ids')],
        ),
        (
            "moe_router",
            payload("router", layers={"3": {"mode": "soft", "expert_ids": [1], "activate_ids": [2]}}),
            [("unknown_param", 'layers["3"].activate_ids')],
        ),
        ("moe_router", payload("router", layers={"3": {"mode": "deactivate", "activate_ids": [2]}}), []),
    ],
    ids=str,
)
def test_payloads(algorithm, source, problems):
    layers = None if algorithm in ("concept_replace", "moe_router") else [1]
    expected = [(code, "steer.payload." + path) for code, path in problems]
    assert of_vector(algorithm=algorithm, steer=source, layers=layers) == expected


@pytest.mark.parametrize(
    ("more", "problems"),
    [
        ({}, []),
        ({"layers": None}, [("layers_required", "layers")]),
        ({"hook": "router_logits"}, [("hook_not_allowed", "hook")]),
        ({"params": {"expert_ids": [1]}}, [("missing_field", "params.mode")]),
        ({"params": {"mode": "soft"}}, [("missing_field", "params.expert_ids")]),
        ({"params": {"mode": "soft", "expert_ids": []}}, [("missing_field", "params.expert_ids")]),
        ({"params": {"mode": "activate", "deactivate_ids": [1]}}, []),
        ({"params": {"mode": "sof", "expert_ids": [1]}}, [("unknown_kind", "params.mode")]),
        ({"params": {"mode": "soft", "expert_ids": 1}}, [("invalid_type", "params.expert_ids")]),
        ({"params": {"mode": "soft", "expert_ids": [1], "topk": 0}}, [("out_of_range", "params.topk")]),
        ({"params": {"mode": "soft", "expert_ids": [1], "seed": -1}}, [("out_of_range", "params.seed")]),
        ({"params": {"mode": "soft", "expert_ids": [1], "topk": 2.0}}, [("invalid_type", "params.topk")]),
        ({"params": {"mode": "soft", "expert_ids": [1], "temperature": 1}}, [("unknown_param", "params.temperature")]),
        ({"steer": named(), "layers": None, "params": {"mode": "soft"}}, [("unknown_param", "params.mode")]),
        ({"steer": named(), "layers": None, "params": {}}, []),
    ],
    ids=str,
)
def test_routers_that_live_on_parameters(more, problems):
    spec = {"steer": None, "algorithm": "moe_router", "layers": [3], "params": {"mode": "soft", "expert_ids": [1]}}
    assert of_vector(**(spec | more)) == problems


# Conflicts


def clash(first: dict[str, Any], second: dict[str, Any], conflict: str = "error") -> list[tuple[str, str]]:
    return found({"vectors": [vector(**first), vector(**second)], "conflict": conflict})


CLASH = [("vector_conflict", "vectors[1]")]


@pytest.mark.parametrize(
    ("first", "second", "problems"),
    [
        (inline([3]), inline([3]), CLASH),
        (inline([3]), inline([4]), []),
        (inline([3]), inline([3], hook="mlp_out"), []),
        (inline([3, 4]), inline([4, 5]), CLASH),
        (named(layers=[3], hook="post_block"), inline([3]), CLASH),
        (named(layers=[3]), inline([3]), []),
        (named(), named(), []),
    ],
    ids=str,
)
def test_conflicts_by_site(first, second, problems):
    assert clash({"steer": first}, {"steer": second}) == problems


def test_conflicts_know_what_a_vector_picks_and_drops():
    both = inline([3, 4])
    assert clash({"steer": both}, {"steer": both}) == CLASH
    assert clash({"steer": both, "layers": [3]}, {"steer": both, "layers": [4]}) == []
    assert clash({"steer": both, "layers": [3]}, {"steer": both, "layers": [3]}) == CLASH
    assert clash({"steer": both, "scale": 0}, {"steer": both}) == []
    assert clash({"steer": both}, {"steer": both}, "priority") == []
    assert clash({"steer": both, "where": {"prompt": "all"}}, {"steer": both, "where": {"generation": "all"}}) == []
    linear = {"steer": payload("linear", weight=tensor(4, 4)), "algorithm": "linear", "layers": [3]}
    assert clash({"steer": both}, linear) == CLASH
    assert clash({"steer": both}, linear | {"hook": "mlp_out"}) == []
    router = {"steer": None, "algorithm": "moe_router", "layers": [3], "params": {"mode": "soft", "expert_ids": [1]}}
    assert clash(router, router) == CLASH
    assert clash(router, router | {"layers": [4]}) == []


def test_each_conflict_is_told_once():
    both = {"steer": inline([3])}
    problems = found({"vectors": [vector(**both)] * 3, "conflict": "error"})
    assert problems == [("vector_conflict", "vectors[1]"), *[("vector_conflict", "vectors[2]")] * 2]


# Gates

AT_3 = named("refusal", layers=[3], hook="post_block")


@pytest.mark.parametrize(
    ("members", "problems"),
    [
        # one site
        ({"when": probe(inline([3]))}, []),
        ({"when": probe(inline([3, 4]))}, [("probe_not_single_site", "when.probe")]),
        ({"when": probe(named(layers=[3, 4]))}, [("probe_not_single_site", "when.probe")]),
        ({"when": probe(named())}, []),
        # hooks
        ({"when": probe(named(hook="attn_heads"))}, [("hook_not_allowed", "when.probe.hook")]),
        ({"when": probe(inline(hook="router_logits"))}, [("hook_not_allowed", "when.probe.packed.router_logits")]),
        ({"when": probe(named(hook="nowhere"))}, []),
        ({"apply": add(named(hook="router_logits"))}, [("hook_not_allowed", "apply.steer.hook")]),
        ({"apply": add(inline([4], hook="attn_heads"))}, [("hook_not_allowed", "apply.steer.packed.attn_heads")]),
        # zero
        (
            {"when": probe({"kind": "inline", "packed": {"mlp_in": packed([[0.0, 0.0]], [3])}})},
            [("zero_vector", "when.probe.packed.mlp_in.data")],
        ),
        (
            {"when": probe(inline([3], scales=[0]))},
            [("zero_vector", "when.probe.packed.post_block.scales[0]")],
        ),
        # packed rows
        ({"when": probe(inline([3], shape=[1, 3]))}, [("shape_mismatch", "when.probe.packed.post_block.data")]),
        ({"apply": add(inline([4], shape=[1, 3]))}, [("shape_mismatch", "apply.steer.packed.post_block.data")]),
        ({"apply": add(named(layers=[4, 4]))}, [("duplicate_layer", "apply.steer.layers[1]")]),
        # scopes
        ({"apply": {"kind": "observe"}}, []),
        ({"apply": {"kind": "observe"}, "scope": "next_step"}, [("observe_scope", "scope")]),
        ({"apply": {"kind": "observe"}, "scope": "rest_of_conversation"}, [("observe_scope", "scope")]),
        ({"apply": add(inline([4])), "scope": "rest_of_conversation"}, [("inline_conversation_steer", "apply.steer")]),
        ({"apply": add(named()), "scope": "rest_of_conversation"}, []),
        ({"when": probe(inline([3])), "apply": add(named()), "scope": "rest_of_conversation"}, []),
        # order
        ({"when": probe(AT_3), "apply": add(inline([3]))}, []),
        ({"when": probe(AT_3), "apply": add(inline([4, 3]))}, []),
        ({"when": probe(AT_3), "apply": add(inline([4, 2]))}, [("steer_before_probe", "apply.steer")]),
        ({"when": probe(AT_3), "apply": add(inline([3], hook="mlp_out"))}, [("steer_before_probe", "apply.steer")]),
        ({"when": probe(inline([3], hook="mlp_in")), "apply": add(inline([3], hook="mlp_out"))}, []),
        (
            {"when": probe(inline([3], hook="mlp_in")), "apply": add(inline([3], hook="pre_attn"))},
            [("steer_before_probe", "apply.steer")],
        ),
        ({"when": probe(AT_3), "apply": add(named(layers=[2]))}, [("steer_before_probe", "apply.steer")]),
        ({"when": probe(AT_3), "apply": add(named(layers=[3]))}, []),
        ({"when": probe(named(layers=[3])), "apply": add(inline([3]))}, []),
        ({"when": probe(named(layers=[3])), "apply": add(inline([2]))}, [("steer_before_probe", "apply.steer")]),
        ({"when": probe(named()), "apply": add(inline([0]))}, []),
        ({"when": probe(AT_3), "apply": add(named(hook="pre_attn"))}, []),
        ({"when": probe(AT_3), "apply": add(inline([2])), "scope": "next_step"}, []),
        ({"when": {"kind": "always"}, "apply": add(inline([0]))}, []),
        ({"when": probe(AT_3), "apply": {"kind": "attenuate", "keep": 0}}, []),
    ],
    ids=str,
)
def test_gates(members, problems):
    assert of_gate(**members) == problems


def test_a_conversation_is_needed_by_name():
    plan = decode(json.dumps({"gates": [gate(), gate(scope="rest_of_conversation")]}).encode(), SteeringRequest)
    problems = check_conversation(plan, None)
    assert [(problem.code, format_path(problem.path)) for problem in problems] == [
        ("conversation_id_required", "gates[1].scope")
    ]
    assert check_conversation(plan, "c1") == []


# Numbers that JSON cannot carry, but a struct can


@pytest.mark.parametrize("value", [NAN, float("inf"), -float("inf")])
def test_every_float_must_be_finite(value):
    plan = decode(json.dumps(FULL).encode(), SteeringRequest)
    seen = set()
    for path, changed in with_each_float(plan, value):
        expected = format_path(path)
        problems = told(changed)
        assert ("not_finite", expected) in problems, expected
        seen.add(expected)
    assert {
        "vectors[0].scale",
        "vectors[0].params.min",
        "vectors[1].steer.packed.post_block.scales[1]",
        'vectors[6].steer.payload.layers["3"].lambda',
        'vectors[6].steer.payload.layers["3"].epsilon',
        "gates[0].when.threshold",
        "gates[0].when.sharpness",
        "gates[0].apply.strength",
        "gates[2].apply.keep",
    } <= seen


def with_each_float(value: Any, bad: float) -> Any:
    """Yield copies of a struct with one float replaced, each with its path."""
    if isinstance(value, msgspec.Struct):
        for field in msgspec.structs.fields(type(value)):
            for path, item in with_each_float(getattr(value, field.name), bad):
                yield (field.encode_name, *path), msgspec.structs.replace(value, **{field.name: item})
    elif isinstance(value, dict):
        for key, member in value.items():
            for path, item in with_each_float(member, bad):
                yield (key, *path), {**value, key: item}
    elif isinstance(value, list):
        for index, member in enumerate(value):
            for path, item in with_each_float(member, bad):
                yield (index, *path), [*value[:index], item, *value[index + 1 :]]
    elif isinstance(value, float):
        yield (), bad


# Together


def test_all_problems_come_in_document_order():
    document = {
        "vectors": [
            vector(steer=inline([3, 3]), layers=[1, 1], where={}, params={"x": 1}),
            vector(steer=None, algorithm="clamp", scale=3, normalize=True, where=WHERE),
        ],
        "gates": [
            gate(when=probe(inline([1, 2])), scope="next_step", apply={"kind": "observe"}),
            gate(when=probe(AT_3), apply=add(inline([1]))),
        ],
    }
    assert found(document) == [
        ("duplicate_layer", "vectors[0].steer.packed.post_block.layer_indices[1]"),
        ("duplicate_layer", "vectors[0].layers[1]"),
        ("empty_selection", "vectors[0].where"),
        ("unknown_param", "vectors[0].params.x"),
        ("missing_field", "vectors[1].steer"),
        ("out_of_range", "vectors[1].scale"),
        ("normalize_not_supported", "vectors[1].normalize"),
        ("missing_field", "vectors[1].params"),
        ("probe_not_single_site", "gates[0].when.probe"),
        ("observe_scope", "gates[0].scope"),
        ("steer_before_probe", "gates[1].apply.steer"),
    ]


def test_every_code_of_the_rules_ring_can_come_out():
    # Two need what JSON cannot say or a conversation; they have tests of their own above.
    rows = [of_where(), of_where(prompt="all", exclude_generation_tokens=[1]), of_where(prompt_window=[2, 1])]
    rows += [clash({"steer": inline()}, {"steer": inline()}), of_gate(when=probe(inline([1, 2])))]
    rows += [of_gate(apply=add(inline([1]))), of_gate(apply=add(inline()), scope="rest_of_conversation")]
    rows += [of_vector(steer=inline(), algorithm="linear", layers=[1]), of_vector(params={"x": 1})]
    rows += [of_vector(algorithm="lm_steer"), of_vector(algorithm="linear", layers=[1], normalize=True)]
    rows += [of_vector(hook="mlp_in"), of_gate(apply={"kind": "observe"}, scope="next_step")]
    rows += [of_gate(when=probe(inline(scales=[0])))]
    codes = {code for row in rows for code, _ in row}
    ring = {code for code, row in ERROR_CODES.items() if row.ring == "rules"}
    assert ring - codes == {"invalid_position", "conversation_id_required"}
