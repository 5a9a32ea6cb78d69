"""A third-party package brings an algorithm through its entry point; one that fails ends only its own request."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import numpy as np
import pytest

from reference.models import random_direction
from reference.wire import Json, static
from steergate_server.algorithms import registry
from steergate_server.algorithms.extensions import GROUP
from steergate_server.capabilities import ALGORITHM_CAPABILITIES
from steergate_server.runtime.config import EngineConfig
from support.engines import SteeredEngine

from .conftest import HIDDEN, SETTINGS
from .oracle import Case, Oracle, prompt

MODULE = '''
import torch

from steergate_server.algorithms.base import BaseSteerVectorAlgorithm
from steergate_server.algorithms.registry import register_algorithm
from steergate_server.capabilities import ALGORITHM_CAPABILITIES, AlgorithmCapabilities


@register_algorithm("twice")
class Twice(BaseSteerVectorAlgorithm):
    """T(x) = x + 2 s v, unless `fault` asks for something else."""

    separate_scale = True

    def _transform(self, hidden_state, params):
        fault = params.get("fault")
        if fault == "raise":
            raise RuntimeError("on purpose")
        if fault == "shape":
            return hidden_state[:, :1]
        if fault == "nan":
            return torch.full_like(hidden_state, float("nan"))
        return hidden_state + 2 * params["scale_factor"] * params["direction"]


ALGORITHM_CAPABILITIES["twice"] = AlgorithmCapabilities("direction", "gguf", params=("fault",))
'''


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An installed distribution of one module, and one that does not even import."""
    folder = tmp_path_factory.mktemp("site")
    (folder / "twice_steering.py").write_text(MODULE)
    information = folder / "twice_steering-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: twice-steering\nVersion: 1.0\n")
    lines = [f"[{GROUP}]", "broken = no_such_module", "twice = twice_steering", ""]
    (information / "entry_points.txt").write_text("\n".join(lines))
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(folder), before]))
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))
    ALGORITHM_CAPABILITIES.pop("twice", None)
    registry._ALGORITHMS.pop("twice", None)
    if before is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = before


@pytest.fixture(scope="module")
def extended(package: Path, tiny: Path) -> Iterator[SteeredEngine]:
    """An engine that loads the package by itself; this process, which admits, loads it here."""
    assert package.exists()
    (point,) = entry_points(group=GROUP, name="twice")
    point.load()
    config = EngineConfig(algorithms=("twice", "direct"), graph_mode="split", memory_mib=8)
    engine = SteeredEngine(tiny, config=config, enforce_eager=True, **SETTINGS)
    yield engine
    engine.close()


PACKED = random_direction(700, HIDDEN, [1, 3], norm=3.0)
WHERE = {"answer": "all"}


def _twice(**params: str) -> Json:
    return {"vectors": [static(PACKED, WHERE, algorithm="twice", params=params)]}


def test_it_steers_like_any_other(extended: SteeredEngine, oracle: Oracle) -> None:
    ids = prompt(701, 20)
    (answer,) = extended.steer([ids], [_twice()], 8)
    oracle.check(Case(ids, {"vectors": [static(PACKED, WHERE, scale=2.0)]}, 8), answer)


@pytest.mark.parametrize("fault", ["raise", "shape", "nan"])
def test_its_fault_ends_only_its_own_request(extended: SteeredEngine, oracle: Oracle, fault: str) -> None:
    prompts = [prompt(710 + number, 10 + number) for number in range(4)]
    beside = {"vectors": [static(PACKED, WHERE, scale=1.5)]}
    answers = extended.steer(prompts, [beside, _twice(fault=fault), None, _twice()], 8)
    assert answers[1].finish_reason == "error"
    assert answers[1].ours["error"]["code"] == "algorithm_failed"
    assert answers[1].tokens == []
    oracle.check(Case(prompts[0], beside, 8), answers[0])
    oracle.check(Case(prompts[2], None, 8), answers[2])
    oracle.check(Case(prompts[3], {"vectors": [static(PACKED, WHERE, scale=2.0)]}, 8), answers[3])
    (again,) = extended.steer([prompts[1]], [beside], 8)
    oracle.check(Case(prompts[1], beside, 8), again)
    assert np.isfinite(again.logprobs).all()
    assert extended.status()["slots_used"] == 0
