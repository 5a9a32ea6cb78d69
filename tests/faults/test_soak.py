"""Two thousand short steered and gated requests, a third of them aborted at some point: nothing is left of them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from reference.models import random_direction, shared_tiny_llama
from reference.wire import ALWAYS, Json, add, gate, probe, static
from steergate_server.runtime.config import EngineConfig
from support.engines import SteeredEngine, parameters

REQUESTS = 2_000
WAITING = 64
HIDDEN = 64


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SteeredEngine]:
    """An engine with few slots, few places and little KV cache, so that requests wait and are preempted, too."""
    engine = SteeredEngine(
        shared_tiny_llama(getattr(request.config, "cache", None), tmp_path_factory.mktemp),
        config=EngineConfig(memory_mib=16, max_slots=40),
        enforce_eager=True,
        block_size=32,
        max_num_batched_tokens=64,
        max_num_seqs=16,
        num_gpu_blocks_override=24,
    )
    yield engine
    engine.close()


def _requests() -> list[Json]:
    """Plans of every kind, over few enough vectors that some are shared."""
    packed = [random_direction(seed, HIDDEN, [1, 2], norm=4.0) for seed in range(12)]
    look = random_direction(50, HIDDEN, [1])
    plans: list[Json] = [{"vectors": [static(rows, {"answer": "all"})]} for rows in packed]
    for rows in packed:
        lasting = gate(probe(look, 0.0), "rest_of_request", add(rows))
        soft = gate(probe(look, 1.0, at="answer"), "this_token", add(rows))
        plans.append({"gates": [lasting, soft, gate(ALWAYS, "next_step", add(rows))], "report": "summary"})
    return plans


def test_nothing_is_left(engine: SteeredEngine) -> None:
    rng = np.random.default_rng(0)
    plans = [engine.plan(request) for request in _requests()]
    core: Any = engine.llm.llm_engine
    aborted = set(rng.choice(REQUESTS, size=REQUESTS // 3, replace=False).tolist())
    waiting = list(range(REQUESTS))
    running: dict[str, int] = {}
    finished = 0
    while waiting or running:
        while waiting and len(running) < WAITING:
            number = waiting.pop()
            ids = rng.integers(0, 250, size=int(rng.integers(1, 60))).tolist()
            tokens = int(rng.integers(2, 12))
            # One in ten is plain.
            plan = None if number % 10 == 0 else plans[number % len(plans)]
            core.add_request(str(number), {"prompt_token_ids": ids}, parameters(plan, tokens))
            running[str(number)] = int(rng.integers(1, 8)) if number in aborted else -1
        for output in core.step():
            if output.finished:
                assert output.outputs[0].finish_reason == "length", output.kv_transfer_params
                finished += running.pop(output.request_id, None) is not None
        for request_id, steps in list(running.items()):
            running[request_id] = steps - 1
            if steps == 1:
                core.abort_request([request_id])
                del running[request_id]
    assert finished > REQUESTS / 2
    engine.plain([[1, 2, 3]], 4)
    engine.release()
    held = ("live", "pool_used", "slots_used", "probes_used", "payloads_held", "lanes_nonzero")
    deadline = time.monotonic() + 5
    while any((status := engine.status())[name] for name in held) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert {name: status[name] for name in held} == dict.fromkeys(held, 0)
    assert list(engine.spool.rglob("*.safetensors")) == []
