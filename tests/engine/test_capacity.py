"""More distinct steering at once than there is room for: it waits, in waves, and every request gets its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from reference.models import random_direction
from reference.wire import static
from steergate_server.runtime.config import EngineConfig
from support.engines import SteeredEngine

from .conftest import HIDDEN, SETTINGS
from .oracle import Case, Oracle, check_batch, prompt

REQUESTS = 256


@pytest.fixture(scope="module", params=["slots", "rows"])
def small(request: pytest.FixtureRequest, tiny: Path) -> Iterator[SteeredEngine]:
    """An engine with room for few requests: 9 slots, or 24 pool rows of which each request takes two."""
    config = EngineConfig(max_slots=10) if request.param == "slots" else EngineConfig(memory_mib=1)
    settings = {**SETTINGS, "max_num_seqs": 64}
    if request.param == "rows":
        # A pool is never smaller than a MiB: wide gates of many rows make it small for these requests.
        config = EngineConfig(memory_mib=1, max_slots=200)
    engine = SteeredEngine(tiny, config=config, enforce_eager=True, **settings)
    yield engine
    engine.close()


def test_all_complete_in_waves(small: SteeredEngine, oracle: Oracle) -> None:
    cases = [
        Case(
            prompt(number, 3 + number % 5),
            {"vectors": [static(random_direction(1000 + number, HIDDEN, [1, 3], norm=6.0), {"generation": "all"})]},
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
