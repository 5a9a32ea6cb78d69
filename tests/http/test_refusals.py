"""Bad steering over HTTP: the right status, code and param, and not a token generated."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from reference.models import pack, random_direction
from reference.wire import ALWAYS, OBSERVE, Json, add, gate, inline, probe, static
from support.server import ROUTES, Answer, Api, request_body

HIDDEN = 64
VECTOR = random_direction(1, HIDDEN, [1, 2])
PROBE = random_direction(2, HIDDEN, [1])
ROW = VECTOR["post_block"]
GATE = gate(ALWAYS, "this_token", add(VECTOR))
TYPES = {400: "invalid_request_error", 403: "permission_error", 413: "invalid_request_error"}


class Case(NamedTuple):
    """A request that must be refused. `more`: members beside `steering`; `raw`: rewrites the body's text."""

    name: str
    code: str
    param: str | None
    steering: Any = None
    more: Json | None = None
    status: int = 400
    raw: Callable[[str], str] | None = None
    says: str = ""


def vector(**changes: Any) -> Json:
    """A request of one vector, changed."""
    return {"vectors": [{**static(VECTOR), **changes}]}


def where(**clause: Any) -> Json:
    return vector(where=clause)


def steer(hook: str = "post_block", **changes: Any) -> Json:
    """A request of one inline vector whose rows at `hook` are changed."""
    return vector(steer=inline({hook: {**ROW, **changes}}))


def name(of: str, **more: Any) -> Json:
    return {"kind": "name", "name": of, **more}


def probing(packed: Json = PROBE, scope: str = "this_token", apply: Json = OBSERVE, **more: Any) -> list[Json]:
    """A list of one probe gate."""
    return [gate(probe(packed, **{"threshold": 0.0, **more}), scope, apply)]


def named_probe(of: str) -> Json:
    return {"kind": "probe", "probe": name(of), "threshold": 0.0}


def literal(marker: str, text: str) -> Callable[[str], str]:
    """Puts a literal that Python cannot write in place of a marker."""

    def rewrite(body: str) -> str:
        assert json.dumps(marker) in body
        return body.replace(json.dumps(marker), text)

    return rewrite


def number_bytes(value: float) -> str:
    rows = np.zeros((2, HIDDEN), dtype="<f4")
    rows[1, 5] = value
    return base64.b64encode(rows.tobytes()).decode()


VEC = "steering.vectors[0]"
ROWS = f"{VEC}.steer.packed.post_block"

