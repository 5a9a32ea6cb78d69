"""An extension of vLLM's worker that counts, in the worker's own process, what a steered run must not do."""

from __future__ import annotations

from typing import Any


class Counting:
    """Mixed into the worker by vLLM's `worker_extension_cls`."""

    model_runner: Any

    def counting_start(self) -> None:
        """Count from here on."""
        controller = self.model_runner.steering
        counted = self._counted = {"steps": 0, "host reads": 0}
        end_step, read = type(controller).end_step, type(controller)._evidence

        def counted_step(*args: Any) -> Any:
            counted["steps"] += controller._step is not None
            return end_step(controller, *args)

        def counted_read(*args: Any) -> Any:
            found = read(controller, *args)
            counted["host reads"] += bool(found)
            return found

        controller.end_step, controller._evidence = counted_step, counted_read
        self._compiled = _compilations()

    def counting_stop(self) -> dict[str, int]:
        """What was counted: steered steps, those whose scores were read on the host, and graphs compiled."""
        controller = self.model_runner.steering
        del controller.end_step, controller._evidence
        return {**self._counted, "compilations": _compilations() - self._compiled}


def _compilations() -> int:
    """Everything that torch or vLLM have compiled in this process."""
    from torch._dynamo.utils import counters
    from vllm.compilation.counter import compilation_counter

    ours = (compilation_counter.num_graphs_seen, compilation_counter.num_backend_compilations)
    return sum(ours) + counters["stats"]["unique_graphs"] + counters["inductor"]["fxgraph_cache_miss"]
