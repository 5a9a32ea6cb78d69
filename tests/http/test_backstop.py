"""What generates without having passed the middleware must not escape a server default."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextvars import copy_context
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from steergate_server.vllm_plugin.call import decided
from steergate_server.vllm_plugin.generate import steered_generate


async def engine(*_: Any, **__: Any) -> AsyncGenerator[None, None]:
    """An engine that nothing is asked of."""
    yield None


async def unused(_: str) -> None:
    raise AssertionError


def ask(*, inherits: bool, looked_at: bool) -> Any:
    """Call the wrapped `generate` in a context in which the middleware has, or has not, looked at the request."""
    wrapped = steered_generate(engine, lambda *_: None, str, unused, lambda: inherits)

    def run() -> Any:
        if looked_at:
            decided.set(True)
        return wrapped({"prompt_token_ids": [1]}, SamplingParams(), "request")

    return copy_context().run(run)


def test_an_unknown_way_of_generating_is_refused_while_a_default_is_in_force() -> None:
    with pytest.raises(VLLMValidationError, match="default steering"):
        ask(inherits=True, looked_at=False)


@pytest.mark.parametrize(("inherits", "looked_at"), [(False, False), (False, True), (True, True)])
def test_everything_else_generates(inherits: bool, looked_at: bool) -> None:
    assert ask(inherits=inherits, looked_at=looked_at) is not None
