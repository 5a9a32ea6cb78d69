"""Requests made at random, from a seed: valid ones as plain JSON values, mutations of them, and builder programs."""

from __future__ import annotations

import base64
import json
import struct
from random import Random
from typing import Any

from steergate import Steering, VectorSet, When, Where, payloads

Json = Any
Path = tuple[str | int, ...]

SITE_HOOKS = ("pre_attn", "post_attn", "mlp_in", "mlp_out", "post_block")
SCOPES = ("this_token", "next_step", "rest_of_request", "rest_of_conversation")
FORMATS = {"float16": "e", "float32": "f", "float64": "d"}


# Numbers


def numbers(rng: Random, count: int, dtype: str) -> bytes:
    """Little-endian elements, none of them zero."""
    values = [rng.choice([-1, 1]) * rng.uniform(0.25, 4) for _ in range(count)]
    if dtype == "bfloat16":
        return b"".join(struct.pack("<f", value)[2:] for value in values)
    return struct.pack(f"<{count}{FORMATS[dtype]}", *values)


def rows(rng: Random, layers: list[int], width: int = 4) -> Json:
    """One hook's packed rows."""
    dtype = rng.choice([*FORMATS, "bfloat16"])
    data = base64.b64encode(numbers(rng, len(layers) * width, dtype)).decode()
    packed = {"dtype": dtype, "shape": [len(layers), width], "layer_indices": layers, "data": data}
    if rng.random() < 0.3:
        packed["scales"] = [rng.choice([0.5, 2.0, -1]) for _ in layers]
    return packed


def tensor(rng: Random, *shape: int) -> Json:
    """A packed tensor."""
    dtype = rng.choice([*FORMATS, "bfloat16"])
    count = 1
    for length in shape:
        count *= length
    return {"dtype": dtype, "shape": list(shape), "data": base64.b64encode(numbers(rng, count, dtype)).decode()}


def some_layers(rng: Random, least: int = 0) -> list[int]:
    """Some layers, ascending, none twice."""
    return sorted(rng.sample(range(least, least + 30), rng.randint(1, 3)))


def maybe(rng: Random, chance: float, **members: Json) -> dict[str, Json]:
    """The members, each with some chance."""
    return {name: value for name, value in members.items() if rng.random() < chance}


def name(rng: Random) -> str:
    """A vector's name."""
    return rng.choice(["calm", "refusal", "Happy.v2", "a", "0-x_y", "n" * 128])


# Valid requests


def where(rng: Random) -> Json:
    """A clause that keeps the rules."""
    start = rng.randint(0, 5)
    includes = {
        "prompt": "all",
        "generation": "all",
        "answer": "all",
        "prompt_tokens": [rng.randint(0, 99), 7],
        "prompt_positions": [rng.randint(-9, 9)],
        "prompt_window": rng.choice([[start, start + 2], [-4, -1], [-5, None], [3, -1]]),
        "generation_tokens": [rng.randint(0, 99)],
        "generation_positions": [0, rng.randint(0, 9)],
        "generation_window": rng.choice([[start, start + 1], [start, None]]),
    }
    clause = {key: includes[key] for key in rng.sample([*includes], rng.randint(1, 3))}
    for phase in ("prompt", "generation"):
        if "answer" in clause or any(key.startswith(phase) for key in clause):
            for what in ("tokens", "positions", "window"):
                clause |= maybe(rng, 0.15, **{f"exclude_{phase}_{what}": includes[f"{phase}_{what}"]})
    return clause


def gate_source(rng: Random, *, single: bool = False, least: int = 0) -> Json:
    """A source that a gate takes."""
    layers = some_layers(rng, least)[: 1 if single else None]
    if rng.random() < 0.5:
        return {"kind": "name", "name": name(rng), "layers": layers, **maybe(rng, 0.5, hook=rng.choice(SITE_HOOKS))}
    return {"kind": "inline", "packed": {rng.choice(SITE_HOOKS): rows(rng, layers)}}


def probe(rng: Random) -> Json:
    """A probe that looks at layer 0, so that nothing comes before it."""
    source = gate_source(rng, single=True)
    if source["kind"] == "name":
        source |= {"layers": [0]}
    else:
        source["packed"] = {"pre_attn": rows(rng, [0])}
    options = {
        "sharpness": rng.choice([0.5, 8]),
        "fires": rng.choice(["above", "below"]),
        "score": rng.choice(["dot", "cosine"]),
        "at": rng.choice(["generated", "prompt_end", "answer"]),
    }
    return {"kind": "probe", "probe": source, "threshold": rng.choice([0, -1.5, 3.1]), **maybe(rng, 0.4, **options)}


