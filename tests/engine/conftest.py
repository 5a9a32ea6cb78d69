"""The engines of these tests over one tiny model: two that steer, eager and compiled, and stock vLLM beside each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from reference.models import random_direction, shared_tiny_llama
from steergate_server.runtime.config import EngineConfig
from support.engines import SteeredEngine, StockEngine

from .oracle import Oracle

SETTINGS: dict[str, Any] = {
    "block_size": 32,  # the smallest that the CPU's attention takes
    "max_num_batched_tokens": 64,  # so that longer prompts are computed in chunks, beside other requests' answers
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
}

WHOLE_PROMPTS: dict[str, Any] = {**SETTINGS, "max_num_batched_tokens": 1024, "enable_chunked_prefill": False}
"""The same, but each prompt is computed in one step."""

HIDDEN = 64


def settings(*, eager: bool) -> dict[str, Any]:
    """What an engine runs with: chunks where it does not compile, whole prompts where it does."""
    return {"enforce_eager": eager, **(SETTINGS if eager else WHOLE_PROMPTS)}


def _two_hooks() -> dict[str, Any]:
    """Rows at both hooks of three layers."""
    return random_direction(90, HIDDEN, [0, 1, 3], "pre_attn", 6.0) | random_direction(
        91, HIDDEN, [0, 2, 3], "post_block", 6.0
    )


REGISTERED: dict[str, dict[str, Any]] = {
    "steer": {
        "two-hooks": {"packed": _two_hooks()},
        "last": {"packed": random_direction(92, HIDDEN, [3], norm=8.0)},
    },
    "probe": {"look": {"packed": random_direction(93, HIDDEN, [1])}},
}
"""Registered on both steering engines, and known to the oracle."""


@pytest.fixture(scope="package")
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model."""
    return shared_tiny_llama(getattr(request.config, "cache", None), tmp_path_factory.mktemp)


@pytest.fixture(scope="package")
def oracle(tiny: Path) -> Oracle:
    """The reference over the same model."""
    return Oracle(tiny, REGISTERED)


def _steered(tiny: Path, *, eager: bool) -> Iterator[SteeredEngine]:
    config = EngineConfig(hooks=("pre_attn", "post_block"), memory_mib=16, trace=eager)
    engine = SteeredEngine(tiny, config=config, **settings(eager=eager))
    for kind, vectors in REGISTERED.items():
        for name, source in vectors.items():
            engine.register(name, kind, source["packed"])
    yield engine
    engine.close()


@pytest.fixture(scope="package")
def eager(tiny: Path) -> Iterator[SteeredEngine]:
    """A steering engine without compilation, which computes long prompts in chunks; it traces what it applies."""
    yield from _steered(tiny, eager=True)


@pytest.fixture(scope="package")
def compiled(tiny: Path) -> Iterator[SteeredEngine]:
    """A steering engine with compiled graphs, which computes every prompt in one step."""
    yield from _steered(tiny, eager=False)


@pytest.fixture(scope="package", params=["eager", "compiled"])
def engine(request: pytest.FixtureRequest) -> SteeredEngine:
    """Both steering engines in turn."""
    return request.getfixturevalue(request.param)


class Pair(NamedTuple):
    """A steering engine and stock vLLM with the same settings."""

    steered: SteeredEngine
    stock: StockEngine


@pytest.fixture(scope="package", params=["eager", "compiled"])
def pair(request: pytest.FixtureRequest, tiny: Path) -> Iterator[Pair]:
    """Both steering engines in turn, each beside stock vLLM."""
    steered = request.getfixturevalue(request.param)
    stock = StockEngine(tiny, **settings(eager=request.param == "eager"))
    yield Pair(steered, stock)
    stock.close()
