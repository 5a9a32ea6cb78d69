"""One steered HTTP request: what the middleware admitted, and what the engine reported of it."""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

from steergate_server.runtime.admission import Admitted
from steergate_server.runtime.report import choice_report, vector_report
from steergate_server.schema.errors import SteeringError
from steergate_server.schema.reports import SteeringReport

current_call: ContextVar[SteeredCall | None] = ContextVar("steergate_call", default=None)
"""The call that the running handler serves; None for one without steering."""


class _Choice:
    """One engine request of a call, as far as its outputs have come."""

    def __init__(self) -> None:
        self.prompt: Sequence[int] = ()
        self.output: list[int] = []
        self.books: dict[str, Any] = {}


class SteeredCall:
    """Shared by the middleware and the generate wrapper for the length of one HTTP request."""

    def __init__(self, admitted: Admitted) -> None:
        self.admitted = admitted
        self.failure: SteeringError | None = None
        self._choices: list[_Choice] = []

    @property
    def wants_report(self) -> bool:
        """Whether the client asked for a report."""
        return self.admitted.plan.report != "none"

    @property
    def reached_engine(self) -> bool:
        """Whether any engine request was made for it."""
        return bool(self._choices)

    def open_choice(self) -> int:
        """A new engine request starts; returns its choice index. Engine requests start in the order of the prompts."""
        self._choices.append(_Choice())
        return len(self._choices) - 1

    def observe(self, index: int, prompt: Sequence[int], tokens: Sequence[int], books: dict[str, Any]) -> None:
        """Take over one output of an engine request: its new tokens, and the scheduler's books if they came."""
        choice = self._choices[index]
        choice.prompt = prompt
        choice.output += tokens
        if "gates" in books:
            choice.books = books

    def last_row(self, index: int) -> int:
        """The last row of an engine request whose output the client was given."""
        choice = self._choices[index]
        return len(choice.prompt) + len(choice.output) - 2

    def report(self) -> SteeringReport:
        """The report as it stands."""
        plan = self.admitted.plan
        return SteeringReport(
            fingerprint=self.admitted.fingerprint,
            default=self.admitted.default,
            vectors=[vector_report(vector) for stack in reversed(plan.stacks) for vector in stack.vectors],
            choices=[
                choice_report(self.admitted, index, choice.prompt, choice.output, choice.books)
                for index, choice in enumerate(self._choices)
            ],
        )