SHAPE = [
    Case("string", "invalid_type", "steering", "{}", says="not a string"),
    Case("true", "invalid_type", "steering", True, says="`true`"),
    Case("number", "invalid_type", "steering", 3),
    Case("unknown-field", "unknown_field", "steering.gate", {"gate": []}, says="`gates`"),
    Case("misspelt-in-vector", "unknown_field", f"{VEC}.scael", vector(scael=1), says="`scale`"),
    Case("misspelt-in-where", "unknown_field", f"{VEC}.where.promt", where(promt="all"), says="`prompt`"),
    Case("misspelt-in-rows", "unknown_field", f"{ROWS}.layers", steer(layers=[1])),
    Case("misspelt-in-gate", "unknown_field", "steering[0].when.treshold", probing(treshold=1), says="`threshold`"),
    Case("gate-in-object", "unknown_field", "steering.gates[0].scop", {"gates": [{**GATE, "scop": 1}]}),
    Case("no-where", "missing_field", f"{VEC}.where", {"vectors": [{"steer": inline(VECTOR)}]}),
    Case("no-scope", "missing_field", "steering[0].scope", [{"when": ALWAYS, "apply": OBSERVE}]),
    Case("no-kind", "missing_field", "steering[0].when.kind", [{**GATE, "when": {}}]),
    Case("no-steer", "missing_field", f"{VEC}.steer", vector(steer=None)),
    Case("wrong-source-kind", "unknown_kind", f"{VEC}.steer.kind", vector(steer={"kind": "file"}), says="`inline`"),
    Case("wrong-when-kind", "unknown_kind", "steering[0].when.kind", [{**GATE, "when": {"kind": "once"}}]),
    Case("wrong-scope", "unknown_kind", "steering[0].scope", [{**GATE, "scope": "next_token"}], says="`next_step`"),
    Case("wrong-dtype", "unknown_kind", f"{ROWS}.dtype", steer(dtype="fp8")),
    Case("wrong-report", "unknown_kind", "steering.report", {"report": "full"}),
    Case("scale-as-text", "invalid_type", f"{VEC}.scale", vector(scale="1")),
    Case("layer-as-float", "invalid_type", f"{VEC}.layers[0]", vector(layers=[1.5])),
    Case("negative-layer", "out_of_range", f"{VEC}.layers[0]", vector(layers=[-1])),
    Case(
        "keep-above-one",
        "out_of_range",
        "steering[0].apply.keep",
        [{**GATE, "apply": {"kind": "attenuate", "keep": 2}}],
    ),
    Case("zero-sharpness", "out_of_range", "steering[0].when.sharpness", probing(sharpness=0)),
    Case("bad-name", "invalid_name", f"{VEC}.steer.name", vector(steer=name("../x"))),
    Case("nan-literal", "not_finite", "steering[0].when.threshold", probing(threshold="@"), raw=literal("@", "NaN")),
    Case("infinity-literal", "not_finite", f"{VEC}.scale", vector(scale="@"), raw=literal("@", "-Infinity")),
    Case("too-large-number", "out_of_range", f"{VEC}.scale", vector(scale="@"), raw=literal("@", "1e999")),
    Case("bad-base64", "invalid_base64", f"{ROWS}.data", steer(data="!!!!")),
    Case("base64-without-padding", "invalid_base64", f"{ROWS}.data", steer(data=ROW["data"].rstrip("="))),
    Case("too-few-bytes", "shape_mismatch", f"{ROWS}.data", steer(data=ROW["data"][:-8]), says="512"),
    Case("one-dimension", "shape_mismatch", f"{ROWS}.shape", steer(shape=[128])),
    Case("layers-for-other-rows", "shape_mismatch", f"{ROWS}.layer_indices", steer(layer_indices=[1, 2, 3])),
    Case("scales-for-other-rows", "shape_mismatch", f"{ROWS}.scales", steer(scales=[1.0])),
    Case("duplicate-layer", "duplicate_layer", f"{ROWS}.layer_indices[1]", steer(layer_indices=[1, 1])),
    Case("duplicate-own-layer", "duplicate_layer", f"{VEC}.layers[1]", vector(layers=[2, 2])),
    Case("too-many-vectors", "too_many_vectors", "steering.vectors", {"vectors": [static(VECTOR)] * 17}, says="16"),
    Case("too-large", "payload_too_large", "steering", steer(data="A" * 200_000), status=413, says="65536"),
    Case("member-twice", "invalid_json", f"{VEC}.scale", vector(scale="@"), raw=literal("@", '1, "scale": 2')),
    Case("broken-json", "invalid_json", None, vector(), raw=lambda body: body[:-1]),
    Case("conversation-as-number", "invalid_type", "conversation_id", [GATE], {"conversation_id": 7}),
    Case("conversation-empty", "invalid_name", "conversation_id", [GATE], {"conversation_id": ""}),
    Case("conversation-with-space", "invalid_name", "conversation_id", [GATE], {"conversation_id": "a b"}),
    Case("conversation-with-newline", "invalid_name", "conversation_id", [GATE], {"conversation_id": "ab\n"}),
    Case("conversation-too-long", "invalid_name", "conversation_id", [GATE], {"conversation_id": "a" * 257}),
    Case("conversation-alone", "invalid_name", "conversation_id", None, {"conversation_id": "a/b"}),
]

