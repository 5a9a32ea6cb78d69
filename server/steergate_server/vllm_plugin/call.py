"""One steered HTTP request: what the middleware admitted, and what the engine reported of it."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

from steergate_server.runtime.admission import Admitted
from steergate_server.runtime.books import GateBook
from steergate_server.runtime.selection import count_selected
from steergate_server.schema.errors import SteeringError
from steergate_server.schema.reports import ChoiceReport, GateReport, SteeringReport, VectorReport

current_call: ContextVar[SteeredCall | None] = ContextVar("steergate_call", default=None)
"""The call that the running handler serves; None for one without steering."""


class _Choice:
    """One engine request of a call, as far as its outputs have come."""

    def __init__(self) -> None:
        self.prompt_length = 0
        self.output_length = 0
        self.gates: list[dict[str, Any]] = []


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

    def open_choice(self) -> int:
        """A new engine request starts; returns its choice index. Engine requests start in the order of the prompts."""
        self._choices.append(_Choice())
        return len(self._choices) - 1

    def observe(self, index: int, prompt_length: int, output_length: int, gates: list[dict[str, Any]] | None) -> None:
        """Take over one output of an engine request: its lengths in tokens, and the scheduler's books if they came."""
        choice = self._choices[index]
        choice.prompt_length = prompt_length
        choice.output_length = max(choice.output_length, output_length)
        if gates is not None:
            choice.gates = gates

    def report(self) -> SteeringReport:
        """The report as it stands."""
        plan = self.admitted.plan
        return SteeringReport(
            fingerprint=self.admitted.fingerprint,
            default="none",
            vectors=[self._vector(vector) for vector in plan.vectors],
            choices=[self._choice(index, choice) for index, choice in enumerate(self._choices)],
        )

    def _choice(self, index: int, choice: _Choice) -> ChoiceReport:
        # The last token of an answer is never an input, so it has no row.
        rows = choice.prompt_length + max(0, choice.output_length - 1)
        vectors = []
        for vector in self.admitted.plan.vectors:
            selected = count_selected(vector.where, choice.prompt_length, rows)
            vectors.append(self._vector(vector, selected))
        gates = [
            self._gate(gate, choice.gates[number] if number < len(choice.gates) else GateBook().snapshot(), choice)
            for number, gate in enumerate(self.admitted.plan.gates)
        ]
        return ChoiceReport(index=index, vectors=vectors, gates=gates)

    @staticmethod
    def _vector(vector: Any, selected: int | None = None) -> VectorReport:
        return VectorReport(
            label=vector.label,
            digest=vector.digest,
            algorithm=vector.algorithm,
            sites=[f"{layer}:{hook}" for hook, layer in vector.sites],
            positions_selected=selected,
            positions_applied=selected,
        )

    @staticmethod
    def _gate(gate: Any, book: dict[str, Any], choice: _Choice) -> GateReport:
        end = choice.prompt_length - 1
        looks_at_end = gate.at != "generated" and choice.output_length > 0
        return GateReport(
            label=gate.label,
            when=gate.when,
            scope=gate.scope,
            apply=gate.apply,
            status="ran",
            evaluated=book["evaluated"],
            fired=book["fired"],
            first_fired=book["first_fired"],
            last_fired=book["last_fired"],
            max_score=book["max_score"],
            latched=False,
            sites_out_of_reach=[],
            first_answer_token=_first_answer_token(gate, looks_at_end, book["first_fired"] == end),
        )


def _first_answer_token(gate: Any, looked: bool, fired: bool) -> Any:
    """Whether the row of the first answer token, the prompt end, was steered by a gate."""
    if gate.apply == "observe" or not looked:
        return "untouched"
    if gate.when == "always":
        return "steered"
    if gate.scope == "this_token":
        return "partly"  # the weight is a sigmoid: neither 0 nor 1
    return "steered" if fired and gate.scope != "next_step" else "untouched"
