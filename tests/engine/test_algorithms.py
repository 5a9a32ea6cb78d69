"""Every algorithm at every hook, alone and three together, in all graph modes, against the reference."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from reference.wire import ALWAYS_IN_ANSWER, gate
from steergate_server.runtime.config import EngineConfig
from steergate_server.schema.errors import SteeringError
from support.engines import SteeredEngine

from .algorithm_requests import HOOKS, LOWERABLE, Requests
from .conftest import SETTINGS
from .oracle import Case, Oracle, check_batch, prompt

MODES = {"in_graph": LOWERABLE, "split": (*LOWERABLE, "linear"), "compiled": LOWERABLE}


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    """In graph and split without compilation; in graph with it."""
    return str(request.param)


@pytest.fixture(scope="module")
def every_hook(mode: str, tiny: Path) -> Iterator[SteeredEngine]:
    """An engine with every algorithm of the mode and an op at every hook."""
    graph_mode = "split" if mode == "split" else "in_graph"
    config = EngineConfig(hooks=HOOKS, algorithms=MODES[mode], graph_mode=graph_mode, memory_mib=64)
    engine = SteeredEngine(tiny, config=config, enforce_eager=mode != "compiled", **SETTINGS)
    yield engine
    engine.close()


def test_each_algorithm(every_hook: SteeredEngine, oracle: Oracle, mode: str) -> None:
    requests = Requests(1)
    cases = [requests.single(name) for name in MODES[mode] for _ in range(3)]
    check_batch(every_hook, oracle, _admissible(every_hook, cases))


def test_attenuation_damps_every_algorithm(every_hook: SteeredEngine, oracle: Oracle, mode: str) -> None:
    requests = Requests(3)
    halved = gate(ALWAYS_IN_ANSWER, "this_token", {"kind": "attenuate", "keep": 0.4})
    cases = [requests.single(name) for name in MODES[mode]]
    cases = [case._replace(request={**case.request, "gates": [halved]}) for case in cases]
    reached = [case for case in cases if _refusal(every_hook, case) is None]
    assert len(reached) > len(cases) / 2
    check_batch(every_hook, oracle, reached)


def test_one_token_last_chunks(every_hook: SteeredEngine, oracle: Oracle) -> None:
    """A prompt alone in the batch, one token longer than a chunk: the last chunk is still prompt."""
    requests = Requests(4)
    chunk = SETTINGS["max_num_batched_tokens"]
    for length, name in ((chunk + 1, "direct"), (2 * chunk + 1, "erase")):
        where = {"prompt_positions": [-1, -2, 0, chunk, 900, -900], "generation_positions": [0, 3]}
        case = requests.single(name)
        vectors = [{**case.request["vectors"][0], "where": where}]
        check_batch(every_hook, oracle, [Case(prompt(length, length), {"vectors": vectors}, 6)])


def test_three_vectors_with_different_clauses(every_hook: SteeredEngine, oracle: Oracle, mode: str) -> None:
    requests = Requests(2)
    check_batch(every_hook, oracle, _admissible(every_hook, [requests.mixed(MODES[mode]) for _ in range(32)]))
    status = every_hook.status()
    assert (status["slots_used"], status["pool_used"], status["live"]) == (0, 0, 0)


def _admissible(engine: SteeredEngine, cases: list[Case]) -> list[Case]:
    """Cases without those few whose random clauses select nothing of their prompt."""
    kept = [case for case in cases if _refusal(engine, case) is None]
    assert {_refusal(engine, case) for case in cases} <= {None, "selects_nothing"}
    assert len(kept) > len(cases) * 3 // 4
    return kept


def _refusal(engine: SteeredEngine, case: Case) -> str | None:
    try:
        engine.check_prompt(case.request, case.prompt)
    except SteeringError as error:
        return error.code
    return None