RULES = [
    Case("empty-where", "empty_selection", f"{VEC}.where", where()),
    Case("empty-list", "empty_selection", f"{VEC}.where.prompt_tokens", where(prompt_tokens=[])),
    Case(
        "exclude-without-phase",
        "exclude_without_phase",
        f"{VEC}.where.exclude_generation_positions",
        where(prompt="all", exclude_generation_positions=[0]),
    ),
    Case("window-of-nothing", "invalid_window", f"{VEC}.where.prompt_window", where(prompt_window=[3, 3])),
    Case(
        "negative-answer-position",
        "invalid_position",
        f"{VEC}.where.generation_positions[0]",
        where(generation_positions=[-1]),
    ),
    Case(
        "conflict",
        "vector_conflict",
        "steering.vectors[1]",
        {"vectors": [static(VECTOR), static(VECTOR, {"prompt": "all"})], "conflict": "error"},
    ),
    Case("probe-of-two-sites", "probe_not_single_site", "steering[0].when.probe", probing(VECTOR)),
    Case(
        "steer-before-probe",
        "steer_before_probe",
        "steering[0].apply.steer",
        probing(random_direction(1, HIDDEN, [2]), apply=add(VECTOR)),
    ),
    Case(
        "zero-probe",
        "zero_vector",
        "steering[0].when.probe.packed.post_block.data",
        probing(pack("post_block", {1: np.zeros(HIDDEN)})),
    ),
    Case("observe-scope", "observe_scope", "steering[0].scope", probing(scope="next_step")),
    Case(
        "no-conversation",
        "conversation_id_required",
        "steering[0].scope",
        [{**GATE, "scope": "rest_of_conversation", "apply": add(VECTOR) | {"steer": name("happy")}}],
    ),
    Case(
        "inline-for-conversation",
        "inline_conversation_steer",
        "steering[0].apply.steer",
        [{**GATE, "scope": "rest_of_conversation"}],
        {"conversation_id": "a"},
    ),
    Case("unknown-param", "unknown_param", f"{VEC}.params.min", vector(params={"min": 1})),
    Case(
        "normalize-impossible",
        "normalize_not_supported",
        f"{VEC}.normalize",
        vector(algorithm="attention_add", normalize=True, steer=inline({"attn_heads": ROW})),
    ),
    Case("hook-beside-direction", "hook_not_allowed", f"{VEC}.hook", vector(hook="post_block")),
    Case(
        "gate-at-heads",
        "hook_not_allowed",
        "steering[0].when.probe.packed.attn_heads",
        probing({"attn_heads": PROBE["post_block"]}),
    ),
]

MODEL = [
    Case("unknown-name", "unknown_vector", f"{VEC}.steer.name", vector(steer=name("nobody")), says="nobody"),
    Case("probe-as-steer", "unknown_vector", f"{VEC}.steer.name", vector(steer=name("topic")), says="probe"),
    Case(
        "steer-as-probe",
        "unknown_vector",
        "steering[0].when.probe.name",
        [gate(named_probe("happy"), "this_token", OBSERVE)],
        says="steer",
    ),
    Case(
        "unknown-in-gate",
        "unknown_vector",
        "steering[0].apply.steer.name",
        [gate(ALWAYS, "this_token", {"kind": "add", "steer": name("nobody")})],
    ),
    Case(
        "wrong-width",
        "width_mismatch",
        f"{ROWS}.shape[1]",
        vector(steer=inline(random_direction(1, 32, [1]))),
        says="64",
    ),
    Case(
        "probe-of-wrong-width",
        "width_mismatch",
        "steering[0].when.probe.packed.post_block.shape[1]",
        probing(random_direction(1, 65, [1])),
    ),
    Case("layer-out-of-range", "unknown_layer", f"{ROWS}.layer_indices[1]", steer(layer_indices=[1, 4]), says="0 to 3"),
    Case("layer-not-in-payload", "layer_not_in_payload", f"{VEC}.layers[1]", vector(layers=[1, 3]), says="1, 2"),
    Case(
        "layer-not-in-name",
        "layer_not_in_payload",
        f"{VEC}.steer.layers[0]",
        vector(steer=name("happy", layers=[0])),
        says="1, 2",
    ),
    Case("unknown-hook", "unknown_hook", f"{VEC}.steer.packed.mlp_middle", steer("mlp_middle"), says="post_block"),
    Case(
        "hook-not-declared",
        "hook_not_steerable",
        f"{VEC}.steer.packed.post_attn",
        steer("post_attn"),
        says="--steer-hooks",
    ),
    Case("nan-bytes", "not_finite", f"{ROWS}.data", steer(data=number_bytes(float("nan")))),
    Case("infinite-bytes", "not_finite", f"{ROWS}.data", steer(data=number_bytes(float("inf")))),
    Case("too-many-gates-list", "too_many_gates", "steering", [GATE] * 5, says="at most 4"),
    Case("too-many-gates-object", "too_many_gates", "steering.gates", {"gates": [GATE] * 5}, says="at most 4"),
    Case("unknown-algorithm", "unknown_algorithm", f"{VEC}.algorithm", vector(algorithm="directt"), says="direct"),
    Case(
        "algorithm-not-enabled",
        "algorithm_not_enabled",
        f"{VEC}.algorithm",
        vector(steer=name("happy"), algorithm="attention_add"),
        says="--steer-algorithms",
    ),
    Case("selects-nothing", "selects_nothing", f"{VEC}.where", vector(where={"prompt_positions": [400]})),
    Case(
        "not-lowerable",
        "not_lowerable",
        "steering.vectors[1]",
        {"vectors": [*vector(normalize=True)["vectors"], *vector()["vectors"]]},
        says="--steer-graph-mode split",
    ),
    Case(
        "nothing-to-attenuate",
        "nothing_to_attenuate",
        "steering[0].apply",
        [{**GATE, "apply": {"kind": "attenuate", "keep": 0.5}}],
    ),
    Case("beam-search", "steering_not_supported_here", "use_beam_search", vector(), {"use_beam_search": True, "n": 2}),
    Case("gates-beside-steering", "unknown_field", "gates", None, {"gates": [GATE]}, says="inside of `steering`"),
    Case("vectors-alone", "unknown_field", "vectors", None, {"vectors": []}, says="inside of `steering`"),
    Case("in-xargs", "unknown_field", "vllm_xargs", None, {"vllm_xargs": {"steering": "x"}}, says="of the body"),
    Case("reserved-argument", "reserved_field", "vllm_xargs.steergate", None, {"vllm_xargs": {"steergate": "x"}}),
    Case(
        "reserved-beside-steering",
        "reserved_field",
        "vllm_xargs.steergate",
        vector(),
        {"vllm_xargs": {"steergate": "x"}},
    ),
    Case(
        "reserved-transfer",
        "reserved_field",
        "kv_transfer_params.steergate",
        None,
        {"kv_transfer_params": {"steergate": {}}},
    ),
    Case(
        "reserved-deep",
        "reserved_field",
        "kv_transfer_params.a[0].steergate",
        None,
        {"kv_transfer_params": {"a": [{"steergate": 1}]}},
    ),
    Case(
        "reserved-escaped",
        "reserved_field",
        "vllm_xargs.steergate",
        None,
        {"vllm_xargs": {"@": "x"}},
        raw=literal("@", '"steer\\u0067ate"'),
    ),
]

