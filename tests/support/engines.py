"""Real vLLM engines for the tests: stock, or steered by admitted requests as the HTTP front would send them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Before vLLM is imported: no network, no usage reports, and a loopback address for its own sockets.
os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_HOST_IP="127.0.0.1", VLLM_LOGGING_LEVEL="WARNING")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import msgspec
from vllm import LLM, SamplingParams

from steergate_server.registry.names import NameIndex
from steergate_server.registry.spool import Spool
from steergate_server.runtime.admission import Admission
from steergate_server.runtime.capacity import Capacity
from steergate_server.runtime.config import SPOOL_ENVIRONMENT, EngineConfig
from steergate_server.runtime.plan import Conversation, encode_plan
from steergate_server.runtime.sites import Site
from steergate_server.runtime.sources import ModelFacts
from steergate_server.schema.decode import decode, decode_steering, encode
from steergate_server.schema.payloads import DirectionPayload
from steergate_server.vllm_plugin.carrier import PLAN_KEY


class Answer(NamedTuple):
    """One completed request: token ids, the chosen tokens' logprobs, why it ended, and what the scheduler reported."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str
    ours: dict[str, Any]
    cached_tokens: int


SMALL: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 512,
    "max_num_seqs": 32,
    "max_num_batched_tokens": 1024,
    "kv_cache_memory_bytes": 64 * 2**20,
    "disable_log_stats": True,
}
"""Engine settings that keep a tiny model small and quick."""


class StockEngine:
    """vLLM as it comes."""

    def __init__(self, model: Path, **settings: Any) -> None:
        self.model = model
        self.llm = LLM(model=str(model), **{**SMALL, **settings})

    def run(
        self,
        prompts: Sequence[Sequence[int]],
        plans: Sequence[bytes | None],
        max_tokens: int | Sequence[int] = 16,
        **sampling: Any,
    ) -> list[Answer]:
        """Run prompts in one batch, greedily, ignoring ends; `plans` are encoded plans or None.

        Nothing runs before all are queued, so the same lengths always give the same steps.
        """
        lengths = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else max_tokens
        params = [parameters(plan, length, **sampling) for plan, length in zip(plans, lengths, strict=True)]
        self.llm.sleep(level=0, mode="keep")
        self.llm.enqueue([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
        self.llm.wake_up(tags=["scheduling"])
        return [answer_of(output) for output in self.llm.wait_for_completion(use_tqdm=False)]

    def plain(self, prompts: Sequence[Sequence[int]], max_tokens: int = 16) -> list[Answer]:
        """Run prompts without steering."""
        return self.run(prompts, [None] * len(prompts), max_tokens)

    def close(self) -> None:
        """End the engine's process."""
        self.llm.llm_engine.engine_core.shutdown()


def parameters(plan: bytes | None, max_tokens: int, **sampling: Any) -> SamplingParams:
    """Greedy sampling of exactly `max_tokens` tokens under an encoded plan."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        logprobs=0,
        detokenize=False,
        extra_args=None if plan is None else {PLAN_KEY: plan},
        **sampling,
    )


def answer_of(output: Any) -> Answer:
    """What vLLM's output of a request, finished or not, says so far."""
    choice = output.outputs[0]
    logprobs = [step[token].logprob for token, step in zip(choice.token_ids, choice.logprobs or (), strict=False)]
    ours = (output.kv_transfer_params or {}).get(PLAN_KEY, {})
    return Answer(list(choice.token_ids), logprobs, choice.finish_reason, ours, output.num_cached_tokens or 0)


class SteeredEngine(StockEngine):
    """vLLM with our worker and scheduler, and an admission in front of it."""

    def __init__(self, model: Path, *, config: EngineConfig | None = None, **settings: Any) -> None:
        self.config = config or EngineConfig(hooks=("pre_attn", "post_block"), memory_mib=16)
        self._folder = tempfile.TemporaryDirectory(prefix="steergate-test-")
        os.environ[SPOOL_ENVIRONMENT] = self._folder.name
        super().__init__(
            model,
            worker_cls="steergate_server.vllm_plugin.worker.SteeringWorker",
            scheduler_cls="steergate_server.vllm_plugin.scheduler.SteeringScheduler",
            additional_config={"steering": msgspec.to_builtins(self.config)},
            **settings,
        )
        status = self.status()
        self.sites = tuple(Site(*entry) for entry in status["sites"])
        self.names = NameIndex(Spool(Path(self._folder.name)))
        facts = ModelFacts(
            "tiny",
            status["layers"],
            self.llm.model_config.get_hidden_size(),
            self.sites,
            Capacity(*status["capacity"]),
            self.config.graph_mode,
            speculative="speculative_config" in settings,
        )
        self.admission = Admission(self.config, facts, self.names)
        self._held: list[str] = []

    @property
    def spool(self) -> Path:
        """The folder that payloads lie in."""
        return Path(self._folder.name)

    def register(self, name: str, kind: str, packed: dict[str, Any], *, replace: bool = False) -> None:
        """Register a direction under a name; `replace` lets a name move to other numbers."""
        payload = decode(encode({"packed": packed, "kind": "direction"}), DirectionPayload)
        self.names.register(name, kind, payload, replace=replace)

    def plan(self, steering: Any, conversation: str | None = None, settlement: str = "") -> bytes | None:
        """The encoded plan of a wire request as Python objects; None for no steering. Raises SteeringError."""
        request = decode_steering(encode(steering))
        turn = None if conversation is None else Conversation(key=conversation, settlement=settlement)
        if request is False:
            admitted = self.admission.admit_opt_out(turn)
            return None if admitted is None else encode_plan(admitted.plan)
        admitted = self.admission.admit(
            request, as_list=isinstance(steering, list), conversation_id=conversation, conversation=turn
        )
        self._held += admitted.digests
        # As the front does: a plan that holds nothing is not sent.
        plan = admitted.plan
        return encode_plan(plan) if plan.acts or plan.conversation is not None else None

    def check_prompt(self, steering: Any, prompt: Sequence[int]) -> None:
        """Admit a wire request with its prompt, as the front does, and let it go. Raises SteeringError."""
        request = decode_steering(encode(steering))
        assert request
        admitted = self.admission.admit(request, as_list=isinstance(steering, list))
        self.admission.release(admitted.digests)
        self.admission.admit_prompt(admitted, prompt, SMALL["max_model_len"])

    def steer(
        self,
        prompts: Sequence[Sequence[int]],
        requests: Sequence[Any],
        max_tokens: int | Sequence[int] = 16,
        conversations: Sequence[str | None] | None = None,
    ) -> list[Answer]:
        """Run prompts in one batch, each under its own wire request (None: unsteered), as turns of conversations."""
        named = conversations or [None] * len(requests)
        plans = [self.plan(request, name) for request, name in zip(requests, named, strict=True)]
        answers = self.run(prompts, plans, max_tokens)
        self.release()
        return answers

    def tell(self, message: str) -> None:
        """Send the scheduler a message about a conversation, as the front does."""
        self.llm.llm_engine.engine_core.abort_requests([message])

    def release(self) -> None:
        """Give the payloads of every plan so far back."""
        self.admission.release(self._held)
        self._held.clear()

    def status(self) -> dict[str, Any]:
        """What steering holds on the worker."""
        return self.llm.collective_rpc("steergate_status")[0]

    def trace(self) -> list[tuple[Any, ...]]:
        """What was applied since the last call."""
        return self.llm.collective_rpc("steergate_trace")[0]

    def close(self) -> None:
        """End the engine's process and remove its payloads."""
        super().close()
        self._folder.cleanup()
