"""What the adapters of vLLM's two model runners share: telling the controller what a runner does, and nothing else.

Nothing of ours may raise here: an exception would end the engine for everybody. A fault of ours is recorded against the
requests concerned, which the scheduler then ends.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.logger import init_logger
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.linear import ReplicatedLinear, RowParallelLinear
from vllm.model_executor.models.utils import PPMissingLayer
from vllm.v1.attention.backend import AttentionType
from vllm.v1.outputs import ModelRunnerOutput

from steergate_server.graph import ops
from steergate_server.registry.spool import Spool, SpoolError
from steergate_server.runtime.blocks import find_decoder_stack
from steergate_server.runtime.config import SPOOL_ENVIRONMENT, EngineConfig, engine_config
from steergate_server.runtime.controller import Controller, Evidence
from steergate_server.runtime.geometry import StepGeometry
from steergate_server.runtime.plan import decode_plan
from steergate_server.runtime.sites import attach_sites
from steergate_server.schema.errors import SteeringError
from steergate_server.vllm_plugin import ranks
from steergate_server.vllm_plugin.carrier import HISTORY_ATTRIBUTE, STEP_ATTRIBUTE, StepResult, failure, plan_bytes

logger = init_logger(__name__)

_NOT_LAID_OUT = "The steering of a step could not be laid out. The server's log says why."


REHEARSAL_ROWS = 4
"""Rows of the forward in which a model's blocks are tried out."""


def is_attention(module: torch.nn.Module) -> bool:
    """Whether a module is an attention layer of a decoder: it attends to the rows before, and keeps them."""
    return isinstance(module, Attention | MLAAttention) and getattr(module, "attn_type", None) in (
        None,
        AttentionType.DECODER,
    )


def language_model(model: torch.nn.Module) -> torch.nn.Module:
    """The part of a model that writes text: all of it, unless it sees or hears as well."""
    find: Any = getattr(model, "get_language_model", None)
    inner = model if find is None else find()
    assert isinstance(inner, torch.nn.Module)
    return inner


def run_once(model: torch.nn.Module, vllm_config: VllmConfig, device: torch.device) -> None:
    """One forward of a few rows, within a forward context of that many."""
    positions = torch.arange(REHEARSAL_ROWS, device=device)
    if vllm_config.model_config.uses_mrope:
        positions = positions.expand(3, -1)
    ids = torch.zeros(REHEARSAL_ROWS, dtype=torch.int32, device=device)
    with torch.no_grad():
        model(input_ids=ids, positions=positions, intermediate_tensors=None, inputs_embeds=None)


def heads_share(projection: torch.nn.Module) -> tuple[int, int] | None:
    """Which part of the heads an output projection is given: (this rank, ranks); None for one of an unknown make."""
    linear = getattr(projection, "base_layer", projection)  # behind a LoRA adapter's layer
    if ranks.count() == 1 or isinstance(linear, ReplicatedLinear):
        return 0, 1
    if isinstance(linear, RowParallelLinear):
        return (linear.tp_rank, linear.tp_size) if linear.input_is_parallel else (0, 1)
    return None


def build_controller(
    model: torch.nn.Module,
    stack: torch.nn.ModuleList,
    config: EngineConfig,
    vllm_config: VllmConfig,
    max_rows: int,
    device: torch.device,
) -> Controller:
    """Place the ops in the blocks of a freshly loaded model and allocate everything that steering needs."""
    # No attention metadata: nothing is read from KV or written to it. Not compiled: the ops are yet to be traced.
    with set_forward_context(None, vllm_config, num_tokens=REHEARSAL_ROWS, skip_compiled=True):
        sites = attach_sites(
            stack,
            config.hooks,
            vllm_config.model_config.get_hidden_size(),
            is_attention,
            lambda module: isinstance(module, PPMissingLayer),
            ops.steer,
            lambda: run_once(model, vllm_config, device),
            heads_share,
            ranks.same,
        )
    spool = Spool(Path(os.environ[SPOOL_ENVIRONMENT]))
    controller = Controller(
        config,
        sites,
        spool,
        dtype=vllm_config.model_config.dtype,
        device=device,
        max_rows=max_rows,
        max_requests=vllm_config.scheduler_config.max_num_seqs,
    )
    logger.info(
        "SteerGate: %d sites (%s), mode %s%s, payload pool %.1f MiB, %d slots, %d gate lanes",
        len(sites),
        ", ".join(config.hooks),
        config.graph_mode,
        f" ({config.graph_reason})" if config.graph_reason else "",
        controller.book.pool_capacity / 2**20,
        controller.book.slots.count,
        controller.lanes.look.shape[1],
    )
    return controller


