"""One steered HTTP request: what the middleware admitted, and what the engine reported of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from steergate_server.runtime.admission import Admitted
from steergate_server.runtime.report import choice_report, vector_report
from steergate_server.schema.errors import SteeringError
from steergate_server.schema.reports import SteeringReport

current_call: ContextVar[SteeredCall | None] = ContextVar("steergate_call", default=None)
"""The call that the running handler serves; None for one without steering."""


decided: ContextVar[bool] = ContextVar("steergate_decided", default=False)
"""Whether the middleware has looked at the request of the running handler and decided what steers it, or that nothing
does. What generates without having come that way must not escape a server default."""


class _Choice:
    """One choice of an answer, as far as its outputs have come; `accounts`: the scheduler's last snapshot."""

    def __init__(self) -> None:
        self.prompt: Sequence[int] = ()
        self.output: list[int] = []
        self.accounts: dict[str, Any] = {}


class SteeredCall:
    """Shared by the middleware and the generate wrapper for the length of one HTTP request.

    one_engine_request: the report and the gates of this call speak of a single engine request.
    """

    def __init__(self, admitted: Admitted, *, one_engine_request: bool = False) -> None:
        self.admitted = admitted
        self.one_engine_request = one_engine_request
        self.failure: SteeringError | None = None
        self.answered = False
        """Whether the engine has given any output."""
        self.text_of: Callable[[int], str] = str
        """The text of a token id; the generate wrapper sets it."""
        self._choices: list[_Choice] = []

    @property
    def wants_report(self) -> bool:
        """Whether the client asked for a report."""
        return self.admitted.plan.report != "none"

    @property
    def reached_engine(self) -> bool:
        """Whether any engine request was made for it."""
        return bool(self._choices)

    def open_choices(self, count: int) -> int:
        """A new engine request for `count` choices starts; returns the index of the first.

        Engine requests start in the order of the prompts, and vLLM numbers its choices so: prompt by prompt.
        """
        self._choices += [_Choice() for _ in range(count)]
        return len(self._choices) - count

    def observe(self, index: int, prompt: Sequence[int], tokens: Sequence[int], accounts: dict[str, Any]) -> None:
        """Take over one output for a choice: its new tokens, and the scheduler's snapshot if one came."""
        self.answered = True
        choice = self._choices[index]
        choice.prompt = prompt
        choice.output += tokens
        if "gates" in accounts:
            choice.accounts = accounts

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
                choice_report(self.admitted, index, choice.prompt, choice.output, choice.accounts, self.text_of)
                for index, choice in enumerate(self._choices)
            ],
        )
