"""Every hook of many architectures against Hugging Face: steering there is what wire.md's table says it is.

The engines run in this process, one after another: it has imported everything already.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Blip2ForConditionalGeneration, PreTrainedModel
from vllm.distributed import cleanup_dist_env_and_memory

from reference.architectures import (
    ARCHITECTURES,
    BLIP2,
    LAYERS,
    Architecture,
    blocks_of,
    build,
    build_blip2,
    build_mamba,
    changed,
)
from reference.models import one_hot
from reference.wire import EVERYWHERE, static
from steergate_server.graph import ops
from steergate_server.runtime.blocks import UnrecognisedModelError
from steergate_server.runtime.config import EngineConfig
from steergate_server.runtime.sites import Site
from steergate_server.schema.hooks import HOOKS
from support.engines import Answer, SteeredEngine

from .oracle import TIE, TOLERANCE

TOKENS = 5

PROMPT = np.random.default_rng(50).integers(0, 180, size=40).tolist()
"""Longer than a block of KV and than what is computed in one step."""

SIZE = 8.0
"""Of a vector: large enough to show behind the norms of two blocks."""


@contextmanager
def steered(path: Path, *, own_process: bool = False, **settings: Any) -> Iterator[SteeredEngine]:
    """A steering engine; in this process, what vLLM changes in it is put back afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        if not own_process:
            patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
            patch.setenv("VLLM_DIST_IDENT", "")
            patch.setattr(torch, "set_num_threads", torch.set_num_threads)
        try:
            engine = SteeredEngine(
                path,
                distributed_executor_backend="mp" if own_process else "uni",
                block_size=32,
                max_num_batched_tokens=64,
                **settings,
            )
            try:
                yield engine
            finally:
                engine.close()
        finally:
            ops.bind(None)
            if not own_process:
                cleanup_dist_env_and_memory()


class Case(NamedTuple):
    """A vector at one site: added, or the row's part along it erased, which takes knowing the whole row."""

    layer: int
    hook: str
    width: int
    algorithm: str

    @property
    def index(self) -> int:
        """The element that the vector is about."""
        return (7 * self.layer + 11 * HOOKS.index(self.hook) + 3) % self.width

    @property
    def request(self) -> dict[str, Any]:
        vector = one_hot(self.index, self.width, [self.layer], self.hook, SIZE)
        return {"vectors": [static(vector, EVERYWHERE, algorithm=self.algorithm)]}

    def change(self, rows: torch.Tensor) -> torch.Tensor:
        """The algorithm, for one-hot vectors."""
        rows = rows.clone()
        rows[..., self.index] = 0.0 if self.algorithm == "erase" else rows[..., self.index] + SIZE
        return rows


def cases_of(architecture: Architecture) -> list[Case]:
    algorithms = {"attn_heads": ["attention_add"], "router_logits": []}
    return [
        Case(layer, hook, width, algorithm)
        for layer in range(LAYERS)
        for hook, width in architecture.widths().items()
        for algorithm in algorithms.get(hook, ["direct", "erase"])
    ]


def expected(model: PreTrainedModel, architecture: Architecture, case: Case, answer: Answer) -> torch.Tensor:
    """Log-probabilities [tokens, vocabulary] of Hugging Face's model along an answer."""
    block = blocks_of(model, architecture.blocks)[case.layer]
    with torch.no_grad(), changed(block, architecture.places, case.hook, case.change):
        ids = torch.tensor([[*PROMPT, *answer.tokens[:-1]]])
        written = getattr(model, "language_model", model)
        logits = written(ids, use_cache=False).logits[0, len(PROMPT) - 1 :]
    return logits.double().log_softmax(-1)


def check(answer: Answer, table: torch.Tensor) -> None:
    """The answer is greedy in the table, with the table's log-probabilities."""
    chosen = table[torch.arange(TOKENS), answer.tokens]
    np.testing.assert_allclose(answer.logprobs, chosen.numpy(), rtol=0, atol=TOLERANCE)
    assert bool((table.amax(-1) - chosen < TIE).all())


