"""The scheduler's books, and the report that is written from them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from steergate_server.runtime.admission import Admitted
from steergate_server.runtime.books import MAX_ROWS, RequestBook, RowLog, logged_rows
from steergate_server.runtime.controller import Evidence
from steergate_server.runtime.plan import Plan, PlannedGate
from steergate_server.runtime.report import choice_report
from steergate_server.runtime.sources import param_writer
from steergate_server.schema.decode import encode

ALWAYS = PlannedGate(when="always", at="answer", scope="this_token", apply="observe")
PROBE = PlannedGate(when="probe", at="generated", scope="next_step", apply="observe", probe_digest="d")


def evidence(row: int, lanes: int = 4) -> Evidence:
    """What an engine with more lanes than a request has gates says of a row: the first gate is `always`."""
    score = math.sin(row) * 3
    looked = [True, row > 9, False, False][:lanes]
    scores = [math.nan, score if row > 9 else math.nan, math.nan, math.nan][:lanes]
    weights = [1.0, float(math.sin(row - 1) > 0 and row > 10), 0.0, 0.0][:lanes]
    return Evidence(row, looked, scores, [False, score > 0 and row > 9, False, False][:lanes], weights)


@pytest.mark.parametrize("count", [0, 1, MAX_ROWS - 1, MAX_ROWS, MAX_ROWS + 1, 2 * MAX_ROWS, 3 * MAX_ROWS + 17])
def test_the_log_keeps_the_last_rows(count: int) -> None:
    log = RowLog(2)
    for row in range(count):
        log.add(evidence(row))
    found = list(logged_rows(log.snapshot(), 2))
    assert [row for row, _, _ in found] == list(range(count))[-MAX_ROWS:]
    for row, scores, weights in found:
        expected = evidence(row)
        np.testing.assert_array_equal(scores, np.float32(expected.scores[:2]))
        np.testing.assert_array_equal(weights, np.float32(expected.weights[:2]))


def test_the_log_does_not_grow() -> None:
    log = RowLog(2)
    for row in range(5 * MAX_ROWS):
        log.add(evidence(row))
    held = [len(values) for values in (log._positions, log._scores, log._weights)]
    assert held[1] == held[2] == 2 * held[0] < 2 * 2 * MAX_ROWS


def test_rows_come_with_a_snapshot_that_may_be_the_last() -> None:
    book = RequestBook(Plan(gates=(ALWAYS, PROBE), report="scores"))
    book.accept(evidence(9))
    assert set(book.snapshot(last=False)) == {"gates"}
    assert set(book.snapshot()) == {"gates", "rows"}
    assert set(RequestBook(Plan(gates=(ALWAYS,), report="summary")).snapshot()) == {"gates"}


def admitted(plan: Plan) -> Admitted:
    """What admission makes of a plan."""
    return Admitted(plan, "", (), (None,) * len(plan.vectors), param_writer(False))


def report(plan: Plan, output: int, text: Any = str) -> Any:
    """The report of a prompt of ten tokens, 100 and so on, and of an answer of `output` tokens, 500 and so on."""
    book = RequestBook(plan)
    for row in range(9, 9 + output):
        book.accept(evidence(row))
    prompt = list(range(100, 110))
    told = book.snapshot() if plan.gates else {}
    return choice_report(admitted(plan), 0, prompt, [500 + n for n in range(output)], told, text)


def test_scores_and_tokens_by_row() -> None:
    told = report(Plan(gates=(ALWAYS, PROBE), report="scores"), 30, text=lambda token: f"<{token}>")
    rows = range(9, 39)
    assert [entry[0] for entry in told.tokens] == list(rows)
    assert [entry[1] for entry in told.tokens] == [109, *range(500, 529)]
    assert all(text == f"<{token}>" for _, token, text, _ in told.tokens)
    assert [entry[3] for entry in told.tokens] == [evidence(row).weights[:2] for row in rows]
    assert told.gates[0].scores == []
    assert [row for row, _ in told.gates[1].scores] == list(rows)[1:]
    assert [score for _, score in told.gates[1].scores] == pytest.approx([math.sin(row) * 3 for row in rows][1:])


@pytest.mark.parametrize("gates", [(), (ALWAYS, PROBE)], ids=["vectors-only", "gates"])
def test_a_long_answer_tells_its_last_rows(gates: tuple[PlannedGate, ...]) -> None:
    told = report(Plan(gates=gates, report="scores"), 5_000)
    assert [entry[0] for entry in told.tokens] == list(range(9, 5_009))[-MAX_ROWS:]
    assert told.tokens[-1][1] == 5_498
    for gate, expected in zip(told.gates, (5_000, 4_999), strict=False):
        assert gate.evaluated == expected, "counts are of all rows"


@pytest.mark.parametrize("gates", [(), (ALWAYS,)], ids=["vectors-only", "gates"])
def test_an_answer_without_tokens_has_no_rows(gates: tuple[PlannedGate, ...]) -> None:
    assert report(Plan(gates=gates, report="scores"), 0).tokens == []


def test_scores_beyond_json_stay_numbers() -> None:
    """The product of finite float32 rows may overflow."""
    plan = Plan(gates=(PROBE,), report="scores")
    book = RequestBook(plan)
    for row, score in ((10, math.inf), (11, -math.inf)):
        book.accept(Evidence(row, [True], [score], [score > 0], [0.0]))
    told = choice_report(admitted(plan), 0, list(range(10)), [1, 2, 3], book.snapshot(), str)
    largest = float(np.finfo(np.float32).max)
    assert [score for _, score in told.gates[0].scores or ()] == [largest, -largest]
    assert told.gates[0].max_score == largest
    assert b"null" not in encode(told.gates[0].scores)
