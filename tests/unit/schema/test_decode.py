"""Decoding: what comes in, and how what does not is refused."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steergate_server.schema.decode import decode, decode_conversation_id, decode_steering, encode
from steergate_server.schema.errors import ERROR_CODES, SteeringError, format_path
from steergate_server.schema.registry import RegisterRequest, ServerDefault
from steergate_server.schema.requests import SteeringRequest
from unit.schema.examples import FULL, WHERE, changed, gate, inline, payload, places, request, vector, without


def refusal(raw: bytes | str, read: Any = decode_steering) -> SteeringError:
    with pytest.raises(SteeringError) as caught:
        read(raw.encode() if isinstance(raw, str) else raw)
    assert ERROR_CODES[caught.value.code].ring == "shape" or caught.value.code in ("empty_selection", *WINDOW_CODES)
    assert caught.value.status == 400
    assert caught.value.message.endswith((".", "?"))
    return caught.value


WINDOW_CODES = ("invalid_window", "invalid_position")


def said(error: SteeringError) -> tuple[str, str | None]:
    return error.code, error.param


def test_the_full_example_decodes_and_comes_back():
    plan = decode_steering(json.dumps(FULL).encode())
    assert isinstance(plan, SteeringRequest)
    assert decode_steering(encode(plan)) == plan
    router = plan.vectors[6].steer.payload.layers["3"]
    assert (router.lambda_, router.topk, router.epsilon) == (-0.5, 4, 0.02)
    assert plan.vectors[0].where.prompt_window == (-5, None)


def test_defaults_are_the_wire_documents():
    plan = decode_steering(request(vectors=[{"where": WHERE}], gates=[gate(when={"kind": "always"})]))
    spec = plan.vectors[0]
    assert (plan.conflict, plan.inherit_default, plan.report) == ("sequential", True, "none")
    assert (spec.steer, spec.algorithm, spec.scale, spec.layers, spec.hook) == (None, "direct", 1.0, None, None)
    assert (spec.normalize, spec.params, spec.label) == (False, {}, None)
    assert plan.gates[0].when.at == "generated"
    when = decode_steering(request(gates=[gate()])).gates[0].when
    assert (when.sharpness, when.fires, when.score, when.at) == (1.0, "above", "dot", "generated")
    assert encode(plan.vectors[0]) == b'{"where":{"answer":"all"}}'


@pytest.mark.parametrize("raw", ["null", "[]", "{}", " [ ] ", '{"vectors": []}', '{"report":"none"}', "\n{}\t"])
def test_nothing_asked_inherits_the_default(raw):
    assert decode_steering(raw.encode()) is None


def test_false_is_no_steering_at_all():
    assert decode_steering(b" false\n") is False


def test_a_list_is_short_for_gates():
    as_list = decode_steering(json.dumps([gate(), gate()]).encode())
    as_object = decode_steering(request(gates=[gate(), gate()]))
    assert as_list == as_object


TOO_LARGE = "1" + "0" * 400
BAD = [
    # Not JSON
    ("", "invalid_json", "steering"),
    ("{", "invalid_json", "steering"),
    ('{"vectors":[', "invalid_json", "steering"),
    ('{"vectors":[]} x', "invalid_json", "steering"),
    ("{'vectors':[]}", "invalid_json", "steering"),
    ("\ufeff{}", "invalid_json", "steering"),
    (b'{"vectors":[{"label":"\xff"}]}', "invalid_json", "steering"),
    (b'{"vectors":[{"label":"a\x01"}]}', "invalid_json", "steering"),
    (r'{"vectors":[{"where":{"answer":"all"},"label":"\ud800"}]}', "invalid_json", "steering.vectors[0].label"),
    (r'{"conflict":"\udc00"}', "invalid_json", "steering.conflict"),
    (r'{"a\ud800":1}', "invalid_json", r'steering["a\ud800"]'),
    ('{"gates":[],"gates":[]}', "invalid_json", "steering.gates"),
    ('{"vectors":[{"where":{"answer":"all","answer":"all"}}]}', "invalid_json", "steering.vectors[0].where.answer"),
    ("[" * 100_000 + "]" * 100_000, "invalid_json", "steering"),
    ('{"vectors":' + "[" * 100_000, "invalid_json", "steering"),
    ('{"a":' * 100_000, "invalid_json", "steering"),
    # Not a request
    ("true", "invalid_type", "steering"),
    ("5", "invalid_type", "steering"),
    ('"{}"', "invalid_type", "steering"),
    ("[[]]", "invalid_type", "steering[0]"),
    ("[null]", "invalid_type", "steering[0]"),
    # Unknown and missing
    ('{"vektors":[]}', "unknown_field", "steering.vektors"),
    ('{"x` - at `$.gates[0]":1}', "unknown_field", 'steering["x` - at `$.gates[0]"]'),
    ('{"vectors":[{"where":{},"x` - at `$.vectors":1}]}', "unknown_field", 'steering.vectors[0]["x` - at `$.vectors"]'),
    ('{"a`b":1}', "unknown_field", 'steering["a`b"]'),
    ('{"vectors":[{}]}', "missing_field", "steering.vectors[0].where"),
    ('{"gates":[{"when":{}}]}', "missing_field", "steering.gates[0].when.kind"),
    ('[{"when":{"kind":"always"},"scope":"next_step"}]', "missing_field", "steering[0].apply"),
    # Not finite, too large
    ('[{"when":{"kind":"probe","threshold":NaN}}]', "not_finite", "steering[0].when.threshold"),
    ('{"gates":[{"when":{"kind":"probe","threshold":-Infinity}}]}', "not_finite", "steering.gates[0].when.threshold"),
    (
        '{"vectors":[{"where":{"answer":"all"},"params":{"a b":Infinity}}]}',
        "not_finite",
        'steering.vectors[0].params["a b"]',
    ),
    ('{"vectors":[{"scale":1e400}]}', "out_of_range", "steering.vectors[0].scale"),
    ('{"vectors":[{"scale":-1e400}]}', "out_of_range", "steering.vectors[0].scale"),
    ('{"vectors":[{"params":{"max":1,"min":1e999}}]}', "out_of_range", "steering.vectors[0].params.min"),
    ('{"vectors":[{"scale":' + "9" * 100_000 + "}]}", "out_of_range", "steering.vectors[0].scale"),
    ('{"vectors":[{"params":{"seed":' + "9" * 100_000 + "}}]}", "out_of_range", "steering.vectors[0].params.seed"),
    ('{"vectors":[{"layers":[' + TOO_LARGE + "]}]}", "out_of_range", "steering.vectors[0].layers[0]"),
    ('{"vectors":[{"layers":[2147483648]}]}', "out_of_range", "steering.vectors[0].layers[0]"),
]


@pytest.mark.parametrize(("raw", "code", "param"), BAD, ids=[str(row[0])[:40] + f"-{i}" for i, row in enumerate(BAD)])
def test_bad_documents(raw, code, param):
    assert said(refusal(raw)) == (code, param)


V0 = ("vectors", 0)
INLINE_AT = ("vectors", 1, "steer", "packed", "post_block")
ROUTER_AT = ("vectors", 6, "steer", "payload", "layers", "3")
PROBE_AT = ("gates", 0, "when")
WRONG = [
    ((*V0, "algorithm"), "", "out_of_range"),
    ((*V0, "algorithm"), 5, "invalid_type"),
    ((*V0, "scale"), "1.0", "invalid_type"),
    ((*V0, "scale"), True, "invalid_type"),
    ((*V0, "layers"), [], "out_of_range"),
    ((*V0, "layers", 0), -1, "out_of_range"),
    ((*V0, "layers", 0), 1.0, "invalid_type"),
    ((*V0, "layers", 0), True, "invalid_type"),
    ((*V0, "label"), "x" * 257, "out_of_range"),
    ((*V0, "params"), [], "invalid_type"),
    ((*V0, "params", "min"), {}, "invalid_type"),
    ((*V0, "params", "min"), [-1], "out_of_range", (0,)),
    ((*V0, "params", "min"), ["x"], "invalid_type", (0,)),
    ((*V0, "steer", "kind"), "nme", "unknown_kind"),
    ((*V0, "steer", "kind"), 3, "invalid_type"),
    ((*V0, "steer", "name"), "-calm", "invalid_name"),
    ((*V0, "steer", "name"), "calm\n", "invalid_name"),
    ((*V0, "steer", "name"), "x" * 129, "invalid_name"),
    ((*V0, "steer", "name"), "", "invalid_name"),
    ((*V0, "steer", "name"), "cälm", "invalid_name"),
    ((*V0, "steer", "layers"), [], "out_of_range"),
    ((*V0, "where", "prompt"), "al", "unknown_kind"),
    ((*V0, "where", "prompt"), True, "invalid_type"),
    ((*V0, "where", "prompt_tokens"), [], "empty_selection"),
    ((*V0, "where", "prompt_tokens", 1), -1, "out_of_range"),
    ((*V0, "where", "prompt_positions"), [], "empty_selection"),
    ((*V0, "where", "exclude_generation_tokens"), [], "empty_selection"),
    ((*V0, "where", "generation_positions", 1), -1, "invalid_position"),
    ((*V0, "where", "exclude_generation_positions", 0), -3, "invalid_position"),
    ((*V0, "where", "generation_positions", 1), 2**31, "out_of_range"),
    ((*V0, "where", "prompt_window"), [1], "invalid_window"),
    ((*V0, "where", "prompt_window"), [1, 2, 3], "invalid_window"),
    ((*V0, "where", "prompt_window", 0), None, "invalid_type"),
    ((*V0, "where", "generation_window", 0), -1, "invalid_window"),
    ((*V0, "where", "exclude_generation_window", 1), -1, "invalid_window"),
    ((*V0, "where", "generation_window"), 3, "invalid_type"),
    (("vectors", 1, "normalize"), 1, "invalid_type"),
    (("vectors", 1, "steer", "packed"), {}, "out_of_range"),
    ((*INLINE_AT, "dtype"), "float8", "unknown_kind"),
    ((*INLINE_AT, "shape"), [1], "shape_mismatch"),
    ((*INLINE_AT, "shape"), [1, 2, 3], "shape_mismatch"),
    ((*INLINE_AT, "shape", 1), 0, "out_of_range"),
    ((*INLINE_AT, "data"), "AAA", "invalid_base64"),
    ((*INLINE_AT, "data"), "AA==\n", "invalid_base64"),
    ((*INLINE_AT, "data"), "A-_A", "invalid_base64"),
    ((*INLINE_AT, "data"), 5, "invalid_type"),
    ((*INLINE_AT, "layer_indices"), [], "out_of_range"),
    ((*INLINE_AT, "scales", 1), "x", "invalid_type"),
    (("vectors", 2, "steer", "payload", "kind"), "liner", "unknown_kind"),
    (("vectors", 2, "steer", "payload", "weight", "shape"), [1, 2, 3], "shape_mismatch"),
    ((*ROUTER_AT, "mode"), "sof", "unknown_kind"),
    ((*ROUTER_AT, "topk"), 0, "out_of_range"),
    ((*ROUTER_AT, "lambda"), None, "invalid_type"),
    ((*ROUTER_AT, "expert_ids", 0), -1, "out_of_range"),
    (("conflict",), "last", "unknown_kind"),
    (("report",), None, "invalid_type"),
    (("inherit_default",), None, "invalid_type"),
    (("gates",), {}, "invalid_type"),
    (("gates", 0, "scope"), "this_step", "unknown_kind"),
    (("gates", 0, "apply", "kind"), "ad", "unknown_kind"),
    ((*PROBE_AT, "sharpness"), 0, "out_of_range"),
    ((*PROBE_AT, "sharpness"), -1, "out_of_range"),
    ((*PROBE_AT, "fires"), "over", "unknown_kind"),
    ((*PROBE_AT, "at"), "prompt", "unknown_kind"),
    ((*PROBE_AT, "probe", "kind"), "payload", "unknown_kind"),
    (("gates", 2, "when", "at"), "prompt_end", "unknown_kind"),
    (("gates", 2, "apply", "keep"), 1.01, "out_of_range"),
    (("gates", 2, "apply", "keep"), -0.01, "out_of_range"),
]


@pytest.mark.parametrize("row", WRONG, ids=[format_path(row[0]) + f"={str(row[1])[:20]!r}" for row in WRONG])
def test_one_wrong_member_is_named(row):
    path, value, code, *more = row
    error = refusal(json.dumps(changed(FULL, path, value)))
    assert said(error) == (code, format_path((*path, *(more[0] if more else ())), "steering"))


FREE = {("params",), ("packed",), ("layers",), ("h1",), ("h2",)}
OBJECTS = [path for path, value in places(FULL) if isinstance(value, dict) and path[-1:] not in FREE]
NUMBERS = [p for p, v in places(FULL) if isinstance(v, int | float) and not isinstance(v, bool)]
WORDS = [p for p, v in places(FULL) if isinstance(v, str)]


@pytest.mark.parametrize("path", OBJECTS, ids=lambda path: format_path(path) or "top")
def test_an_unknown_field_is_named_wherever_it_is(path):
    at = (*path, "zz")
    error = refusal(json.dumps(changed(FULL, at, 1)))
    assert said(error) == ("unknown_field", format_path(at, "steering"))


@pytest.mark.parametrize("path", [path for path, _ in places(FULL) if path], ids=format_path)
def test_a_member_of_another_type_is_named_wherever_it_is(path):
    value = next(value for at, value in places(FULL) if at == path)
    wrongs = [{"zz": {}}, [[[]]], *([] if "params" in path else ["\u2603"])]  # a parameter may be a string
    for wrong in wrongs:
        if type(wrong) is type(value):
            continue
        error = refusal(json.dumps(changed(FULL, path, wrong)))
        at = format_path(path, "steering")
        assert error.param is not None
        assert error.param == at or error.param.startswith((f"{at}.", f"{at}[")), (wrong, error)


@pytest.mark.parametrize("literal", ["NaN", "Infinity", "-Infinity"])
@pytest.mark.parametrize("path", [path for path, _ in places(FULL) if path], ids=format_path)
def test_a_literal_that_is_no_number_is_named_wherever_it_is(path, literal):
    raw = json.dumps(changed(FULL, path, float(literal)))
    assert said(refusal(raw)) == ("not_finite", format_path(path, "steering"))


@pytest.mark.parametrize("path", NUMBERS, ids=format_path)
def test_a_number_that_no_float_holds_is_named_wherever_it_is(path):
    raw = json.dumps(changed(FULL, path, "@")).replace('"@"', "1e400")
    error = refusal(raw)
    assert error.param == format_path(path, "steering")
    assert error.code in ("out_of_range", "invalid_type")


REQUIRED = [
    (*V0, "where"),
    (*V0, "steer", "kind"),
    (*V0, "steer", "name"),
    *((*INLINE_AT, name) for name in ("dtype", "shape", "layer_indices", "data")),
    (*ROUTER_AT, "mode"),
    ("gates", 0, "when"),
    ("gates", 0, "scope"),
    ("gates", 0, "apply"),
    ("gates", 0, "when", "probe"),
    ("gates", 0, "when", "threshold"),
    ("gates", 0, "apply", "steer"),
    ("gates", 2, "apply", "keep"),
    ("vectors", 4, "steer", "payload", "rotate_layer"),
]


@pytest.mark.parametrize("path", REQUIRED, ids=format_path)
def test_a_missing_field_is_named(path):
    error = refusal(json.dumps(without(FULL, path)))
    assert said(error) == ("missing_field", format_path(path, "steering"))


def test_keys_that_msgspec_hides_are_found():
    layers = {str(layer): {"mode": "soft", "expert_ids": [1]} for layer in range(40)}
    layers["17"]["topk"] = -1
    raw = request(vectors=[vector(steer=payload("router", layers=layers))])
    assert said(refusal(raw)) == ("out_of_range", 'steering.vectors[0].steer.payload.layers["17"].topk')


@pytest.mark.parametrize("key", ["03", "x", "", "-1", "3\n", "1234567890"])
def test_a_layer_key_that_is_no_layer(key):
    raw = request(vectors=[vector(steer=payload("router", layers={"3": {"mode": "soft"}, key: {"mode": "soft"}}))])
    at = format_path(("vectors", 0, "steer", "payload", "layers", key), "steering")
    assert said(refusal(raw)) == ("invalid_name", at)


def test_seventeen_vectors_are_too_many():
    assert said(refusal(request(vectors=[vector()] * 17))) == ("too_many_vectors", "steering.vectors")
    assert len(decode_steering(request(vectors=[vector()] * 16)).vectors) == 16


def test_the_list_shorthand_has_the_paths_that_were_sent():
    raw = json.dumps([gate(), gate(scope="x")])
    assert said(refusal(raw)) == ("unknown_kind", "steering[1].scope")
    assert said(refusal(request(gates=[gate(), gate(scope="x")]))) == ("unknown_kind", "steering.gates[1].scope")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ('{"gates":[{"when":{"kind":"probe","sharpnes":1}}]}', ["`sharpness`", '"sharpnes"']),
        ('{"conflict":"prioritty"}', ["`priority`", "`sequential`", "`error`"]),
        ('{"gates":[{"when":{"kind":"prob"}}]}', ["`probe`", "`always`"]),
        ('"[]"', ["not a string"]),
        ('{"vectors":[{"layers":[1.0]}]}', ["an integer", "1.0", "without a fraction"]),
        ('{"vectors":[{"scale":true}]}', ["a number", "true"]),
        ('{"gates":[{"apply":{"kind":"attenuate","keep":7}}]}', ["7", "<= 1"]),
    ],
)
def test_messages_say_what_was_given_and_what_is_allowed(raw, words):
    message = refusal(raw).message
    assert all(word in message for word in words), message


def test_messages_and_params_stay_short():
    for raw in ['{"%s":1}' % ("x" * 100_000), '{"conflict":"%s"}' % ("y" * 100_000), '[{"scope":%s}]' % ("9" * 4_000)]:
        error = refusal(raw)
        assert len(error.message) < 500
        assert len(error.param or "") < 200


def test_route_bodies_start_at_the_body():
    read = lambda raw: decode(raw, RegisterRequest)  # noqa: E731
    good = {"name": "calm", "kind": "steer", "packed": inline()["packed"]}
    body = decode(json.dumps(good).encode(), RegisterRequest)
    assert (body.replace, body.metadata) == (False, {})
    bad = changed(good, ("packed", "post_block", "data"), "!")
    assert said(refusal(json.dumps(bad), read)) == ("invalid_base64", "packed.post_block.data")
    assert said(refusal("[]", read)) == ("invalid_type", None)
    assert said(refusal("", read)) == ("invalid_json", None)
    assert said(refusal('{"metadata":{"a":{"b":[1e400]}}}', read)) == ("out_of_range", "metadata.a.b[0]")
    assert said(refusal('{"metadata":' + '{"a":' * 5_000 + "1" + "}" * 5_001, read))[0] == "invalid_json"


def test_a_server_default_takes_digests_and_a_request_does_not():
    source = {"kind": "digest", "digest": "ab" * 32}
    default = {
        "vectors": [vector(steer=source)],
        "gates": [gate(when={"kind": "probe", "probe": source, "threshold": 1})],
        "locked": True,
    }
    read = decode(json.dumps(default).encode(), ServerDefault)
    assert (read.locked, read.client_gates) == (True, "reject")
    assert decode(encode(read), ServerDefault) == read
    assert isinstance(read, SteeringRequest)
    raw = request(vectors=default["vectors"])
    assert said(refusal(raw)) == ("unknown_kind", "steering.vectors[0].steer.kind")


@pytest.mark.parametrize("name", ["c1", "a" * 256, "A.b_c:d-e"])
def test_conversation_ids(name):
    assert decode_conversation_id(json.dumps(name).encode()) == name


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        ('""', "invalid_name"),
        ('"a b"', "invalid_name"),
        ('"c1\\n"', "invalid_name"),
        (f'"{"a" * 257}"', "invalid_name"),
        ('"ü"', "invalid_name"),
        ("5", "invalid_type"),
        ("{", "invalid_json"),
    ],
)
def test_bad_conversation_ids(raw, code):
    assert said(refusal(raw, decode_conversation_id)) == (code, "conversation_id")


def test_no_conversation_id():
    assert decode_conversation_id(b"null") is None


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["probe", "inline", "all"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["vectors", "gates", "when", "kind", "steer", "where", "packed", "x y"]), inner
        )
    ),
    max_leaves=12,
)


def outcome(raw: bytes) -> Any:
    try:
        return decode_steering(raw)
    except SteeringError as error:
        return error


@settings(max_examples=400, deadline=None)
@given(JSON, st.sampled_from(sorted((path for path, _ in places(FULL) if path), key=str)))
def test_whatever_is_sent_is_read_or_refused(value, path):
    for document in (value, changed(FULL, path, value)):
        found = outcome(json.dumps(document).encode())
        if isinstance(found, SteeringError):
            assert found.code in ERROR_CODES
            assert found.param is None or found.param.startswith("steering")
        elif found:
            assert decode_steering(encode(found)) == found


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=40) | st.text(alphabet='{}[]",:\\udN1e-.a ', max_size=40).map(str.encode))
def test_no_bytes_crash_it(raw):
    found = outcome(raw)
    assert not isinstance(found, SteeringError) or found.code in ERROR_CODES
