"""The report by choice, by row, and up to where the answer stops."""

from __future__ import annotations

from typing import Any

import pytest

from reference.models import random_direction
from reference.results import Result
from reference.wire import ALWAYS, ALWAYS_IN_ANSWER, EVERYWHERE, OBSERVE, Json, add, gate, probe, static
from support.server import EVERY_ROUTE, PROMPT, Answer, Api

HIDDEN = 64
VECTOR = random_direction(1, HIDDEN, [1, 2], norm=4.0)
PROBE = random_direction(3, HIDDEN, [1])
LATE_PROBE = random_direction(3, HIDDEN, [2])
ADDED = random_direction(4, HIDDEN, [2, 3], norm=5.0)
EARLY = random_direction(5, HIDDEN, [0], norm=5.0)
HALF = {"kind": "attenuate", "keep": 0.25}
OTHER_PROMPT = [254, *range(60, 70), 255]

GATED: dict[str, list[Json]] = {
    "none": [],
    "always": [gate(ALWAYS, "this_token", add(ADDED)), gate(ALWAYS_IN_ANSWER, "rest_of_request", add(EARLY, 0.3))],
    "one-token-scopes": [
        gate(probe(PROBE, 0.5, at="answer", sharpness=0.5), "this_token", add(ADDED)),
        gate(probe(LATE_PROBE, 0.3, fires="below"), "next_step", add(EARLY)),
        gate(probe(PROBE, 0.5, score="cosine"), "this_token", OBSERVE),
    ],
    "lasting": [
        gate(probe(PROBE, 0.5, at="answer"), "rest_of_request", HALF),
        gate(probe(PROBE, -1.0, at="prompt_end"), "rest_of_request", add(ADDED)),
        gate(probe(LATE_PROBE, 2.0), "rest_of_request", add(ADDED)),
        gate(probe(PROBE, 0.0, at="prompt_end"), "this_token", add(ADDED)),
    ],
}


def asking(gates: list[Json], report: str = "scores") -> Json:
    """A vector and gates, with a report."""
    return {"vectors": [static(VECTOR, EVERYWHERE)], "gates": gates, "report": report}


# Scores ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", [route for route in EVERY_ROUTE if route != "batch"])
@pytest.mark.parametrize("gates", GATED.values(), ids=GATED)
def test_every_score_and_weight_is_told(api: Api, reference: Any, gates: list[Json], route: str, stream: bool) -> None:
    expected = reference(asking(gates))
    answer = api.ask(route, stream=stream, steering=asking(gates))
    assert answer.status == 200, answer.body
    assert answer.report is not None
    assert_scored(answer.report["choices"][0], gates, expected)


def assert_scored(choice: Json, gates: list[Json], expected: Result, prompt: list[int] = PROMPT) -> None:
    """A choice's scores and weights are those of the reference's trace, its tokens those of the answer."""
    tokens = [*prompt, *expected.tokens]
    rows = range(len(prompt) - 1, len(tokens) - 1)
    assert [row for row, *_ in choice["tokens"]] == list(rows)
    assert [token for _, token, *_ in choice["tokens"]] == [tokens[row] for row in rows]
    for _, token, text, weights in choice["tokens"]:
        assert text == (f"t{token}" if token < 253 else {253: "<unk>", 254: "<s>", 255: "</s>"}[token])
        assert len(weights) == len(gates)
    for number, (reported, sent, trace) in enumerate(zip(choice["gates"], gates, expected.gates, strict=True)):
        looked = [(row.row, row.score) for row in trace.rows if row.score is not None]
        if sent["when"]["kind"] == "always":
            looked = []
        assert [row for row, _ in reported["scores"]] == [row for row, _ in looked]
        assert [score for _, score in reported["scores"]] == pytest.approx([score for _, score in looked], abs=1e-4)
        weights = [entry[3][number] for entry in choice["tokens"]]
        assert weights == pytest.approx([row.weight for row in trace.rows], abs=1e-4)


@pytest.mark.parametrize("report", ["none", "summary"])
def test_other_levels_tell_no_scores(api: Api, report: str) -> None:
    answer = api.ask("completions", steering=asking(GATED["lasting"], report))
    assert (answer.report is None) == (report == "none")
    for choice in (answer.report or {"choices": []})["choices"]:
        assert "tokens" not in choice
        assert all("scores" not in seen for seen in choice["gates"])


def test_a_report_of_a_plan_that_does_nothing(api: Api, plain: Result) -> None:
    answer = api.ask("completions", steering={"report": "scores"})
    assert answer.report is not None
    assert_scored(answer.report["choices"][0], [], plain)


# Several choices -------------------------------------------------------------------------------------------------