MISSPELT = [
    Case(f"member-{member}", "unknown_field", member, more={member: vector()}, says="`steering`")
    for member in ("steerings", "Steering", "STEERING", "steer", "sterring", "stearing", "activation_steering")
] + [
    Case(f"member-{member}", "unknown_field", member, more={member: "a"}, says="`conversation_id`")
    for member in ("conversationId", "conversation-id", "conversation_ids", "Conversation_ID")
]

CASES = {case.name: case for case in (*SHAPE, *RULES, *MODEL, *MISSPELT)}
assert len(CASES) == len([*SHAPE, *RULES, *MODEL, *MISSPELT]), "names are ids"

COUNTERS = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total")


def counts(api: Api) -> dict[str, float]:
    return {counter: api.metric(counter) for counter in COUNTERS}


@pytest.fixture(scope="module", autouse=True)
def _unharmed(api: Api) -> Iterator[None]:
    """Over the whole table nothing runs; afterwards the server is well and answers as before."""
    before = {route: api.ask(route).logprobs for route in ROUTES}
    counted = counts(api)
    yield
    time.sleep(0.3)  # whatever had been started would be counted by now
    assert counts(api) == counted
    assert api.http.get("/health").status_code == 200
    assert {route: api.ask(route).logprobs for route in ROUTES} == before


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_bad_steering_is_refused(api: Api, case: Case, route: str, stream: bool) -> None:
    members = {} if case.steering is None else {"steering": case.steering}
    body = json.dumps(request_body(route, stream=stream, **members, **(case.more or {})))
    counted = counts(api)
    answer = api.send(ROUTES[route], (case.raw(body) if case.raw else body).encode())
    assert_refused(answer, case.status, case.code, case.param)
    assert case.says in answer.error["message"]
    assert counts(api) == counted, "something was generated"


def assert_refused(answer: Answer, status: int, code: str, param: str | None) -> None:
    """A refusal in OpenAI's shape, that says nothing was applied."""
    assert (answer.status, answer.body.get("error", {}).get("code")) == (status, code), answer.body or answer.events
    assert set(answer.body) == {"error"}
    assert set(answer.error) == {"message", "type", "param", "code"}
    assert answer.error["param"] == param
    assert answer.error["type"] == TYPES[status]
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-steering-contract"] == "1.0"
    assert answer.fingerprint is None
    assert "Traceback" not in answer.error["message"]
    assert ".py" not in answer.error["message"]
