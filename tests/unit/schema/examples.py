"""Requests that exercise every member of the wire, as plain JSON values."""

import base64
import json
import struct
from typing import Any

WHERE = {"answer": "all"}


def floats(values: list[float]) -> str:
    """Base64 of little-endian float32."""
    return base64.b64encode(struct.pack(f"<{len(values)}f", *values)).decode()


def packed(rows: list[list[float]], layers: list[int], **more: Any) -> dict[str, Any]:
    """One hook's rows as float32."""
    flat = [value for row in rows for value in row]
    shape = [len(rows), len(rows[0])]
    return {"dtype": "float32", "shape": shape, "layer_indices": layers, "data": floats(flat), **more}


def tensor(*shape: int) -> dict[str, Any]:
    """A float32 tensor of ones."""
    size = 1
    for length in shape:
        size *= length
    return {"dtype": "float32", "shape": list(shape), "data": floats([1.0] * size)}


def inline(layers: list[int] | None = None, hook: str = "post_block", **more: Any) -> dict[str, Any]:
    """An inline vector of ones, four wide."""
    layers = [3] if layers is None else layers
    return {"kind": "inline", "packed": {hook: packed([[1.0] * 4] * len(layers), layers, **more)}}


def named(name: str = "calm", **more: Any) -> dict[str, Any]:
    """A registered vector."""
    return {"kind": "name", "name": name, **more}


def payload(kind: str, **members: Any) -> dict[str, Any]:
    """An inline payload."""
    return {"kind": "payload", "payload": {"kind": kind, **members}}


def vector(**more: Any) -> dict[str, Any]:
    """A static vector by name."""
    return {"steer": named(), "where": WHERE, **more}


def gate(**more: Any) -> dict[str, Any]:
    """A gate that probes by name and attenuates."""
    probe = {"kind": "probe", "probe": named("refusal", layers=[3], hook="post_block"), "threshold": 1.5}
    return {"when": probe, "scope": "this_token", "apply": {"kind": "attenuate", "keep": 0.25}, **more}


ROUTER_LAYER = {
    "mode": "soft_topk",
    "expert_ids": [1, 2],
    "epsilon": 0.02,
    "lambda": -0.5,
    "topk": 4,
    "seed": 7,
}

FULL: dict[str, Any] = {
    "vectors": [
        {
            "steer": named("calm", layers=[1, 2], hook="post_block"),
            "algorithm": "clamp",
            "scale": 0.5,
            "layers": [1],
            "where": {
                "prompt": "all",
                "prompt_tokens": [5, 6],
                "prompt_positions": [0, -1],
                "prompt_window": [-5, None],
                "generation_tokens": [7],
                "generation_positions": [0, 3],
                "generation_window": [2, 9],
                "exclude_prompt_tokens": [8],
                "exclude_prompt_positions": [-2],
                "exclude_prompt_window": [1, 2],
                "exclude_generation_tokens": [9],
                "exclude_generation_positions": [4],
                "exclude_generation_window": [5, 6],
            },
            "params": {"min": -1.5, "max": 2},
            "label": "first",
        },
        {
            "steer": inline([3, 4], scales=[1.0, 0.5]),
            "scale": 2.5,
            "normalize": True,
            "where": {"generation": "all"},
        },
        {
            "steer": payload("linear", weight=tensor(4, 4), bias=tensor(4)),
            "algorithm": "linear",
            "layers": [5],
            "hook": "mlp_out",
            "where": WHERE,
        },
        {
            "steer": payload("lowrank", projector1=tensor(4, 2), projector2=tensor(4, 2)),
            "algorithm": "lm_steer",
            "layers": [6],
            "where": WHERE,
        },
        {
            "steer": payload(
                "reft",
                rotate_layer=tensor(4, 2),
                learned_source_weight=tensor(2, 4),
                learned_source_bias=tensor(2),
                layer=7,
            ),
            "algorithm": "loreft",
            "where": WHERE,
        },
        {
            "steer": payload("concept_pair", h1=inline()["packed"], h2=inline()["packed"]),
            "algorithm": "concept_replace",
            "where": WHERE,
        },
        {
            "steer": payload("router", layers={"3": ROUTER_LAYER, "11": {"mode": "activate", "activate_ids": [0]}}),
            "algorithm": "moe_router",
            "where": WHERE,
        },
        {
            "algorithm": "moe_router",
            "layers": [3],
            "where": WHERE,
            "params": {"mode": "soft_random", "expert_ids": [4, 5], "lambda": 1, "seed": 3, "topk": None},
        },
    ],
    "conflict": "priority",
    "gates": [
        {
            "when": {
                "kind": "probe",
                "probe": named("refusal", layers=[3], hook="pre_attn"),
                "threshold": 3.1,
                "sharpness": 8,
                "fires": "below",
                "score": "cosine",
                "at": "prompt_end",
            },
            "scope": "rest_of_conversation",
            "apply": {"kind": "add", "steer": named("calm"), "strength": -2.0},
            "label": "calm down",
        },
        {
            "when": {"kind": "probe", "probe": inline([2]), "threshold": 0},
            "scope": "this_token",
            "apply": {"kind": "add", "steer": inline([2, 3])},
        },
        {
            "when": {"kind": "always", "at": "answer"},
            "scope": "next_step",
            "apply": {"kind": "attenuate", "keep": 0.2},
        },
        {
            "when": {"kind": "probe", "probe": named("refusal"), "threshold": -1},
            "scope": "this_token",
            "apply": {"kind": "observe"},
        },
    ],
    "inherit_default": False,
    "report": "scores",
}
"""Valid in all three rings but for the model's own facts, and every member is given somewhere."""


def request(**members: Any) -> bytes:
    """A request as bytes."""
    return json.dumps(members).encode()


def places(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[tuple[str | int, ...], Any]]:
    """Every value in a document, with its path."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [(path, value)]
    for key, item in items:
        found += places(item, (*path, key))
    return found


def changed(document: Any, path: tuple[str | int, ...], value: Any) -> Any:
    """A copy of a document with one value replaced."""
    if not path:
        return value
    document = json.loads(json.dumps(document))  # and not a deep copy, which keeps parts shared
    parent = document
    for key in path[:-1]:
        parent = parent[key]
    parent[path[-1]] = value
    return document


def without(document: Any, path: tuple[str | int, ...]) -> Any:
    """A copy of a document with one member removed."""
    document = json.loads(json.dumps(document))  # and not a deep copy, which keeps parts shared
    parent = document
    for key in path[:-1]:
        parent = parent[key]
    del parent[path[-1]]
    return document
