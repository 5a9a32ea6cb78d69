"""Gates of the oracle: every scope spelled out as static vectors on the rows it must have reached."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from .checks import (
    HEADS_WIDTH,
    HIDDEN,
    LAST,
    PROMPT,
    SCOPES,
    N,
    P,
    assert_differ,
    assert_same,
    logprobs_along,
    run,
)
from .models import one_hot, random_direction
from .sources import NotAdmissibleError, Site, decode_packed
from .wire import ALWAYS, ALWAYS_IN_ANSWER, OBSERVE, Json, add, gate, inline, probe, static

STEER = random_direction(20, HIDDEN, [2], norm=12.0)
PROBE = random_direction(21, HIDDEN, [2])


def _middle(model: LlamaForCausalLM) -> float:
    """A threshold that some rows of the unsteered answer pass and some do not."""
    observe = gate(probe(PROBE, 0.0, at="answer"), "this_token", OBSERVE)
    return float(np.median(run(model, [observe]).gates[0].scores))


def test_always_adds_are_static_adds(model: LlamaForCausalLM) -> None:
    for scope, (at, where) in itertools.product(SCOPES, (("generated", "generation"), ("answer", "answer"))):
        gated = run(model, [gate({"kind": "always", "at": at}, scope, add(STEER, 0.5))])
        fixed = run(model, {"vectors": [static(STEER, {where: "all"}, scale=0.5)]})
        assert gated.logprobs == fixed.logprobs
        first = P if at == "generated" else P - 1
        assert gated.gates[0].fired_rows == list(range(first, P + N - 1))
        assert gated.gates[0].latched == (scope == "rest_of_conversation")


@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("at", ["generated", "answer"])
def test_extreme_thresholds_are_always_and_never(model: LlamaForCausalLM, scope: str, at: str) -> None:
    plain = run(model)
    never = run(model, [gate(probe(PROBE, 1e9, at=at), scope, add(STEER))])
    assert never.logprobs == plain.logprobs
    assert never.gates[0].fired_rows == []
    below = run(model, [gate(probe(PROBE, 1e9, at=at, fires="below"), scope, add(STEER))])
    fires = run(model, [gate(probe(PROBE, -1e9, at=at), scope, add(STEER))])
    assert fires.logprobs == below.logprobs
    always = run(model, [gate({"kind": "always", "at": at}, scope, add(STEER))])
    if scope == "next_step":  # evidence is needed first: one row later
        first = 1 if at == "generated" else 0
        where = {"generation_window": [first, None]}
        assert_same(fires, run(model, {"vectors": [static(STEER, where)]}))
        assert_differ(fires, always)
    else:
        assert fires.logprobs == always.logprobs
    assert_differ(fires, plain)


def test_above_and_below_are_complements(model: LlamaForCausalLM) -> None:
    threshold = _middle(model)
    above, below = (
        run(model, [gate(probe(PROBE, threshold, fires=fires, at="answer"), "this_token", OBSERVE)])
        for fires in ("above", "below")
    )
    assert above.logprobs == below.logprobs == run(model).logprobs
    rows = set(range(P - 1, P + N - 1))
    silent = {row.row for row in above.gates[0].rows if row.score == threshold}
    fired = set(above.gates[0].fired_rows), set(below.gates[0].fired_rows)
    assert fired[0] | fired[1] | silent == rows
    assert not fired[0] & fired[1]
    assert fired[0]
    assert fired[1]
    for a, b in zip(above.gates[0].rows, below.gates[0].rows, strict=True):
        assert a.weight + b.weight == pytest.approx(1)


def test_a_score_equal_to_the_threshold_fires_nothing(model: LlamaForCausalLM) -> None:
    score = run(model, [gate(probe(PROBE, 0.0), "this_token", OBSERVE)]).gates[0].rows[1].score
    assert score is not None
    for fires in ("above", "below"):
        rows = run(model, [gate(probe(PROBE, score, fires=fires), "this_token", OBSERVE)]).gates[0].rows
        assert not rows[1].fired
        assert rows[1].weight == 0.5


@pytest.mark.parametrize("at", ["generated", "prompt_end", "answer"])
def test_rows_a_gate_looks_at(model: LlamaForCausalLM, at: str) -> None:
    trace = run(model, [gate(probe(PROBE, -1e9, at=at), "this_token", add(STEER))]).gates[0]
    looked = {"generated": range(P, P + N - 1), "prompt_end": [P - 1], "answer": range(P - 1, P + N - 1)}[at]
    assert [row.row for row in trace.rows] == list(range(P - 1, P + N - 1))
    assert [row.row for row in trace.rows if row.score is not None] == list(looked)
    assert trace.fired_rows == list(looked)
    assert [row.row for row in trace.rows if row.weight] == list(looked)


@pytest.mark.parametrize("score", ["dot", "cosine"])
def test_scores_by_hand(model: LlamaForCausalLM, score: str) -> None:
    packed = random_direction(22, HIDDEN, [1], norm=3.0)
    result = run(model, [gate(probe(packed, 0.0, score=score, at="answer"), "this_token", OBSERVE)])
    with torch.no_grad():
        states = model(torch.tensor([PROMPT + result.tokens[:-1]]), output_hidden_states=True).hidden_states
    x = states[2][0, P - 1 :].double().numpy()
    v = decode_packed(packed)[Site(1, "post_block")].double().numpy()
    expected = x @ v
    if score == "cosine":
        expected /= np.sqrt((x * x).sum(1)) * 3.0
    np.testing.assert_allclose(result.gates[0].scores, expected, atol=1e-4)


def test_soft_weight_by_hand(model: LlamaForCausalLM) -> None:
    threshold, sharpness = _middle(model), 0.7
    for sign, fires in ((1, "above"), (-1, "below")):
        when = probe(PROBE, threshold, sharpness=sharpness, fires=fires, at="answer")
        result = run(model, [gate(when, "this_token", add(STEER))])
        rows = result.gates[0].rows
        for row in rows:
            assert row.score is not None
            expected = 1 / (1 + math.exp(-sign * sharpness * (row.score - threshold)))
            assert row.weight == pytest.approx(expected)
            assert row.weight_before == 0
            assert row.fired == (sign * (row.score - threshold) > 0)
        # The same weights, spelled as one static vector per row.
        fixed = [
            static(STEER, {"prompt_positions": [-1]} if row.row < P else {"generation_positions": [row.row - P]},
                   scale=row.weight)
            for row in rows
        ]  # fmt: skip
        assert_same(result, run(model, {"vectors": fixed}))
        assert_differ(result, run(model))


def test_soft_weight_saturates(model: LlamaForCausalLM) -> None:
    for threshold, weight in ((1e308, 0.0), (-1e308, 1.0)):
        when = probe(PROBE, threshold, sharpness=1e308)
        rows = run(model, [gate(when, "this_token", OBSERVE)]).gates[0].rows
        assert {row.weight for row in rows[1:]} == {weight}


def test_next_step_is_one_row_later(model: LlamaForCausalLM) -> None:
    threshold = _middle(model)
    result = run(model, [gate(probe(PROBE, threshold, at="answer"), "next_step", add(STEER))])
    trace = result.gates[0]
    last = P + N - 2
    assert 0 < len(trace.fired_rows) < N
    expected = [row + 1 for row in trace.fired_rows if row < last]
    assert [row.row for row in trace.rows if row.weight] == expected
    assert all(row.weight == row.weight_before for row in trace.rows)
    where = {"generation_positions": [row - P for row in expected]}
    assert_same(result, run(model, {"vectors": [static(STEER, where)]}))


@pytest.mark.parametrize("scope", ["rest_of_request", "rest_of_conversation"])
def test_lasting_scopes_start_at_the_firing_row(model: LlamaForCausalLM, scope: str) -> None:
    """At the firing row from the probe site on; at later rows everywhere, so the earlier layer joins one row later."""
    both = {
        "post_block": random_direction(23, HIDDEN, [0, LAST], norm=8.0)["post_block"],
        "mlp_out": random_direction(24, HIDDEN, [2], "mlp_out", norm=8.0)["mlp_out"],
    }
    observe = gate(probe(PROBE, 0.0), "this_token", OBSERVE)
    threshold = run(model, [observe]).gates[0].scores[0]  # so it can't fire at the first row it looks at
    result = run(model, [gate(probe(PROBE, threshold), scope, add(both))])
    trace = result.gates[0]
    first = trace.fired_rows[0]
    assert P < first < P + N - 3
    assert [(row.row, row.weight_before) for row in trace.rows if row.weight][:2] == [(first, 0.0), (first + 1, 1.0)]
    assert all(row.weight == 1 for row in trace.rows if row.row >= first)
    assert all(row.score is not None for row in trace.rows if row.row > first)
    assert trace.latched == (scope == "rest_of_conversation")
    at_last = static(both, {"generation_window": [first - P, None]}, layers=[LAST])
    at_first = static(both, {"generation_window": [first - P + 1, None]}, layers=[0, 2])
    assert_same(result, run(model, {"vectors": [at_last, at_first]}))
    assert_differ(result, run(model, {"vectors": [at_last, static(both, at_last["where"], layers=[0, 2])]}))


def test_the_probe_sees_earlier_steering_and_not_its_own_site(model: LlamaForCausalLM) -> None:
    packed = random_direction(25, HIDDEN, [LAST])
    observe = gate(probe(packed, 0.0, at="answer"), "this_token", OBSERVE)
    plain = run(model, [observe])
    followed = {"forced": plain.tokens}
    here = {"vectors": [static(random_direction(26, HIDDEN, [LAST], norm=9.0))], "gates": [observe]}
    assert run(model, here, **followed).gates[0].scores == plain.gates[0].scores
    before = random_direction(26, HIDDEN, [LAST], "mlp_out", norm=9.0)
    v = decode_packed(before)[Site(LAST, "mlp_out")]
    p = decode_packed(packed)[Site(LAST, "post_block")]
    for earlier in (
        {"vectors": [static(before)], "gates": [observe]},
        [gate(ALWAYS_IN_ANSWER, "this_token", add(before)), observe],
    ):
        moved = run(model, earlier, **followed).gates[-1].scores
        np.testing.assert_allclose(np.subtract(moved, plain.gates[0].scores), float(v @ p), atol=1e-4)


def test_gates_leave_the_prompt_alone(model: LlamaForCausalLM) -> None:
    short = run(model, [gate(ALWAYS_IN_ANSWER, "this_token", add(STEER))], max_tokens=1)
    only_end = run(model, {"vectors": [static(STEER, {"prompt_positions": [-1]})]}, max_tokens=1)
    assert short.logprobs == only_end.logprobs


STATIC = [
    static(random_direction(30, HIDDEN, [1, LAST], norm=12.0)),
    static(random_direction(31, HIDDEN, [1]), algorithm="erase", scale=2.0),
]


def test_attenuate_to_all_and_to_nothing(model: LlamaForCausalLM) -> None:
    steered = run(model, {"vectors": STATIC})
    always = ALWAYS_IN_ANSWER
    keep_all = [gate(always, "this_token", {"kind": "attenuate", "keep": 1})]
    assert run(model, {"vectors": STATIC, "gates": keep_all}).logprobs == steered.logprobs
    keep_none = [gate(always, "this_token", {"kind": "attenuate", "keep": 0})]
    before_answer = [{**spec, "where": {"prompt_window": [0, -1]}} for spec in STATIC]
    damped = run(model, {"vectors": STATIC, "gates": keep_none})
    assert_same(damped, run(model, {"vectors": before_answer}))
    assert_differ(damped, steered)
    assert_differ(damped, run(model))


def test_attenuations_multiply_and_adds_are_not_damped(model: LlamaForCausalLM) -> None:
    replace = random_direction(32, HIDDEN, [LAST], norm=30.0)
    extra = random_direction(33, HIDDEN, [LAST], norm=10.0)
    r, e = (decode_packed(packed)[Site(LAST, "post_block")] for packed in (replace, extra))
    threshold = 0.3
    when = probe(random_direction(34, HIDDEN, [LAST]), threshold, sharpness=0.2, at="answer")
    gates = [
        gate(ALWAYS_IN_ANSWER, "this_token", {"kind": "attenuate", "keep": 0.6}),
        gate(when, "this_token", {"kind": "attenuate", "keep": 0.25}),
        gate(ALWAYS_IN_ANSWER, "this_token", add(extra, -2.0)),
    ]
    result = run(model, {"vectors": [static(replace, algorithm="replace")], "gates": gates})
    w = torch.tensor([row.weight for row in result.gates[1].rows])
    assert w.min() < 0.5 < w.max()

    def by_hand(hidden: torch.Tensor) -> torch.Tensor:
        x = hidden[P - 1 :]
        factor = (0.6 * (1 - 0.75 * w)).unsqueeze(1)
        return torch.cat([hidden[: P - 1], x + factor * (r - x) - 2.0 * e])

    np.testing.assert_allclose(result.logprobs, logprobs_along(model, result.tokens, by_hand), atol=1e-4)


def test_attenuation_reaches_from_the_probe_site_on(model: LlamaForCausalLM) -> None:
    vectors = [static(random_direction(35, HIDDEN, [0, 2, LAST], norm=10.0))]
    when = probe(PROBE, -1e9, at="answer")
    damped = run(model, {"vectors": vectors, "gates": [gate(when, "this_token", {"kind": "attenuate", "keep": 0})]})
    out_of_reach = {**vectors[0], "layers": [0]}
    reached = {**vectors[0], "layers": [2, LAST], "where": {"prompt_window": [0, -1]}}
    assert_same(damped, run(model, {"vectors": [out_of_reach, reached]}))


def test_attention_add_is_attenuated_too(model: LlamaForCausalLM) -> None:
    packed = one_hot(5, HEADS_WIDTH, [1], "attn_heads", value=20.0)
    steered = [static(packed, algorithm="attention_add")]
    half = [gate(ALWAYS_IN_ANSWER, "rest_of_request", {"kind": "attenuate", "keep": 0.5})]
    equal = [
        static(packed, {"prompt_window": [0, -1]}, algorithm="attention_add"),
        static(packed, {"answer": "all"}, algorithm="attention_add", scale=0.5),
    ]
    damped = run(model, {"vectors": steered, "gates": half})
    assert_same(damped, run(model, {"vectors": equal}))
    assert_differ(damped, run(model, {"vectors": steered}))


def test_bridged_gates_hold_at_every_answer_row(model: LlamaForCausalLM) -> None:
    vectors = {"steer": {"joy": {"packed": STEER}}, "probe": {"mood": {"packed": PROBE}}}
    latched = gate(
        {"kind": "probe", "probe": {"kind": "name", "name": "mood"}, "threshold": 1e9},
        "rest_of_conversation",
        {"kind": "add", "steer": {"kind": "name", "name": "joy"}},
    )
    everywhere = run(model, {"vectors": [static(STEER, {"answer": "all"})]})
    again = {**latched, "label": "once more", "when": {**latched["when"], "probe": inline(PROBE), "fires": "above"}}
    for request in (None, [again]):  # declared again, under other spellings: still once
        result = run(model, request, vectors=vectors, bridged=[latched, latched])
        assert result.logprobs == everywhere.logprobs
    assert result.gates[0].bridged
    assert result.gates[0].latched
    assert result.gates[0].rows == []
    assert run(model, False, vectors=vectors, bridged=[latched]).logprobs == run(model).logprobs
    damp = gate(ALWAYS, "rest_of_conversation", {"kind": "attenuate", "keep": 0.5})
    damped = run(model, {"vectors": [static(STEER, {"answer": "all"}, scale=2.0)]}, bridged=[damp])
    assert_same(damped, everywhere)


def test_default_comes_first_and_locked_last(model: LlamaForCausalLM) -> None:
    own = {"vectors": [static(random_direction(40, HIDDEN, [LAST], norm=10.0))]}
    replace = static(random_direction(41, HIDDEN, [LAST], norm=10.0), algorithm="replace")
    default = {"vectors": [replace], "conflict": "priority"}
    assert run(model, own, default=default).logprobs == run(model, {"vectors": [replace, *own["vectors"]]}).logprobs
    assert run(model, {**own, "inherit_default": False}, default=default).logprobs == run(model, own).logprobs
    assert run(model, False, default=default).logprobs == run(model).logprobs

    off = gate(ALWAYS_IN_ANSWER, "this_token", {"kind": "attenuate", "keep": 0})
    boost = gate(ALWAYS_IN_ANSWER, "this_token", add(random_direction(42, HIDDEN, [LAST], norm=10.0)))
    locked = run(model, {**own, "gates": [off, boost]}, default=default, locked=True)
    assert locked.logprobs == run(model, default).logprobs
    assert_differ(locked, run(model, {**own, "gates": [off, boost]}, default=default))
    for request in (False, {"inherit_default": False}):
        with pytest.raises(NotAdmissibleError, match="default_locked"):
            run(model, request, default=default, locked=True)


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (gate(probe(random_direction(1, HIDDEN, [1, 2]), 0), "next_step", add(STEER)), "probe_not_single_site"),
        (gate(probe(random_direction(1, HIDDEN, [LAST]), 0), "this_token", add(STEER)), "steer_before_probe"),
        (gate(ALWAYS, "next_step", OBSERVE), "observe_scope"),
        (gate(probe(one_hot(0, HIDDEN, [1], value=0.0), 0), "next_step", add(STEER)), "zero_vector"),
        (gate(ALWAYS, "next_step", add(random_direction(1, HEADS_WIDTH, [1], "attn_heads"))), "hook_not_allowed"),
        (gate(ALWAYS, "next_step", add(random_direction(1, HIDDEN, [LAST + 1]))), "unknown_layer"),
        (gate({**ALWAYS, "threshold": 1.0}, "next_step", add(STEER)), "unknown_field"),
        (gate({**ALWAYS, "at": "prompt_end"}, "next_step", add(STEER)), "out_of_range"),
    ],
)
def test_gates_that_mean_nothing_are_refused(model: LlamaForCausalLM, bad: Json, code: str) -> None:
    with pytest.raises(NotAdmissibleError, match=code):
        run(model, [bad])
