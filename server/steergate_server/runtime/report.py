"""The steering report of one answer, from its plan, its tokens and the scheduler's books."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, Literal

import msgspec
import numpy as np
from msgspec.structs import replace

from steergate_server.runtime.admission import Admitted
from steergate_server.runtime.books import MAX_ROWS, GateBook, logged_rows
from steergate_server.runtime.conversations import CONVERSATION_SCOPE
from steergate_server.runtime.plan import Plan, PlannedGate, PlannedVector, SiteName, Stack
from steergate_server.runtime.selection import select
from steergate_server.schema.hooks import site_name, site_order
from steergate_server.schema.reports import ChoiceReport, GateReport, VectorReport

Status = Literal["ran", "bridged", "overridden"]


def vector_report(vector: PlannedVector, selected: int | None = None, applied: int | None = None) -> VectorReport:
    """A static vector; the counts of rows only where they are known, for a choice."""
    return VectorReport(
        label=vector.label,
        digest=vector.digest,
        algorithm=vector.algorithm,
        sites=[site_name(*site) for site in sorted(vector.sites, key=lambda site: site_order(*site))],
        positions_selected=selected,
        positions_applied=applied,
    )


def choice_report(
    admitted: Admitted,
    index: int,
    prompt: Sequence[int],
    output: Sequence[int],
    accounts: Mapping[str, Any],
    text_of: Callable[[int], str],
) -> ChoiceReport:
    """What was applied to one choice, whose tokens are `prompt` and `output`.

    accounts: the scheduler's last snapshot of the request's book, empty if none came. `gates`: of those that ran; where
    the turn was bridged also `ran`, which of the plan's gates those are, and `bridge`, what was latched before.
    text_of: the text of a token.
    """
    gates = _gate_reports(admitted, accounts, len(prompt), len(output))
    stacks = reversed(admitted.plan.stacks)
    vectors = [vector for stack in stacks for vector in _vector_reports(stack, prompt, output)]
    report = ChoiceReport(index=index, vectors=vectors, gates=gates)
    if admitted.plan.report != "scores":
        return report
    return _with_scores(report, [*prompt, *output], len(prompt), accounts, cache(text_of))


def _gate_reports(
    admitted: Admitted, accounts: Mapping[str, Any], prompt_length: int, output_length: int
) -> list[GateReport]:
    plan = admitted.plan
    ran = dict(zip(accounts.get("ran", range(len(plan.gates))), accounts.get("gates", ()), strict=False))
    bridge = [msgspec.convert(gate, PlannedGate) for gate in accounts.get("bridge", ())]
    declared = {gate.identity for gate in plan.gates}
    latched = {gate.identity for gate in bridge}
    gates: list[tuple[PlannedGate, Mapping[str, Any], Status]] = [
        (gate, ran.get(number, _EMPTY), "bridged" if gate.identity in latched else "ran")
        for number, gate in enumerate(plan.gates)
    ]
    gates += [(gate, _EMPTY, "overridden") for gate in admitted.overridden]
    gates += [(gate, _EMPTY, "bridged") for gate in bridge if gate.identity not in declared]
    return [_gate_report(plan, gate, book, prompt_length, output_length, status) for gate, book, status in gates]


def _with_scores(
    report: ChoiceReport,
    tokens: list[int],
    prompt_length: int,
    accounts: Mapping[str, Any],
    text_of: Callable[[int], str],
) -> ChoiceReport:
    """The report with the scores of its gates, and the answer rows with their weights.

    A bridged gate has weight 1 at every answer row, one that was not run has 0.
    """
    ran = sum(gate.status == "ran" for gate in report.gates)
    if ran and "rows" in accounts:
        rows = list(logged_rows(accounts["rows"], ran))
    else:
        first = max(prompt_length - 1, len(tokens) - 1 - MAX_ROWS)
        rows = [] if ran else [(row, [], []) for row in range(first, len(tokens) - 1)]
    lanes = iter(range(ran))
    lane_of = [next(lanes) if gate.status == "ran" else None for gate in report.gates]
    fixed = [1.0 if gate.status == "bridged" else 0.0 for gate in report.gates]

    def weights_of(weights: list[float]) -> list[float]:
        return [fixed[at] if lane is None else weights[lane] for at, lane in enumerate(lane_of)]

    return replace(
        report,
        gates=[
            replace(
                gate,
                scores=[
                    (row, _finite(scores[lane]))
                    for row, scores, _ in rows
                    if lane is not None and not math.isnan(scores[lane])
                ],
            )
            for gate, lane in zip(report.gates, lane_of, strict=True)
        ],
        tokens=[(row, tokens[row], text_of(tokens[row]), weights_of(weights)) for row, _, weights in rows],
    )


def _finite(score: float) -> float:
    """A score as JSON can hold it: the product of large finite numbers may be infinite."""
    return max(-_LARGEST, min(_LARGEST, score))


_LARGEST = float(np.finfo(np.float32).max)
_EMPTY = GateBook().snapshot()


def _vector_reports(stack: Stack, prompt: Sequence[int], output: Sequence[int]) -> list[VectorReport]:
    vectors = stack.vectors
    if not vectors or not prompt:
        return [vector_report(vector, 0, 0) for vector in vectors]
    # The last token of an answer is never an input, so it has no row.
    tokens = np.asarray(output[:-1], dtype=np.int64)
    selection = select(stack.clauses, prompt, len(prompt) + len(output) + 1)
    masks = np.concatenate((selection.prompt, selection.generated(np.arange(len(tokens)), tokens)))
    values, counts = np.unique(masks, return_counts=True)
    acting = {int(mask): _acting(stack, int(mask)) for mask in values}
    reports = []
    for number, vector in enumerate(vectors):
        rows = [(int(mask), int(count)) for mask, count in zip(values, counts, strict=True) if int(mask) >> number & 1]
        selected = sum(count for _, count in rows)
        applied = sum(count for mask, count in rows if number in acting[mask])
        reports.append(vector_report(vector, selected, applied))
    return reports


def _acting(stack: Stack, mask: int) -> set[int]:
    """The vectors that act anywhere on a row that selects a set of them: `priority` can leave some out."""
    vectors = stack.vectors
    found = [vector for here in stack.at_sites(mask).values() for vector in here]
    return {number for number, vector in enumerate(vectors) if any(vector is other for other in found)}


def _gate_report(
    plan: Plan,
    gate: PlannedGate,
    book: Mapping[str, Any],
    prompt_length: int,
    output_length: int,
    status: Status,
) -> GateReport:
    first: Literal["steered", "partly", "untouched"]
    if status == "bridged":
        first = "untouched" if gate.apply == "observe" else "steered"
    else:
        looked_at_end = status == "ran" and gate.at != "generated" and output_length > 0
        first = _first_answer_token(plan, gate, looked_at_end, book["first_fired"] == prompt_length - 1)
    lasting = plan.conversation is not None and gate.scope == CONVERSATION_SCOPE
    fired = book["fired"] > 0 or (gate.when == "always" and output_length > 0)
    return GateReport(
        label=gate.label,
        when=gate.when,
        scope=gate.scope,  # type: ignore[arg-type]
        apply=gate.apply,
        status=status,
        evaluated=book["evaluated"],
        fired=book["fired"],
        first_fired=book["first_fired"],
        last_fired=book["last_fired"],
        max_score=None if book["max_score"] is None else _finite(book["max_score"]),
        latched=status == "bridged" or (status == "ran" and lasting and fired),
        sites_out_of_reach=[site_name(*site) for site in sites_out_of_reach(plan, gate)],
        first_answer_token=first,
    )


def sites_out_of_reach(plan: Plan, gate: PlannedGate) -> list[SiteName]:
    """Sites with static steering that an attenuating this_token probe gate never reaches: those before its probe."""
    if gate.apply != "attenuate" or gate.scope != "this_token" or gate.probe_site is None:
        return []
    probe = site_order(*gate.probe_site)
    sites = {site for vector in plan.vectors for site in vector.sites if site_order(*site) < probe}
    return sorted(sites, key=lambda site: site_order(*site))


def _first_answer_token(
    plan: Plan, gate: PlannedGate, looked: bool, fired: bool
) -> Literal["steered", "partly", "untouched"]:
    """Whether the row of the first answer token, the prompt end, was steered by a gate."""
    if gate.apply == "observe" or not looked:
        return "untouched"
    if gate.when == "always":
        return "steered"
    if gate.scope == "this_token":
        return "partly"  # the weight is a sigmoid: neither 0 nor 1
    if not fired or gate.scope == "next_step":
        return "untouched"
    # A lasting gate that fires at this very row reaches it from the probe's site on.
    probe = gate.probe_site
    sites = gate.steer_sites if gate.apply == "add" else {site for vector in plan.vectors for site in vector.sites}
    reached = [probe is None or site_order(*site) >= site_order(*probe) for site in sites]
    if all(reached):
        return "steered"
    return "partly" if any(reached) else "untouched"
