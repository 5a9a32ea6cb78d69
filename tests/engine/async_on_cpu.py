"""Runs requests under asynchronous scheduling, which vLLM switches off on CPU and has on by default on GPU.

Placeholders stand for CUDA's streams and events. There is no overlap in time, but the order of events is the real one:
the real AsyncScheduler, a batch queue of two, one forward past each stop, decode tokens that the host does not know.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from steergate_server.runtime.config import SPOOL_ENVIRONMENT, EngineConfig
from support.engines import SMALL, Answer, answer_of, parameters


class Job(NamedTuple):
    """What the harness runs in one batch: encoded plans or None, sampling settings by request."""

    model: Path
    spool: Path
    config: EngineConfig
    settings: dict[str, Any]
    prompts: list[list[int]]
    plans: list[bytes | None]
    sampling: list[dict[str, Any]]


class AsyncAnswers(NamedTuple):
    """Answers, whether scheduling really was asynchronous, and what steering still held afterwards."""

    answers: list[Answer]
    asynchronous: bool
    status: dict[str, Any]


def run_async(job: Job) -> AsyncAnswers:
    """Run a job in a process of its own: the placeholders must not meet anybody else."""
    with tempfile.TemporaryDirectory() as folder:
        given, taken = Path(folder) / "job", Path(folder) / "answers"
        given.write_bytes(pickle.dumps(job))
        tests = str(Path(__file__).parents[1])
        environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", SPOOL_ENVIRONMENT: str(job.spool)}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")]))
        # Imported rather than run as a script: what is pickled must be found again under the module's name.
        program = "import sys; from engine.async_on_cpu import main; main(sys.argv[1:])"
        command = [sys.executable, "-c", program, str(given), str(taken)]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        if result.returncode:
            raise RuntimeError(result.stdout[-2000:] + result.stderr[-4000:])
        answers: AsyncAnswers = pickle.loads(taken.read_bytes())
        return answers


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None: ...
    def wait_stream(self, *_: Any) -> None: ...
    def wait_event(self, *_: Any) -> None: ...
    def synchronize(self) -> None: ...


class _Event(_Stream):
    def record(self, *_: Any) -> None: ...
    def query(self) -> bool:
        return True


def _place_placeholders() -> None:
    import torch

    @contextlib.contextmanager
    def stream(_: Any) -> Any:
        yield

    torch.cuda.Stream, torch.cuda.Event = _Stream, _Event  # type: ignore[misc]
    torch.cuda.stream, torch.cuda.current_stream = stream, lambda *_: _Stream()  # type: ignore[assignment]


def _run(job: Job) -> AsyncAnswers:
    _place_placeholders()
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    arguments = EngineArgs(
        model=str(job.model),
        worker_cls="steergate_server.vllm_plugin.worker.SteeringWorker",
        scheduler_cls="steergate_server.vllm_plugin.scheduler.SteeringScheduler",
        additional_config={"steering": msgspec.to_builtins(job.config)},
        enforce_eager=True,
        **{**SMALL, **job.settings},
    )
    config = arguments.create_engine_config()
    config.scheduler_config.async_scheduling = True
    engine = LLMEngine.from_vllm_config(config)
    for number, (prompt, plan, sampling) in enumerate(zip(job.prompts, job.plans, job.sampling, strict=True)):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, parameters(plan, **sampling))
    outputs = _finish(engine)
    engine.add_request("last", {"prompt_token_ids": [1, 2]}, parameters(None, 2))
    _finish(engine)
    scheduler = engine.engine_core.engine_core.scheduler
    (status,) = engine.collective_rpc("steergate_status")
    kept = len(scheduler._steered) + (0 if scheduler._ledger.empty else 1)
    return AsyncAnswers(
        [answer_of(outputs[str(number)]) for number in range(len(job.prompts))],
        "Async" in type(scheduler).__name__,
        {**status, "scheduler": kept},
    )


def _finish(engine: Any) -> dict[str, Any]:
    outputs = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            outputs[output.request_id] = output
    return outputs


def main(arguments: Sequence[str]) -> None:
    """What the process of its own does: two paths, of a pickled Job and of the answers to write."""
    job = pickle.loads(Path(arguments[0]).read_bytes())
    Path(arguments[1]).write_bytes(pickle.dumps(_run(job)))
