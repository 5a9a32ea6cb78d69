"""The stages that the benchmark's profile wraps: they exist, each where it is looked for."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from benchmarks.profiling import _stages
from steergate_server.runtime.controller import Controller
from steergate_server.runtime.slots import SlotBook
from steergate_server.runtime.torch_op import TorchOp
from steergate_server.vllm_plugin.runner import SteeringRunnerMixin
from steergate_server.vllm_plugin.scheduler import _SteeringAsyncScheduler, _SteeringSyncScheduler


class _Runner(SteeringRunnerMixin, CPUModelRunner):
    """As the worker mixes it."""


def bare(kind: type, **members: Any) -> Any:
    """An object of a class that was never set up: what is wrapped are methods."""
    made = object.__new__(kind)
    vars(made).update(members)
    return made


@pytest.mark.parametrize("scheduler", [_SteeringSyncScheduler, _SteeringAsyncScheduler])
def test_every_stage_is_there(scheduler: type) -> None:
    runner = bare(_Runner, steering=bare(Controller, book=bare(SlotBook), _op=bare(TorchOp)))
    worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
    core = SimpleNamespace(scheduler=bare(scheduler), model_executor=SimpleNamespace(driver_worker=worker))
    engine = SimpleNamespace(engine_core=SimpleNamespace(engine_core=core))

    stages = _stages(SimpleNamespace(llm=SimpleNamespace(llm_engine=engine)))
    assert len({name for *_, name in stages}) == len(stages)
    for owner, attribute, name in stages:
        assert callable(getattr(owner, attribute))
        home = owner.__name__ if isinstance(owner, ModuleType) else getattr(owner, "__module__", type(owner).__module__)
        assert home.startswith("vllm." if name.startswith("vLLM: ") else "steergate_server."), name
