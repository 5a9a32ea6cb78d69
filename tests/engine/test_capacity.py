"""More distinct steering at once than there is room for: it waits, in waves, and every request gets its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from reference.wire import Json
from steergate_server.runtime.config import EngineConfig
from support.engines import SteeredEngine

from .algorithm_requests import tensor
from .conftest import HIDDEN, SETTINGS
from .oracle import Case, Oracle, check_batch, prompt

REQUESTS = 256


@pytest.fixture(scope="module", params=["slots", "rows"])
def small(request: pytest.FixtureRequest, tiny: Path) -> Iterator[SteeredEngine]:
    """An engine with 9 slots, or with 4,095 pool rows of which each of these requests takes 120."""
    config = EngineConfig(algorithms=("lm_steer",), memory_mib=1, max_slots=10 if request.param == "slots" else 0)
    engine = SteeredEngine(tiny, config=config, enforce_eager=True, **{**SETTINGS, "max_num_seqs": 64})
    yield engine
    engine.close()


def _low_rank(number: int) -> Json:
    """A map of rank 30 at two layers that no other request has."""
    rng = np.random.default_rng(number)
    first, second = (tensor(rng.normal(size=(HIDDEN, 30)) * 0.1) for _ in range(2))
    payload = {"kind": "lowrank", "projector1": first, "projector2": second}
    return {
        "algorithm": "lm_steer",
        "steer": {"kind": "payload", "payload": payload},
        "layers": [1, 3],
        "where": {"generation": "all"},
    }


def test_all_complete_in_waves(small: SteeredEngine, oracle: Oracle) -> None:
    cases = [
        Case(
            prompt(number, 3 + number % 5),
            {"vectors": [_low_rank(number)]},
            2 + number % 4,
        )
        for number in range(REQUESTS)
    ]
    answers = small.steer(
        [case.prompt for case in cases], [case.request for case in cases], [case.max_tokens for case in cases]
    )
    for case, answer in zip(cases, answers, strict=True):
        oracle.check(case, answer)
    check_batch(small, oracle, cases[:1])
    status = small.status()
    assert (status["slots_used"], status["pool_used"], status["live"]) == (0, 0, 0)
