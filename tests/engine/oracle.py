"""Holds what an engine answered against the reference interpreter, request by request."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from reference.interpreter import Result, generate
from reference.models import load_hf
from reference.results import GateTrace
from steergate_server.runtime.books import logged_rows
from support.engines import Answer, SteeredEngine

TOLERANCE = 1e-4
"""Between log-probabilities of two float32 implementations; they are seen to differ by about 1e-5."""

DIFFERENCE = 1e-2
"""Between log-probabilities, if the comparison of two answers is to mean anything."""

TIE = 1e-3
"""Two tokens that are closer than this may change places."""


class Case(NamedTuple):
    """One request: a prompt, the wire's `steering` value, and how many tokens to answer.

    `around`: what else acts, by the reference's own words (`bridged`, `default`, `locked`).
    """

    prompt: list[int]
    request: Any
    max_tokens: int = 10
    around: Mapping[str, Any] | tuple[()] = ()


def prompt(seed: int, length: int) -> list[int]:
    """A random prompt of words."""
    return np.random.default_rng(seed).integers(0, 250, size=length).tolist()


class Oracle:
    """The reference interpreter over the engines' model, with the vectors that they have registered."""

    def __init__(self, path: Path, registered: dict[str, dict[str, Any]]) -> None:
        self._model = load_hf(path)
        self.registered = registered
        self._known: dict[str, Result] = {}

    def along(self, case: Case, tokens: Sequence[int]) -> Result:
        """The reference's account of an answer that consists of these tokens."""
        key = json.dumps([*case[:3], dict(case.around), list(tokens)], sort_keys=True)
        if key not in self._known:
            self._known[key] = self._generate(case, forced=list(tokens), max_tokens=len(tokens))
        return self._known[key]

    def free(self, case: Case) -> Result:
        """The reference's own answer."""
        return self._generate(case, max_tokens=case.max_tokens)

    def _generate(self, case: Case, **options: Any) -> Result:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # rows are too small to share out
        try:
            return generate(
                self._model, case.prompt, case.request, vectors=self.registered, **dict(case.around), **options
            )
        finally:
            torch.set_num_threads(threads)

    def check(self, case: Case, answer: Answer) -> None:
        """Assert that an answer is the reference's: tokens, log-probabilities, and the books of its gates."""
        assert answer.finish_reason == "length", answer.ours
        assert len(answer.tokens) == len(answer.logprobs) == case.max_tokens
        expected = self.along(case, answer.tokens)
        check_margins(case, expected)
        np.testing.assert_allclose(answer.logprobs, expected.logprobs, rtol=0, atol=TOLERANCE)
        for token, top in zip(answer.tokens, expected.top_logprobs, strict=True):
            (best, first), (_, second), *_ = top.items()
            assert token == best or first - second < TIE
        report = case.request.get("report") if isinstance(case.request, dict) else None
        running = [trace for trace in (*expected.default_gates, *expected.gates) if not trace.bridged]
        if report:
            for book, trace in zip(answer.ours["gates"], running, strict=True):
                check_book(book, trace)
        if report == "scores":
            check_rows(answer.ours["rows"], running)


def check_margins(case: Case, expected: Result) -> None:
    """Assert that no score lies so near its threshold that rounding decides whether the gate fires."""
    gates = case.request.get("gates", []) if isinstance(case.request, dict) else case.request or []
    for gate, trace in zip(gates, expected.gates, strict=True):
        margins = [abs(score - gate["when"]["threshold"]) for score in trace.scores]
        assert min(margins, default=1.0) > TOLERANCE / 2, "a score lies too near its threshold: choose another one"


def check_book(book: dict[str, Any], trace: GateTrace) -> None:
    """Assert that a gate's report says what the reference traced."""
    fired = trace.fired_rows
    assert {name: book[name] for name in book if name != "max_score"} == {
        "evaluated": sum(row.fired or row.score is not None for row in trace.rows),
        "fired": len(fired),
        "first_fired": fired[0] if fired else None,
        "last_fired": fired[-1] if fired else None,
    }
    if trace.scores:
        assert book["max_score"] == pytest.approx(max(trace.scores), rel=TOLERANCE, abs=TOLERANCE)
    else:
        assert book["max_score"] is None


def check_rows(logged: dict[str, bytes], traces: list[GateTrace]) -> None:
    """Assert that the log of a request's rows has every answer row, with the reference's scores and weights."""
    rows = list(logged_rows(logged, len(traces)))
    for number, trace in enumerate(traces):
        assert [row for row, _, _ in rows] == [row.row for row in trace.rows]
        scores = [np.nan if row.score is None else row.score for row in trace.rows]
        weights = [row.weight for row in trace.rows]
        np.testing.assert_allclose([row[1][number] for row in rows], scores, rtol=TOLERANCE, atol=TOLERANCE)
        np.testing.assert_allclose([row[2][number] for row in rows], weights, rtol=0, atol=10 * TOLERANCE)


def run_cold(engine: SteeredEngine, cases: Sequence[Case]) -> list[Answer]:
    """Run cases on an engine, 32 at a time, each batch from a cold prefix cache."""
    answers: list[Answer] = []
    for start in range(0, len(cases), 32):
        batch = cases[start : start + 32]
        engine.llm.reset_prefix_cache()
        answers += engine.steer(
            [case.prompt for case in batch],
            [case.request for case in batch],
            [case.max_tokens for case in batch],
        )
    return answers


def differ(left: Answer, right: Answer) -> bool:
    """Whether two answers to one prompt are so far apart that no rounding explains it."""
    pairs = zip(left.logprobs, right.logprobs, strict=True)
    return left.tokens != right.tokens or max(abs(a - b) for a, b in pairs) > DIFFERENCE


def check_batch(engine: SteeredEngine, oracle: Oracle, cases: Sequence[Case]) -> list[Answer]:
    """Run cases on an engine and assert that each answer is the reference's."""
    answers = run_cold(engine, cases)
    for number, (case, answer) in enumerate(zip(cases, answers, strict=True)):
        try:
            oracle.check(case, answer)
        except AssertionError as error:
            error.add_note(f"case {number} of {len(cases)}: {len(case.prompt)} prompt tokens, {_short(case.request)}")
            raise
    return answers


def _short(request: Any) -> str:
    """A request without its numbers."""

    def strip(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: strip(inner) for key, inner in value.items() if key not in ("data", "shape", "dtype")}
        return [strip(inner) for inner in value] if isinstance(value, list) else value

    return json.dumps(strip(request))
