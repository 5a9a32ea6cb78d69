"""The two engines, each in a process of its own: stock vLLM, and vLLM that steers.

The engine core runs in the process that calls it, so that one `step` is all that a token costs: schedule, forward,
sampling, update and output processing, one after the other.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.clock import clock
from benchmarks.model import VOCABULARY
from benchmarks.scenarios import BY_NAME, registered

MOST_REQUESTS, MOST_ROWS = 256, 1024


class Load(NamedTuple):
    """A batch of requests of one scenario: how many, prompt tokens of each, tokens to generate, seed of the prompts."""

    scenario: str
    batch: int
    prompt: int
    tokens: int
    seed: int

    def prompts(self) -> list[list[int]]:
        """Fresh random prompts, so that no prefix is ever found in a cache; the same for every engine."""
        random = np.random.default_rng((self.seed, self.batch, self.prompt))
        chosen: list[list[int]] = random.integers(2, VOCABULARY, (self.batch, self.prompt)).tolist()
        return chosen


class StockSession:
    """vLLM as it comes."""

    def __init__(self, model: str, dtype: str, mode: str, cpu_time: bool, **settings: Any) -> None:
        os.environ.update(
            HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_HOST_IP="127.0.0.1", VLLM_LOGGING_LEVEL="ERROR",
            VLLM_ENABLE_V1_MULTIPROCESSING="0",
        )  # fmt: skip
        from vllm import LLM

        self.now = clock(cpu_time=cpu_time)
        self.llm = LLM(
            model=model,
            dtype=dtype,
            enforce_eager=mode == "eager",
            skip_tokenizer_init=True,
            block_size=32,
            max_model_len=2048,
            max_num_seqs=MOST_REQUESTS,
            max_num_batched_tokens=MOST_ROWS,
            kv_cache_memory_bytes=2**30,
            disable_log_stats=True,
            **settings,
        )
        self._engine: Any = self.llm.llm_engine
        self._tokens: dict[str, list[int]] = {}

    def plans(self, load: Load) -> list[bytes | None]:
        """The encoded plan of each request of a load, admitted beforehand: admission is measured by itself."""
        return [None] * load.batch

    def begin(self, load: Load) -> float:
        """Add a load and prefill it; seconds until every request has its first token."""
        requests = list(zip(load.prompts(), self.plans(load), strict=True))
        sampling = [_sampling(load.tokens + 8, plan) for _, plan in requests]
        self._tokens = {f"request-{load.seed}-{number}": [] for number in range(load.batch)}
        started = self.now()
        for request_id, (prompt, _), params in zip(self._tokens, requests, sampling, strict=True):
            self._engine.add_request(request_id, {"prompt_token_ids": prompt}, params)
        while not all(self._tokens.values()):
            self._step()
        return self.now() - started

    def steps(self, count: int) -> list[float]:
        """Seconds of each of some decode steps."""
        times = []
        for _ in range(count):
            started = self.now()
            self._step()
            times.append(self.now() - started)
        return times

    def _step(self) -> None:
        for output in self._engine.step():
            if output.num_cached_tokens:
                raise RuntimeError("a prefix came out of the cache, so this would measure another prefill")
            if output.finished:
                raise RuntimeError(f"a request ended early: {output.outputs[0].finish_reason}")
            self._tokens[output.request_id] = output.outputs[0].token_ids

    def prefix_hits(self, scenario: str, length: int, batch: int, seed: int) -> float:
        """The share of a prompt's first `length` tokens that requests find in the prefix cache, where one that has the
        same ran before them."""
        load = Load(scenario, batch, length, 4, seed)
        shared = load.prompts()[0]
        plans = self.plans(load)
        found: dict[str, int] = {}
        for names in ([0], range(1, batch)):
            for number in names:
                prompt = [*shared, *range(2 + 16 * number, 18 + 16 * number)]
                name = f"prefix-{seed}-{number}"
                self._engine.add_request(name, {"prompt_token_ids": prompt}, _sampling(4, plans[number]))
            while self._engine.has_unfinished_requests():
                for output in self._engine.step():
                    found[output.request_id] = output.num_cached_tokens
        found.pop(f"prefix-{seed}-0")
        return sum(found.values()) / (length * len(found))

    def end(self) -> list[list[int]]:
        """End the load; the tokens of each request."""
        tokens = [list(tokens) for tokens in self._tokens.values()]
        self._engine.abort_request(list(self._tokens))
        self._tokens = {}
        self._engine.step()  # the worker learns of the end with the next step
        return tokens


def _sampling(tokens: int, plan: bytes | None) -> Any:
    """Greedy sampling of so many tokens under an encoded plan."""
    from vllm import SamplingParams

    return SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False,
        extra_args=None if plan is None else {"steergate": plan},
    )  # fmt: skip


class SteeredSession(StockSession):
    """vLLM with our worker and scheduler, and every vector registered that a scenario names."""

    def __init__(self, model: str, dtype: str, mode: str, cpu_time: bool) -> None:
        import msgspec

        from steergate_server.registry.names import NameIndex
        from steergate_server.registry.spool import Spool
        from steergate_server.runtime.admission import Admission
        from steergate_server.runtime.capacity import Capacity
        from steergate_server.runtime.config import SPOOL_ENVIRONMENT, EngineConfig
        from steergate_server.runtime.sites import Site
        from steergate_server.runtime.sources import ModelFacts
        from steergate_server.schema.payloads import DirectionPayload

        config = EngineConfig(memory_mib=128)
        self._folder = tempfile.TemporaryDirectory(prefix="steergate-bench-")
        os.environ[SPOOL_ENVIRONMENT] = self._folder.name
        super().__init__(
            model,
            dtype,
            mode,
            cpu_time,
            worker_cls="steergate_server.vllm_plugin.worker.SteeringWorker",
            scheduler_cls="steergate_server.vllm_plugin.scheduler.SteeringScheduler",
            additional_config={"steering": msgspec.to_builtins(config)},
        )
        names = NameIndex(Spool(Path(self._folder.name)))
        for (kind, name), rows in registered().items():
            payload = msgspec.convert({"kind": "direction", "packed": rows}, DirectionPayload)
            names.register(name, "probe" if kind == "probe" else "steer", payload)
        status = self.llm.collective_rpc("steergate_status")[0]
        facts = ModelFacts(
            "benchmark",
            status["layers"],
            self.llm.model_config.get_hidden_size(),
            tuple(Site(*entry) for entry in status["sites"]),
            Capacity(*status["capacity"]),
            config.graph_mode,
        )
        self._admission = Admission(config, facts, names)
        self._held: list[str] = []

    def plans(self, load: Load) -> list[bytes | None]:
        """The encoded plan of each request of a load."""
        wanted = [BY_NAME[load.scenario].steering(index) for index in range(load.batch)]
        return [None if steering is None else self._plan(steering) for steering in wanted]

    def _plan(self, steering: dict[str, Any]) -> bytes:
        from steergate_server.runtime.plan import encode_plan
        from steergate_server.schema.decode import decode_steering, encode

        request = decode_steering(encode(steering))
        assert request
        admitted = self._admission.admit(request)
        self._held += admitted.digests
        return encode_plan(admitted.plan)

    def begin(self, load: Load) -> float:
        """As stock vLLM's; also makes sure that as many requests are steered as ask for it."""
        seconds = super().begin(load)
        wanted = sum(BY_NAME[load.scenario].steering(index) is not None for index in range(load.batch))
        live = self.llm.collective_rpc("steergate_status")[0]["live"]
        if live != wanted:
            raise RuntimeError(f"{wanted} requests asked for steering, {live} are steered")
        return seconds

    def end(self) -> list[list[int]]:
        """As stock vLLM's; also gives the payloads back."""
        tokens = super().end()
        self._admission.release(self._held)
        self._held.clear()
        return tokens

    def profile(self, load: Load, steps: int) -> dict[str, Any]:
        """Where the time of a load's decode steps goes (profiling.py)."""
        from benchmarks.profiling import profile

        return profile(self, load, steps)
