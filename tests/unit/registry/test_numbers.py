"""Canonical numbers and the digest, against bytes that are laid out by hand."""

import hashlib
import json
import math
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steergate_server.registry.numbers import canonical, canonical_numbers, numbers_digest, payload_digest, sites_of
from steergate_server.schema.errors import SteeringError
from steergate_server.schema.payloads import (
    ConceptPairPayload,
    DirectionPayload,
    LinearPayload,
    LowRankPayload,
    ReftPayload,
    RouterLayer,
    RouterPayload,
    SteeringHookPacked,
)
from steergate_server.schema.requests import InlineVec
from unit.registry.payloads import direction, inline, pack, rows, tensor


def by_hand(kind, tensors, metadata=None):
    """The digest as the wire document lays it out, with nothing but struct and hashlib."""
    content = b"steergate/1/" + kind.encode() + b"\x00"
    for path in sorted(tensors):
        content += path.encode() + b"\x00" + struct.pack("<Q", len(tensors[path]))
        content += struct.pack(f"<{len(tensors[path])}f", *tensors[path])
    if metadata:
        content += json.dumps(metadata, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.sha256(content).hexdigest()


def test_a_direction():
    payload = direction(post_block={11: [1.0, -2.5], 2: [0.5, 3.0]}, mlp_in={2: [7.0, 8.0, 9.0]})
    tensors = {
        "mlp_in/00000002": [7.0, 8.0, 9.0],
        "post_block/00000002": [0.5, 3.0],
        "post_block/00000011": [1.0, -2.5],
    }
    assert payload_digest(payload) == by_hand("direction", tensors)
    numbers = canonical_numbers(payload)
    assert list(numbers) == sorted(tensors)
    assert all(numbers[path].dtype == np.float32 for path in tensors)
    assert all(numbers[path].tolist() == tensors[path] for path in tensors)


def test_the_digest_is_pinned():
    # If this number changes, every stored payload and every fingerprint changes its identity.
    pinned = "ba100850b208a21b23c0d41cd6ebf1fa3b36b2e203c40dd5b8a1eb4af1787509"
    assert payload_digest(direction(post_block={0: [1.0, 2.0]})) == pinned


def test_an_inline_vector_is_short_for_a_direction():
    hooks = {"post_block": {1: [1.0, 2.0]}}
    assert payload_digest(inline(**hooks)) == payload_digest(direction(**hooks))


def test_spelling_is_no_part_of_identity():
    values = {3: [1.0, -0.5, 0.25, 100.0], 1: [2.0, 4.0, -8.0, 0.0]}
    swapped = dict(reversed(values.items()))
    digests = {
        payload_digest(InlineVec(packed={"post_block": rows(spelled, dtype, scales)}))
        for spelled in (values, swapped)
        for dtype in ("float16", "bfloat16", "float32", "float64")
        for scales in (None, [1.0, 1.0])
    }
    assert digests == {by_hand("direction", {f"post_block/{layer:08d}": row for layer, row in values.items()})}


def test_hooks_in_any_order():
    one = direction(post_block={1: [1.0]}, mlp_out={1: [2.0]})
    other = direction(mlp_out={1: [2.0]}, post_block={1: [1.0]})
    assert payload_digest(one) == payload_digest(other)


@pytest.mark.parametrize(
    "other",
    [
        direction(post_block={1: [1.0, 2.5]}),
        direction(post_block={2: [1.0, 2.0]}),
        direction(mlp_out={1: [1.0, 2.0]}),
        direction(post_block={1: [1.0, 2.0], 2: [1.0, 2.0]}),
        direction(post_block={1: [1.0, 2.0, 0.0]}),
        direction(post_block={1: [2.0, 1.0]}),
        ConceptPairPayload(h1=direction(post_block={1: [1.0]}).packed, h2=direction(post_block={1: [2.0]}).packed),
    ],
)
def test_numbers_and_sites_are(other):
    assert payload_digest(other) != payload_digest(direction(post_block={1: [1.0, 2.0]}))


def test_a_row_is_scaled_in_float64_and_rounded_once():
    # Either factor would lose its last bit in float32, and the product lands on another number then.
    for value, scale, dtype in ((1 + 2**-23, 1 + 2**-24, "float32"), (1 + 2**-24, 1 + 2**-23, "float64")):
        payload = InlineVec(packed={"post_block": rows({1: [value]}, dtype, [scale])})
        assert canonical_numbers(payload)["post_block/00000001"].tolist() == [1 + 2**-22]
    third = InlineVec(packed={"post_block": rows({1: [1 / 3]}, "float64", [3.0])})
    assert payload_digest(third) == by_hand("direction", {"post_block/00000001": [1.0]})


FLOATS = st.floats(width=16, allow_nan=False, allow_infinity=False)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_direction_by_hand(data):
    width = data.draw(st.integers(1, 4))
    row = st.lists(FLOATS, min_size=width, max_size=width)
    layers = st.integers(0, 99_999_999)
    hooks = st.sampled_from(["post_block", "pre_attn", "attn_heads"])
    by_hook = data.draw(st.dictionaries(hooks, st.dictionaries(layers, row, min_size=1, max_size=3), min_size=1))
    dtype = data.draw(st.sampled_from(["float16", "float32", "float64"]))
    packed, tensors = {}, {}
    for hook, by_layer in by_hook.items():
        scale = st.floats(-100, 100, width=32)
        scales = data.draw(st.none() | st.lists(scale, min_size=len(by_layer), max_size=len(by_layer)))
        packed[hook] = rows(by_layer, dtype, scales)
        for layer, values, factor in zip(by_layer, by_layer.values(), scales or [1.0] * len(by_layer), strict=True):
            tensors[f"{hook}/{layer:08d}"] = [value * factor for value in values]
    assert payload_digest(DirectionPayload(packed=packed)) == by_hand("direction", tensors)


@given(st.integers(0, 0xFFFF))
def test_bfloat16_is_decoded_exactly(bits):
    value = struct.unpack("<f", struct.pack("<HH", 0, bits))[0]
    packed = SteeringHookPacked(dtype="bfloat16", shape=[1, 1], layer_indices=[0], data=struct.pack("<H", bits))
    payload = DirectionPayload(packed={"post_block": packed})
    if math.isfinite(value):
        assert canonical_numbers(payload)["post_block/00000000"].tobytes() == struct.pack("<f", value)
    else:
        with pytest.raises(SteeringError):
            canonical(payload)


def test_a_concept_pair():
    h1, h2 = direction(post_block={1: [1.0, 2.0]}).packed, direction(post_block={1: [3.0, 4.0]}).packed
    tensors = {"h1/post_block/00000001": [1.0, 2.0], "h2/post_block/00000001": [3.0, 4.0]}
    assert payload_digest(ConceptPairPayload(h1=h1, h2=h2)) == by_hand("concept_pair", tensors)


def test_matrices_keep_their_shape_and_are_hashed_in_row_order():
    payload = LinearPayload(weight=tensor((2, 2), [1, 2, 3, 4]), bias=tensor((2,), [5, 6]))
    assert payload_digest(payload) == by_hand("linear", {"weight": [1, 2, 3, 4], "bias": [5, 6]})
    assert canonical_numbers(payload)["weight"].tolist() == [[1, 2], [3, 4]]
    low = LowRankPayload(projector1=tensor((3, 1), [1, 2, 3]), projector2=tensor((3, 1), [4, 5, 6], "float64"))
    assert payload_digest(low) == by_hand("lowrank", {"projector1": [1, 2, 3], "projector2": [4, 5, 6]})


def test_a_reft_payload_is_its_layers():
    tensors = {"rotate_layer": [1, 2], "learned_source_weight": [3, 4], "learned_source_bias": [5]}

    def reft(layer):
        return ReftPayload(
            rotate_layer=tensor((2, 1), tensors["rotate_layer"]),
            learned_source_weight=tensor((1, 2), tensors["learned_source_weight"]),
            learned_source_bias=tensor((1,), tensors["learned_source_bias"]),
            layer=layer,
        )

    assert payload_digest(reft(None)) == by_hand("reft", tensors)
    assert payload_digest(reft(0)) == by_hand("reft", tensors, {"layer": 0})


def test_a_router_is_its_fields_with_the_defaults_written_out():
    fields = {
        "mode": "soft",
        "expert_ids": [3, 1],
        "activate_ids": [],
        "deactivate_ids": [],
        "epsilon": 0.01,
        "lambda": 0.5,
        "topk": 8,
        "seed": 0,
    }
    payload = RouterPayload(layers={"3": RouterLayer(mode="soft", expert_ids=[3, 1])})
    assert payload_digest(payload) == by_hand("router", {}, {"layers": {"3": fields}})
    spelled = RouterPayload(layers={"3": RouterLayer(mode="soft", expert_ids=[3, 1], lambda_=0.5, topk=8)})
    assert payload_digest(spelled) == payload_digest(payload)
    other = RouterPayload(layers={"3": RouterLayer(mode="soft", expert_ids=[3, 1], seed=1)})
    assert payload_digest(other) != payload_digest(payload)


@pytest.mark.parametrize(
    ("packed", "prefix", "code", "param"),
    [
        (rows({1: [float("nan")]}), "", "not_finite", "packed.post_block.data"),
        (rows({1: [1.0], 2: [float("inf")]}), "payload", "not_finite", "payload.packed.post_block.data"),
        (rows({1: [1e39]}, "float64"), "", "not_finite", "packed.post_block.data"),
        (rows({1: [3e38]}, "float32", [2.0]), "", "not_finite", "packed.post_block.data"),
        (rows({1: [1.0]}, "float32", [float("nan")]), "", "not_finite", "packed.post_block.scales[0]"),
        (
            SteeringHookPacked(dtype="float16", shape=[1, 1], layer_indices=[1], data=struct.pack("<e", math.inf)),
            "",
            "not_finite",
            "packed.post_block.data",
        ),
        (
            SteeringHookPacked(dtype="float32", shape=[1, 2], layer_indices=[1], data=b"1234"),
            "",
            "shape_mismatch",
            "packed.post_block.data",
        ),
        (
            SteeringHookPacked(dtype="float32", shape=[2, 1], layer_indices=[1, 1], data=pack([1, 2])),
            "",
            "duplicate_layer",
            "packed.post_block.layer_indices[1]",
        ),
    ],
)
def test_bad_numbers_are_named(packed, prefix, code, param):
    with pytest.raises(SteeringError) as caught:
        canonical(DirectionPayload(packed={"post_block": packed}), prefix)
    assert (caught.value.code, caught.value.param) == (code, param)


def test_bad_matrices_are_named():
    with pytest.raises(SteeringError) as caught:
        canonical(LinearPayload(weight=tensor((1, 1), [math.nan])), "steer.payload")
    assert (caught.value.code, caught.value.param) == ("not_finite", "steer.payload.weight.data")


@pytest.mark.parametrize("hook", ["nowhere", "post_block/00000001\0", "", "h1/post_block"])
def test_a_hook_cannot_imitate_another_path(hook):
    with pytest.raises(SteeringError) as caught:
        canonical(direction(**{hook: {1: [1.0]}}))
    assert caught.value.code == "unknown_hook"


def test_sites_are_listed_in_execution_order():
    payload = direction(post_block={4: [1.0] * 3, 2: [1.0] * 3}, pre_attn={4: [1.0] * 3}, attn_heads={4: [1.0] * 5})
    sites = [("post_block", 2, 3), ("pre_attn", 4, 3), ("attn_heads", 4, 5), ("post_block", 4, 3)]
    assert sites_of(payload) == sites_of(InlineVec(packed=payload.packed)) == sites
    assert sites_of(ConceptPairPayload(h1=payload.packed, h2=payload.packed)) == sites
    router = RouterPayload(layers={"10": RouterLayer(mode="soft"), "9": RouterLayer(mode="soft")})
    assert sites_of(router) == [("router_logits", 9, 0), ("router_logits", 10, 0)]
    assert sites_of(LinearPayload(weight=tensor((1, 1), [1]))) == []


def test_stored_numbers_digest_the_same():
    payload = direction(post_block={1: [1.0, 2.0], 2: [3.0, 4.0]})
    stored = canonical(payload)
    assert numbers_digest(stored.kind, stored.numbers, stored.metadata) == stored.digest == payload_digest(payload)
    backwards = {path: tensor[::-1].copy()[::-1] for path, tensor in reversed(stored.numbers.items())}
    assert numbers_digest("direction", backwards, {}) == stored.digest
    assert stored.nbytes == 16