class RunnerAdapter:
    """Base of the mixins; a mixin says when its runner does what."""

    steering: Controller
    steering_layers: int
    _steering_failures: dict[str, dict[str, Any]]
    _steering_evidence: dict[str, list[Evidence]]
    _steering_plans: set[str]
    _steering_told: int

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, then place the ops: before warm-up, so that they are traced and profiled."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        config = engine_config(self.vllm_config.additional_config)  # type: ignore[attr-defined]
        assert config is not None
        self._steering_failures, self._steering_evidence = {}, {}
        self._steering_plans = set()
        # Bytes of the pools in use, as the scheduler last heard. At first it has heard nothing.
        self._steering_told = -1
        runner: Any = self
        model = runner.get_model()
        stack = find_decoder_stack(language_model(model), is_attention)
        self.steering_layers = len(stack)
        with self.steering_trial():
            self.steering = build_controller(
                model, stack, config, runner.vllm_config, runner.max_num_tokens, runner.device
            )
        ops.bind(self.steering)

    def steering_trial(self) -> AbstractContextManager[None]:
        """What holds while the model's blocks are tried out, with a few rows."""
        return nullcontext()

    # Requests -------------------------------------------------------------------------------------------------------

    def steering_requests(self, scheduler_output: Any, resumed: frozenset[str] | set[str] = frozenset()) -> None:
        """Take a step's ends, starts and resumptions over. resumed: ids among the new requests that are live already.

        Ends come before starts: an id, a number and a slot may be taken again in the same step. A preempted request
        keeps what it holds, and resumes with its history.
        """
        for request_id in scheduler_output.finished_req_ids:
            self._steering_plans.discard(request_id)
            self._guard(request_id, self.steering.finish, request_id)
        for new in scheduler_output.scheduled_new_reqs:
            encoded = plan_bytes(new.sampling_params)
            if encoded is not None and new.req_id not in resumed:
                self._steering_plans.add(new.req_id)
                self._guard(new.req_id, self._admit, new, encoded)
        for request_id, history in getattr(scheduler_output, HISTORY_ATTRIBUTE, {}).items():
            self._guard(request_id, self.steering.resume, request_id, history)

    def _admit(self, new: Any, encoded: bytes) -> None:
        self.steering.add(new.req_id, decode_plan(encoded), new.prompt_token_ids, self.max_model_len)  # type: ignore[attr-defined]

    def _guard(self, request_id: str, action: Callable[..., None], *args: Any) -> None:
        """Run a piece of ours; a fault becomes the failure of one request."""
        try:
            action(*args)
        except SteeringError as error:
            self._fail(request_id, error)
        except SpoolError as error:
            self._fail(request_id, SteeringError("algorithm_failed", str(error)))
        except Exception:
            logger.exception("SteerGate: request %s could not be steered", request_id)
            self._fail(
                request_id,
                SteeringError(
                    "algorithm_failed", "The steering of this request failed to install. The server's log says why."
                ),
            )

    def _fail(self, request_id: str, error: SteeringError) -> None:
        self._steering_failures[request_id] = failure(error)

    # A step ---------------------------------------------------------------------------------------------------------

    def steering_layout(
        self, request_ids: list[str], counts: Any, starts: Any, drafts: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """Lay a step out: requests in batch order, rows of each, absolute position of each one's first row, and how
        many of its last rows are drafts."""
        try:
            self.steering.begin_step(StepGeometry(request_ids, counts.astype("int64"), starts.astype("int64"), drafts))
        except Exception:
            self._abandon(_NOT_LAID_OUT)

    def steering_tokens(self, input_ids: torch.Tensor) -> None:
        """The step's input ids [>= rows] are on the device, and its forward is next."""
        try:
            self.steering.see_tokens(input_ids)
        except Exception:
            self._abandon(_NOT_LAID_OUT)

    def steering_forward_over(self) -> None:
        """A real forward is over, and no dummy, profile or capture run: state advances here alone."""
        try:
            self._steering_evidence = self.steering.end_step()
            for request_id, message in self.steering.take_fallen().items():
                self._fail(request_id, SteeringError("algorithm_failed", message))
        except Exception:
            self._abandon("The steering of a step failed. The server's log says why.")

    def _abandon(self, message: str) -> None:
        logger.exception("SteerGate: %s", message)
        for request_id in self.steering.abandon_step():
            self._fail(request_id, SteeringError("algorithm_failed", message))

    def steering_result(self, output: ModelRunnerOutput) -> None:
        """Let the step's result ride on the runner's output."""
        # The scheduler hears one rank only. All know of the same plans, installed or not, so all ask or none does.
        if self._steering_plans:
            self._steering_failures = ranks.merged(self._steering_failures)
        book = self.steering.book
        result = StepResult(self._steering_failures, self._steering_evidence, book.capacity, book.pool_used)
        self._steering_failures, self._steering_evidence = {}, {}
        # The scheduler holds everything but the first steered request back until it has heard of the capacity.
        if result.failures or result.evidence or result.pool_used != self._steering_told:
            self._steering_told = result.pool_used
            setattr(output, STEP_ATTRIBUTE, result)
