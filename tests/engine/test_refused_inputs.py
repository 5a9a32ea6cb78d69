"""What cannot be steered exactly is refused before an engine sees it: configurations at start, and kinds of input."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm import PoolingParams, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.exceptions import VLLMValidationError

from steergate_server.runtime.admission import Admitted
from steergate_server.runtime.plan import Plan, PlannedGate
from steergate_server.runtime.sources import param_writer
from steergate_server.vllm_plugin.call import SteeredCall, current_call
from steergate_server.vllm_plugin.carrier import PLAN_KEY
from steergate_server.vllm_plugin.compat import IncompatibleVllmError, check_config
from steergate_server.vllm_plugin.generate import wrap_generate

CONFIGURATIONS: dict[str, tuple[dict[str, Any], str]] = {
    "pipeline": ({"pipeline_parallel_size": 2}, "pipeline parallelism"),
    "connector": ({"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}}, "KV connector"),
    "pooling": ({"runner": "pooling", "convert": "embed"}, "does not generate"),
}


@pytest.mark.parametrize(("settings", "named"), CONFIGURATIONS.values(), ids=CONFIGURATIONS)
def test_no_configuration_starts_that_steering_would_be_lost_in(tiny: Path, settings: Any, named: str) -> None:
    """None of them takes requests and leaves their gates out."""
    shared = {"model": str(tiny), "max_model_len": 256, "enforce_eager": True}
    check_config(EngineArgs(**shared).create_engine_config())
    with pytest.raises(IncompatibleVllmError, match=named):
        check_config(EngineArgs(**shared, **settings).create_engine_config())


# Kinds of input -----------------------------------------------------------------------------------------------------

GATE = PlannedGate(when="always", at="generated", scope="this_token", apply="attenuate", keep=0.5)


async def pieces() -> AsyncGenerator[Any, None]:
    """Input that comes bit by bit."""
    yield {"prompt_token_ids": [1]}


def refusal(prompt: Any, params: Any, *, steered: bool = True, requests: int = 1) -> str | None:
    """The code with which the last of some engine requests of one call is refused; None where all are let through."""
    reached: list[Any] = []

    async def generate(prompt: Any, *_: Any) -> AsyncGenerator[Any, None]:
        reached.append(prompt)
        for output in ():
            yield output

    async def send(message: str) -> None:
        raise AssertionError(message)

    call = SteeredCall(Admitted(Plan(gates=(GATE,)), "", (), (), param_writer(False)), one_engine_request=True)
    token = current_call.set(call if steered else None)
    client = SimpleNamespace(generate=generate, model_config=SimpleNamespace(max_model_len=64), tokenizer=None)
    wrap_generate(client, SimpleNamespace(admit_prompt=lambda *_: None, default=None), send)

    async def run() -> None:
        for number in range(requests):
            async for _ in client.generate(prompt, params, f"request-{number}"):
                pass

    try:
        asyncio.run(run())
    except VLLMValidationError:
        assert len(reached) == requests - 1
        return "refused" if call.failure is None else call.failure.code
    finally:
        current_call.reset(token)
    assert len(reached) == requests
    return None


TOKENS = {"prompt_token_ids": [1, 2]}
INPUTS: dict[str, tuple[Any, Any]] = {
    "embeddings": ({"prompt_embeds": [[0.0]]}, SamplingParams()),
    "embeddings-beside-tokens": ({**TOKENS, "prompt_embeds": [[0.0]]}, SamplingParams()),
    "no-tokens": ({"prompt_token_ids": []}, SamplingParams()),
    "text": ("a b", SamplingParams()),
    "streamed": (pieces(), SamplingParams()),
    "pooling": (TOKENS, PoolingParams()),
}


@pytest.mark.parametrize(("prompt", "params"), INPUTS.values(), ids=INPUTS)
def test_input_that_cannot_be_steered_is_refused(prompt: Any, params: Any) -> None:
    assert refusal(prompt, params) == "steering_not_supported_here"
    assert refusal(prompt, params, steered=False) is None


def test_gates_speak_of_one_engine_request() -> None:
    assert refusal(TOKENS, SamplingParams()) is None
    assert refusal(TOKENS, SamplingParams(), requests=2) == "steering_not_supported_here"


@pytest.mark.parametrize("steered", [True, False])
def test_nobody_else_puts_a_plan_into_a_request(steered: bool) -> None:
    own = SamplingParams(extra_args={PLAN_KEY: b"\x80"})
    assert refusal(TOKENS, own, steered=steered) == "refused"
