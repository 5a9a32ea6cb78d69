"""The adapter for vLLM's V2 model runner."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.outputs import AsyncModelRunnerOutput

from steergate_server.graph import ops
from steergate_server.vllm_plugin.adapter import RunnerAdapter


class SteeringRunnerV2Mixin(RunnerAdapter):
    """Mixed into the class of a V2 model runner after it was built (see worker.py)."""

    _steering_away: set[str]
    _steering_real: bool

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, then place the ops."""
        self._steering_away, self._steering_real = set(), False
        super().load_model(*args, **kwargs)

    def add_requests(self, scheduler_output: Any) -> None:
        """Start the step's new requests.

        This runner forgets a preempted request, and gets it as a new one when it resumes, with the tokens it has come
        to as its prompt. For steering it has been there all the time.
        """
        super().add_requests(scheduler_output)  # type: ignore[misc]
        away = self._steering_away
        away |= scheduler_output.preempted_req_ids or set()
        away -= scheduler_output.finished_req_ids
        resumed = {new.req_id for new in scheduler_output.scheduled_new_reqs if new.req_id in away}
        away -= resumed
        self.steering_requests(scheduler_output, resumed)

    def prepare_inputs(self, *args: Any, **kwargs: Any) -> Any:
        """Lay out the batch of a real step. It says what runs: that may be fewer tokens than were scheduled."""
        batch = super().prepare_inputs(*args, **kwargs)  # type: ignore[misc]
        self._steering_real = True
        count = batch.num_reqs
        ends = batch.query_start_loc_np[: count + 1]
        self.steering_layout(list(batch.req_ids[:count]), ends[1:] - ends[:-1], batch.num_computed_tokens_np[:count])
        self.steering_tokens(batch.input_ids)
        return batch

    # As the runner's own: what a step makes may be changed in later steps only under the same mode.
    @torch.inference_mode()
    def execute_model(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step. Only a real one prepares inputs; dummy, profile and capture runs and empty steps do not."""
        ops.bind(self.steering)
        self._steering_real = False
        output = super().execute_model(*args, **kwargs)  # type: ignore[misc]
        if self._steering_real:
            self.steering_forward_over()
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample, then let the step's result ride on the output; there is none after a step that failed."""
        output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        if output is not None:
            self.steering_result(output.model_runner_output if isinstance(output, AsyncModelRunnerOutput) else output)
        return output