def gate(rng: Random) -> Json:
    """A gate that keeps the rules."""
    always = {"kind": "always", **maybe(rng, 0.5, at=rng.choice(["generated", "answer"]))}
    when = rng.choice([always, probe(rng), probe(rng)])
    apply, scope = rng.choice(["add", "attenuate", "observe"]), rng.choice(SCOPES)
    if apply == "observe":
        made = {"when": when, "scope": "this_token", "apply": {"kind": "observe"}}
    elif apply == "attenuate":
        made = {"when": when, "scope": scope, "apply": {"kind": "attenuate", "keep": rng.choice([0, 0.25, 1.0])}}
    else:
        steer = gate_source(rng, least=1)
        if scope == "rest_of_conversation":
            steer = {"kind": "name", "name": name(rng)}
        strength = maybe(rng, 0.5, strength=rng.choice([2, -0.5]))
        made = {"when": when, "scope": scope, "apply": {"kind": "add", "steer": steer, **strength}}
    return made | maybe(rng, 0.2, label="a label, é\u2028")


ROUTER = {"mode": "soft_topk", "expert_ids": [1, 2], "lambda": -0.5, "topk": 4, "seed": 7, "epsilon": 0.02}


def vector(rng: Random) -> Json:
    """A static vector that keeps the rules."""
    layers = some_layers(rng)
    hookless = {"layers": layers, **maybe(rng, 0.5, hook=rng.choice(SITE_HOOKS))}
    packed = {rng.choice(SITE_HOOKS): rows(rng, layers)}
    named = {"kind": "name", "name": name(rng), **maybe(rng, 0.4, layers=layers, hook=rng.choice(SITE_HOOKS))}
    direction = rng.choice([named, {"kind": "inline", "packed": packed}, in_payload("direction", packed=packed)])
    made = rng.choice(
        [
            {"steer": direction},
            {"steer": direction, "normalize": True, "layers": layers},
            {"steer": direction, "algorithm": rng.choice(["erase", "replace"])},
            {"steer": direction, "algorithm": "clamp", "scale": 0.5, "params": {"min": -1.5, "max": 2}},
            {"steer": direction, "algorithm": "my_own", "params": {"a": 1, "b": [1], "c": "x", "d": None, "e": True}},
            {"steer": in_payload("linear", weight=tensor(rng, 4, 4), bias=tensor(rng, 4)), "algorithm": "linear"}
            | hookless,
            {
                "steer": in_payload("lowrank", projector1=tensor(rng, 4, 2), projector2=tensor(rng, 4, 2)),
                "algorithm": "lm_steer",
            }
            | hookless,
            {
                "steer": in_payload(
                    "reft",
                    rotate_layer=tensor(rng, 4, 2),
                    learned_source_weight=tensor(rng, 2, 4),
                    **maybe(rng, 0.5, learned_source_bias=tensor(rng, 2)),
                    layer=3,
                ),
                "algorithm": "loreft",
            },
            {"steer": in_payload("concept_pair", h1=packed, h2=packed), "algorithm": "concept_replace"},
            {"steer": in_payload("router", layers={"3": ROUTER, "11": MODE}), "algorithm": "moe_router"},
            {"algorithm": "moe_router", "layers": layers, "params": {"mode": "soft_random", "expert_ids": [4]}},
        ]
    )
    if made.get("algorithm", "direct") in ("direct", "erase", "replace"):
        made |= maybe(rng, 0.5, scale=rng.choice([2, -0.5, 0]))
    return {"normalize": False} | made | {"where": where(rng)} | maybe(rng, 0.2, label="é")


MODE = {"mode": "activate", "activate_ids": [0]}


def in_payload(kind: str, **members: Json) -> Json:
    """An inline payload."""
    return {"kind": "payload", "payload": {"kind": kind, **members}}


def request(rng: Random) -> Json:
    """A request that keeps the rules."""
    return {
        "vectors": [vector(rng) for _ in range(rng.randint(0, 3))],
        "gates": [gate(rng) for _ in range(rng.randint(0, 3))],
        **maybe(rng, 0.3, conflict=rng.choice(["sequential", "priority"]), inherit_default=rng.random() < 0.5),
        **maybe(rng, 0.3, report=rng.choice(["none", "summary", "scores"])),
    }


# Mutations

