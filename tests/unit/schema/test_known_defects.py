"""Spellings that were taken elsewhere and then dropped, or read as something else; here each is refused by name."""

import json

import pytest

from steergate_server.schema.decode import decode_steering
from steergate_server.schema.errors import SteeringError
from unit.schema.examples import changed, gate, inline, named, packed, vector


def refusal(document) -> tuple[str, str | None]:
    with pytest.raises(SteeringError) as refused:
        decode_steering(json.dumps(document).encode())
    return refused.value.code, refused.value.param


@pytest.mark.parametrize("dtype", [">f4", "<f4", "f4", "int32", "int8", "float", "Float32", "bool", "float8_e4m3fn"])
def test_no_dtype_but_the_four(dtype):
    """Whatever an array library makes of it: another order of bytes, integers."""
    rows = changed(inline(), ("packed", "post_block", "dtype"), dtype)
    document = {"vectors": [vector(steer=rows)]}
    assert refusal(document) == ("unknown_kind", "steering.vectors[0].steer.packed.post_block.dtype")


ROWS = packed([[1.0] * 4], [3])
OTHER_FORMS = {
    "rows-by-layer": ({"3": [1.0] * 4}, '["3"]', "unknown_field"),
    "vector-and-scale": ({"3": {"vector": [1.0] * 4, "scale": 2.0}}, '["3"]', "unknown_field"),
    "bare-rows": ([[1.0] * 4], "", "invalid_type"),
    "nothing": (None, "", "invalid_type"),
}


@pytest.mark.parametrize(("rows", "at", "code"), OTHER_FORMS.values(), ids=OTHER_FORMS)
@pytest.mark.parametrize("others", [["pre_attn"], ["pre_attn", "mlp_in"], []], ids=len)
def test_every_hook_has_the_packed_form(rows, at, code, others):
    """Not only the first one, by which the form might be told."""
    source = {"kind": "inline", "packed": {**dict.fromkeys(others, ROWS), "post_block": rows}}
    for document, path in (
        ({"vectors": [vector(steer=source)]}, "steering.vectors[0].steer"),
        ([gate(apply={"kind": "add", "steer": source})], "steering[0].apply.steer"),
    ):
        assert refusal(document) == (code, f"{path}.packed.post_block{at}")


@pytest.mark.parametrize(
    ("changes", "code", "at"),
    [
        ({"apply": {"kind": "clamp", "strength": 1.0}}, "unknown_kind", "apply.kind"),
        ({"apply": {"kind": "attenuate"}}, "missing_field", "apply.keep"),
        ({"apply": {"kind": "attenuate", "strength": 0.5}}, "unknown_field", "apply.strength"),
        ({"apply": {"kind": "add", "steer": named(), "sharpness": 1}}, "unknown_field", "apply.sharpness"),
        ({"apply": {"kind": "add", "steer": {"kind": "inline", "name": "calm"}}}, "unknown_field", "apply.steer.name"),
        ({"apply": {"kind": "add", "steer": "calm"}}, "invalid_type", "apply.steer"),
        ({"when": {"kind": "always", "threshold": 1}}, "unknown_field", "when.threshold"),
        ({"when": "always"}, "invalid_type", "when"),
        ({"conversation_id": "a"}, "unknown_field", "conversation_id"),
        ({"scope": None}, "invalid_type", "scope"),
    ],
    ids=str,
)
def test_gates_have_no_other_members(changes, code, at):
    assert refusal([gate(), gate(**changes)]) == (code, f"steering[1].{at}")
