"""Gates against the reference: tokens, log-probabilities and books, for the whole matrix and for random programs.

Cases run in batches of 32 in which every request has a program of its own, so they test isolation as well.
"""

from __future__ import annotations

import pytest

from reference.results import GateTrace
from support.engines import Answer, SteeredEngine

from . import programs
from .oracle import Case, Oracle, check_batch, differ, run_cold


@pytest.fixture(scope="package")
def matrix(oracle: Oracle) -> list[Case]:
    return programs.matrix(oracle)


@pytest.fixture(scope="package")
def random_programs(oracle: Oracle) -> list[Case]:
    return programs.random_programs(oracle, 200)


def traces(oracle: Oracle, cases: list[Case], answers: list[Answer]) -> list[GateTrace]:
    """The gates' traces of all cases."""
    return [
        trace for case, answer in zip(cases, answers, strict=True) for trace in oracle.along(case, answer.tokens).gates
    ]


def effective(engine: SteeredEngine, cases: list[Case], answers: list[Answer]) -> int:
    """How many cases have gates that change their answer, beside what static steering does to it."""
    ungated = run_cold(engine, [case._replace(request={"vectors": case.request["vectors"]}) for case in cases])
    return sum(map(differ, answers, ungated))


def test_matrix(engine: SteeredEngine, oracle: Oracle, matrix: list[Case]) -> None:
    answers = check_batch(engine, oracle, matrix)
    acting = sum(case.request["gates"][0]["apply"]["kind"] != "observe" for case in matrix)
    assert effective(engine, matrix, answers) > 0.7 * acting


def test_the_matrix_is_whole(matrix: list[Case]) -> None:
    def kind(case: Case) -> tuple[str, ...]:
        (gate,) = case.request["gates"]
        when = gate["when"]
        options = when["kind"], when.get("at", "generated"), when.get("fires", ""), when.get("score", "")
        return (*options, gate["scope"], gate["apply"]["kind"])

    lasting = 2 * 2  # next_step and rest_of_request, each with add and attenuate
    assert len({kind(case) for case in matrix}) == (2 + 3 * 2 * 2) * (lasting + 3)
    assert {len(case.prompt) for case in matrix} == set(programs.MATRIX_LENGTHS)


def test_random_programs(engine: SteeredEngine, oracle: Oracle, random_programs: list[Case]) -> None:
    answers = check_batch(engine, oracle, random_programs)
    assert effective(engine, random_programs, answers) > 0.7 * len(random_programs)
    looking = [trace for trace in traces(oracle, random_programs, answers) if len(trace.scores) > 1]
    sometimes = [trace for trace in looking if 0 < len(trace.fired_rows) < len(trace.scores)]
    assert len(sometimes) > 0.7 * len(looking), "gates must fire at some rows and not at others"


def test_random_programs_are_various(random_programs: list[Case]) -> None:
    gates = [gate for case in random_programs for gate in case.request["gates"]]
    assert {len(case.request["gates"]) for case in random_programs} == {1, 2, 3, 4}
    assert {len(case.request["vectors"]) for case in random_programs} == {0, 1, 2}
    assert {gate["scope"] for gate in gates} == set(programs.SCOPES)
    assert {gate["apply"]["kind"] for gate in gates} == {"add", "attenuate", "observe"}
    probes = [gate["when"] for gate in gates if gate["when"]["kind"] == "probe"]
    assert len(probes) < len(gates)
    assert {when["at"] for when in probes} == {"generated", "prompt_end", "answer"}
    assert {when["fires"] for when in probes} == {"above", "below"}
    assert {when["score"] for when in probes} == {"dot", "cosine"}
    lengths = [len(case.prompt) for case in random_programs]
    assert min(lengths) == 1
    assert max(lengths) == 200


def test_gates_repeat_exactly(engine: SteeredEngine, random_programs: list[Case]) -> None:
    """A second run of the same batch meets no state that the first one left."""
    batch = random_programs[:32]

    assert run_cold(engine, batch) == run_cold(engine, batch)
