"""The worker: vLLM's own for this platform, whose model runner is given our mixin."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from steergate_server.algorithms.extensions import load_extensions
from steergate_server.vllm_plugin.compat import check_config, check_v2_runner, check_vllm
from steergate_server.vllm_plugin.runner import SteeringRunnerMixin
from steergate_server.vllm_plugin.runner_v2 import SteeringRunnerV2Mixin

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as _Worker
else:
    from vllm.v1.worker.gpu_worker import Worker as _Worker


class SteeringWorker(_Worker):
    """A vLLM worker that steers."""

    def init_device(self) -> None:
        """Set the device up, then let the runner's class carry the steering mixin."""
        super().init_device()
        check_vllm()
        check_config(self.vllm_config)
        load_extensions()
        runner = self.model_runner
        mixin = SteeringRunnerMixin if isinstance(runner, GPUModelRunner) else SteeringRunnerV2Mixin
        if mixin is SteeringRunnerV2Mixin:
            check_v2_runner(type(runner))
        runner.__class__ = type(f"Steering{type(runner).__name__}", (mixin, type(runner)), {"__module__": __name__})

    def steergate_status(self) -> dict[str, Any]:
        """What steering holds on this worker, as plain numbers."""
        steering = self.model_runner.steering
        return {
            "live": steering.live,
            "gates": steering.gates_installed,
            "graph_mode": steering.config.graph_mode,
            "pool_used": steering.book.pool_used,
            "pool_capacity": steering.book.pool_capacity,
            "slots_used": steering.book.slots.used,
            "capacity": tuple(steering.book.capacity),
            "probes_used": steering.probes.used,
            "payloads_held": steering.payloads_held,
            "lanes_nonzero": steering.lanes_nonzero(),
            "layers": self.model_runner.steering_layers,
            "sites": [list(site) for site in steering.sites],
        }

    def steergate_trace(self) -> list[tuple[Any, ...]]:
        """The trace since the last call, as plain tuples; empty unless tracing is on."""
        trace = self.model_runner.steering.trace
        return [] if trace is None else [tuple(record) for record in trace.take()]