GATES = GATED["one-token-scopes"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_choices_of_several_prompts_equal_the_reference(api: Api, reference: Any, stream: bool) -> None:
    """`top_k: 1` makes sampling greedy; vLLM refuses several choices at temperature 0."""
    prompts = [PROMPT, OTHER_PROMPT]
    sampled: Json = {"n": 3, "temperature": 1, "top_k": 1, "logprobs": None}
    answer = api.ask("completions", prompts, stream=stream, steering=asking(GATES), **sampled)
    assert answer.status == 200, answer.body
    assert answer.report is not None
    assert [choice["index"] for choice in answer.report["choices"]] == list(range(6))
    for index, choice in enumerate(answer.report["choices"]):
        prompt = prompts[index // 3]
        expected = reference(asking(GATES), prompt)
        assert answer.choices[index].tokens == expected.tokens
        assert_scored(choice, GATES, expected, prompt)


def alone(api: Api, route: str, seed: int, **members: Any) -> Answer:
    """One choice by itself, under the seed that vLLM would give it beside others."""
    return api.ask(route, seed=seed, temperature=1, steering=asking(GATES), **members)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("route", ["completions", "chat", "invocations"])
def test_each_choice_is_reported_as_if_it_were_alone(api: Api, route: str, stream: bool) -> None:
    together = api.ask(route, stream=stream, n=4, seed=7, temperature=1, max_tokens=20, steering=asking(GATES))
    assert together.status == 200, together.body
    assert together.report is not None
    unreported = api.ask(
        route, stream=stream, n=4, seed=7, temperature=1, max_tokens=20, steering=asking(GATES, "none")
    )
    assert [choice.tokens for choice in together.choices] == [choice.tokens for choice in unreported.choices]
    assert len({tuple(choice.tokens) for choice in together.choices}) == 4
    for index, choice in enumerate(together.report["choices"]):
        single = alone(api, route, 7 + index, max_tokens=20)
        assert single.report is not None
        assert together.choices[index].tokens == single.tokens
        assert_alike({**choice, "index": 0}, single.report["choices"][0])


def assert_alike(first: Any, second: Any) -> None:
    """The same values; numbers within 1e-4, since a row is computed in another batch."""
    if isinstance(first, dict):
        assert set(first) == set(second)
        for name in first:
            assert_alike(first[name], second[name])
    elif isinstance(first, list):
        assert len(first) == len(second)
        for one, other in zip(first, second, strict=True):
            assert_alike(one, other)
    elif isinstance(first, float):
        assert first == pytest.approx(second, abs=1e-4)
    else:
        assert first == second


# Stop strings ----------------------------------------------------------------------------------------------------


def end_of(answer: Answer, index: int = 0) -> int:
    """How many tokens a choice has."""
    return len(answer.choices[index].tokens)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("report", ["summary", "scores"])
@pytest.mark.parametrize("at", [1, 4, 7])
def test_a_stop_string_ends_the_report_where_max_tokens_would(api: Api, report: str, stream: bool, at: int) -> None:
    """The API server finds a stop string when the engine may be further on already."""
    steering = asking(GATES, report)
    whole = api.ask("completions", steering=steering, max_tokens=40)
    assert whole.tokens.index(whole.tokens[at]) == at, "a token that occurred before would end the answer there"
    stopped = api.ask("completions", stream=stream, steering=steering, max_tokens=40, stop=[f" t{whole.tokens[at]}"])
    assert stopped.tokens == whole.tokens[: at + 1]
    limited = api.ask("completions", stream=stream, steering=steering, max_tokens=at + 1)
    assert limited.tokens == stopped.tokens
    assert stopped.report is not None
    assert_alike(stopped.report, limited.report)
    gate_of_every_row = stopped.report["choices"][0]["gates"][0]
    assert gate_of_every_row["evaluated"] == at + 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_choices_that_stop_at_different_places(api: Api, stream: bool) -> None:
    sampled: Json = {"n": 4, "seed": 3, "temperature": 1}
    whole = api.ask("completions", stream=stream, steering=asking(GATES), max_tokens=30, **sampled)
    stops = [f" t{whole.choices[index].tokens[at]}" for index, at in enumerate((2, 9, 21))]
    stopped = api.ask("completions", stream=stream, steering=asking(GATES), max_tokens=30, stop=stops, **sampled)
    ends = [end_of(stopped, index) for index in range(4)]
    assert len(set(ends)) >= 3, "choices that end alike test little"
    assert stopped.report is not None
    for index, choice in enumerate(stopped.report["choices"]):
        single = alone(api, "completions", 3 + index, max_tokens=ends[index])
        assert single.tokens == stopped.choices[index].tokens
        assert single.report is not None
        assert_alike({**choice, "index": 0}, single.report["choices"][0])
