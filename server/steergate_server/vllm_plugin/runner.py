"""The adapter for vLLM's V1 model runner."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from vllm.v1.outputs import AsyncModelRunnerOutput, ModelRunnerOutput

from steergate_server.graph import ops
from steergate_server.vllm_plugin.adapter import REHEARSAL_ROWS, RunnerAdapter


class SteeringRunnerMixin(RunnerAdapter):
    """Mixed into the class of a V1 model runner after it was built (see worker.py)."""

    def steering_trial(self) -> AbstractContextManager[None]:
        """Before the first step, layers with LoRA would look adapters up by whatever lies in memory."""
        runner: Any = self
        trial: AbstractContextManager[None] = runner.maybe_select_dummy_loras(
            runner.lora_config, np.array([REHEARSAL_ROWS], dtype=np.int32)
        )
        return trial

    def _update_states(self, scheduler_output: Any) -> Any:
        result = super()._update_states(scheduler_output)  # type: ignore[misc]
        self.steering_requests(scheduler_output)
        return result

    def _prepare_inputs(self, scheduler_output: Any, num_scheduled_tokens: Any) -> Any:
        result = super()._prepare_inputs(scheduler_output, num_scheduled_tokens)  # type: ignore[misc]
        batch = self.input_batch  # type: ignore[attr-defined]
        count = batch.num_reqs
        self.steering_layout(
            list(batch.req_ids[:count]),
            num_scheduled_tokens,
            batch.num_computed_tokens_cpu[:count],
            {name: len(drafts) for name, drafts in scheduler_output.scheduled_spec_decode_tokens.items()},
        )
        return result

    def _model_forward(self, *args: Any, **kwargs: Any) -> Any:
        # Called once for each real forward, never for dummy, profile or capture runs.
        ops.bind(self.steering)
        self.steering_tokens(self.input_ids.gpu)  # type: ignore[attr-defined]
        output = super()._model_forward(*args, **kwargs)  # type: ignore[misc]
        self.steering_forward_over()
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample, then let the step's result ride on the output."""
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        carrier = output._model_runner_output if isinstance(output, AsyncModelRunnerOutput) else output
        assert isinstance(carrier, ModelRunnerOutput)
        self.steering_result(carrier)
        return output