def moved(answer: Answer, plain: Answer) -> bool:
    """Whether a request was steered by more than rounding explains."""
    pairs = zip(answer.logprobs, plain.logprobs, strict=True)
    return answer.tokens != plain.tokens or max(abs(one - other) for one, other in pairs) > 10 * TOLERANCE


def check_all(engine: SteeredEngine, model: PreTrainedModel, architecture: Architecture) -> None:
    """The engine has the sites that the table says, and steering at each is what it is in Hugging Face's model."""
    widths = architecture.widths()
    assert engine.status()["layers"] == LAYERS
    assert engine.sites == tuple(
        Site(layer, hook, widths[hook]) for layer in range(LAYERS) for hook in HOOKS if hook in widths
    )
    cases = cases_of(architecture)
    plain, *answers = engine.steer([PROMPT] * (1 + len(cases)), [None, *(case.request for case in cases)], TOKENS)
    for case, answer in zip(cases, answers, strict=True):
        try:
            check(answer, expected(model, architecture, case, answer))
            assert moved(answer, plain), "moves nothing"
        except AssertionError as error:
            error.add_note(str(case))
            raise


def config_for(architecture: Architecture) -> EngineConfig:
    return EngineConfig(
        hooks=tuple(architecture.widths()),
        algorithms=("direct", "erase", "attention_add", "moe_router"),
        memory_mib=8,
        gates=False,
    )


def run_and_check(
    path: Path, architecture: Architecture, model: type[Any] = AutoModelForCausalLM, **settings: Any
) -> None:
    """Start an engine with every hook that the model has, and hold it against Hugging Face's model."""
    config = config_for(architecture)
    with steered(path, own_process=architecture.in_hf_backend, config=config, **settings) as engine:
        reference = model.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
        check_all(engine, reference, architecture)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_hook_of(name: str, tmp_path: Path) -> None:
    run_and_check(build(tmp_path / name, name), ARCHITECTURES[name], enforce_eager=True)


@pytest.mark.parametrize("name", ["gemma2", "olmo2"])
def test_compiled(name: str, tmp_path: Path) -> None:
    run_and_check(build(tmp_path / name, name), ARCHITECTURES[name])


def test_layers_that_may_carry_adapters(tmp_path: Path) -> None:
    """LoRA puts layers of its own in the place of others; they cannot run before they are told of adapters."""
    run_and_check(build(tmp_path / "llama", "llama"), ARCHITECTURES["llama"], enforce_eager=True, enable_lora=True)


def test_a_model_that_sees(tmp_path: Path) -> None:
    """The language model is numbered, not one of the two longer stacks before it."""
    path = build_blip2(tmp_path / "blip2")
    run_and_check(path, BLIP2, Blip2ForConditionalGeneration, enforce_eager=True, limit_mm_per_prompt={"image": 1})


def refusal(path: Path, *hooks: str) -> str:
    """Why an engine with some hooks does not start."""
    config = EngineConfig(hooks=hooks, memory_mib=8, gates=False)
    with pytest.raises(UnrecognisedModelError) as caught, steered(path, config=config, enforce_eager=True):
        pass
    return str(caught.value)


def test_a_hook_that_the_model_has_no_place_for_ends_the_start(tmp_path: Path) -> None:
    path = build(tmp_path / "gptj", "gptj")
    assert refusal(path, "post_block", "post_attn") == (
        "GPTJBlock has no place for hook 'post_attn'; leave it out of --steer-hooks. It has pre_attn, attn_heads, "
        "mlp_in, mlp_out, post_block."
    )


def test_a_model_without_attention_ends_the_start(tmp_path: Path) -> None:
    assert refusal(build_mamba(tmp_path / "mamba"), "post_block") == (
        "MambaForCausalLM: no ModuleList whose children hold a decoder's attention layer; steering cannot be placed"
    )
