"""Holds what a server answered against the reference interpreter."""

from __future__ import annotations

from typing import Any

import pytest

from reference.results import Result
from support.server import Answer


def assert_equals(answer: Answer, expected: Result, choice: int = 0) -> None:
    """Same tokens, text, and logprobs within 1e-4."""
    assert answer.status == 200, answer.body
    given = answer.choices[choice]
    assert given.tokens == expected.tokens
    assert given.text.split() == [f"t{token}" for token in expected.tokens if token < 253]
    assert given.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


def assert_refused(answer: Answer, status: int, code: str, param: str | None) -> None:
    """A refusal with this code and culprit, that says nothing was applied."""
    assert (answer.status, answer.body.get("error", {}).get("code")) == (status, code), answer.body or answer.events
    assert answer.error["param"] == param
    assert answer.fingerprint is None
    assert "x-steering-overridden" not in answer.headers


def gates_of(answer: Answer) -> list[dict[str, Any]]:
    """The gates of the first choice in the report."""
    assert answer.report is not None
    gates: list[dict[str, Any]] = answer.report["choices"][0]["gates"]
    return gates