VALUES: list[Json] = [
    *(None, True, False, 0, 1, -1, 3, 2**31 - 1, 2**31, -(2**31), 2**63, 2**70, 10**30, 0.5, -0.5, 1.0, 1e3, 1e300),
    *("", "all", "x", "a b", "1", "direct", "post_block", "attn_heads", "router_logits", "probe", "add", "name"),
    *("this_token", "next_step", "rest_of_conversation", "generated", "clamp", "linear", "moe_router", "é\u2028"),
    *("AA==", "AAAA", "AA=", "A", "A A=", "AAA\n", "__==", "\u00e9AAA"),
    *([], {}, [0], [1, 1], [3, 1], [-1], [0, None], [None, 1], [1.0], [True], ["1"], [[1]], [2, 4, 6]),
    *({"kind": "always"}, {"kind": "observe"}, {"kind": "add"}, {"kind": 1}, {"kind": "name", "name": "calm"}),
    *(float("nan"), float("inf"), float("-inf")),
    *({"kind": "name", "name": "calm", "layers": [1, 1]}, {"prompt": "all"}, {"generation": "all"}),
]
MEMBERS = [
    *("kind", "label", "layers", "hook", "scale", "scales", "normalize", "params", "where", "answer", "topk", "bias"),
    *("exclude_prompt_tokens", "exclude_generation_window", "prompt_positions", "keep", "strength", "zz", "mode", "at"),
]


RULED: dict[str | int, list[Json]] = {
    "scope": ["this_token", "rest_of_conversation"],
    "algorithm": ["direct", "erase", "clamp", "linear", "lm_steer", "loreft", "concept_replace", "moe_router", "own"],
    "hook": [*SITE_HOOKS, "attn_heads", "router_logits", "nowhere"],
    "layers": [[0], [29], [29, 3], [3, 3], None],
    "layer_indices": [[0], [29], [0, 1], [2, 2]],
    "normalize": [True],
    "bias": [None],
    "keep": [0, 1],
    "apply": [{"kind": "observe"}],
    "when": [
        {"kind": "always"},
        {"kind": "probe", "probe": {"kind": "name", "name": "late", "layers": [99]}, "threshold": 0},
    ],
    "scale": [0, 2, -1],
    "scales": [[0], [0, 0], None],
    "label": ["x" * 256, "x" * 257],
}
"""Values that pass the shape ring, mostly, so that the rules have their say."""


def places(value: Json, path: Path = ()) -> list[tuple[Path, Json]]:
    """Every value in a document, with its path."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [(path, value)]
    for key, item in items:
        found += places(item, (*path, key))
    return found


def mutated(document: Json, rng: Random) -> Json:
    """A copy of a document with one thing changed."""
    document = json.loads(json.dumps(document))
    spots = [(path, value) for path, value in places(document) if path]
    if not spots:
        return rng.choice(VALUES)
    path, value = rng.choice(spots)
    parent = document
    for key in path[:-1]:
        parent = parent[key]
    action = rng.choice(["drop", "unknown", "retype", "retype", "nudge", "swap", "member", "rename", "rule", "rule"])
    if action == "drop":
        del parent[path[-1]]
    elif action == "unknown" and isinstance(parent, dict):
        parent[rng.choice(["zz", "Kind", "scal", "x` - at `$.gates", "é", ""])] = rng.choice([1, None, {}])
    elif action == "member" and isinstance(parent, dict):
        parent[rng.choice(MEMBERS)] = rng.choice(VALUES)
    elif action == "rename" and isinstance(parent, dict):
        parent[rng.choice(["name", "pre_attn", "attn_heads", "03", "x", "kind"])] = parent.pop(path[-1])
    elif action == "rule":
        _break_a_rule(document, rng)
    elif action == "nudge":
        parent[path[-1]] = _nudged(value, rng)
    elif action == "swap":
        parent[path[-1]] = json.loads(json.dumps(rng.choice(spots)[1]))
    else:
        parent[path[-1]] = rng.choice(VALUES)
    return document


def _break_a_rule(document: Json, rng: Random) -> None:
    """Give a member another value of the right shape."""
    spots = [(path, value) for path, value in places(document) if path and path[-1] in {*RULED, "data", "vectors"}]
    if not spots:
        return
    member = rng.choice(sorted({str(path[-1]) for path, _ in spots}))
    path, value = rng.choice([spot for spot in spots if spot[0][-1] == member])
    parent = document
    for key in path[:-1]:
        parent = parent[key]
    if path[-1] == "data":
        parent["data"] = "A" * (len(value) - value.count("=")) + "=" * value.count("=")
    elif path[-1] == "vectors":
        document |= {"conflict": "error", "vectors": value * 2}
    elif path[-1] in RULED:
        parent[path[-1]] = rng.choice(RULED[path[-1]])


def _nudged(value: Json, rng: Random) -> Json:
    """Nearly the same value."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int | float):
        return rng.choice([value + 1, value - 1, -value, value * 1.5, str(value), [value]])
    if isinstance(value, str):
        return rng.choice([value[:-1], value + "=", value + "\n", value.upper(), value * 3])
    if isinstance(value, list):
        return rng.choice([value[:-1], value + value, value[::-1], [*value, None]])
    return dict([*value.items()][:-1])


# Builder programs


def program(rng: Random) -> Steering:
    """A plan built by the builders."""
    plan = Steering().inherit_default(rng.random() < 0.7).report(rng.choice(["none", "summary", "scores"]))
    for _ in range(rng.randint(0, 3)):
        plan = plan.vector(**_vector_arguments(rng))
    for _ in range(rng.randint(0, 3)):
        plan = plan.gate(_built_gate(rng))
    return plan.conflict(rng.choice(["sequential", "priority"]))


def _built_where(rng: Random) -> Where:
    made = rng.choice([Where.answer(), Where.generation_window(2, rng.choice([9, None])), Where.generation()])
    if rng.random() < 0.5:
        made |= rng.choice([Where.prompt_positions(0, -1), Where.prompt_tokens(5, 6), Where.prompt_window(-5)])
    return made.exclude(generation_tokens=range(3)) if rng.random() < 0.3 else made


def _vectors(rng: Random, least: int = 0) -> VectorSet:
    made = VectorSet.from_rows(
        {layer: [rng.uniform(0.5, 2) for _ in range(4)] for layer in some_layers(rng, least)}, rng.choice(SITE_HOOKS)
    )
    return made.scaled(rng.choice([1.0, 0.5]))


def _matrix(rng: Random, *shape: int) -> list[list[float]]:
    return [[rng.uniform(-1, 1) for _ in range(shape[1])] for _ in range(shape[0])]


def _vector_arguments(rng: Random) -> dict[str, Any]:
    pair = payloads.concept_pair(_vectors(Random(1)), _vectors(Random(1)))
    low = payloads.lowrank(_matrix(rng, 4, 2), _matrix(rng, 4, 2))
    made: dict[str, Any] = rng.choice(
        [
            {"source": name(rng), "layers": range(1, 4), "hook": "mlp_out", "scale": rng.choice([2, -0.5])},
            {"source": _vectors(rng), "normalize": True},
            {"source": _matrix(rng, 2, 4), "layers": [3, 5], "algorithm": "erase"},
            {"source": payloads.linear(_matrix(rng, 4, 4), [0.5] * 4), "algorithm": "linear", "layers": 3},
            {"source": low, "algorithm": "lm_steer", "layers": [1, 2], "hook": "mlp_in"},
            {"source": pair, "algorithm": "concept_replace"},
            {
                "source": None,
                "algorithm": "moe_router",
                "layers": [1],
                "params": {"mode": "activate", "expert_ids": [1]},
            },
            {"source": "calm", "algorithm": "clamp", "scale": 0.5, "params": {"max": 2, "min": None}},
        ]
    )
    return made | {"where": _built_where(rng)} | maybe(rng, 0.3, label="é\u2028")


def _built_gate(rng: Random) -> Any:
    probe = rng.choice([name(rng), [0.5, -1.0, 2.0, 0.25]])
    when = rng.choice(
        [
            When.always(at=rng.choice(["generated", "answer"])),
            When.probe(probe, layer=0, hook="pre_attn", threshold=rng.choice([0, 3.1]), sharpness=rng.choice([1, 8.5])),
            When.probe(probe, layer=0, threshold=-1, hook="pre_attn", fires="below", score="cosine", at="prompt_end"),
        ]
    )
    action = rng.choice(["add", "add_inline", "attenuate", "observe"])
    if action == "observe":
        return when.scope("this_token").observe(label="watch")
    if action == "attenuate":
        return when.scope(rng.choice(SCOPES)).attenuate(keep=rng.choice([0, 0.5, 1]))
    if action == "add":
        return when.scope(rng.choice(SCOPES)).add(name(rng), rng.choice([1.0, -2]), layers=some_layers(rng, 1))
    return when.scope(rng.choice(SCOPES[:3])).add(_vectors(rng, 1))
