"""Runs requests on vLLM's V2 model runner, which is made for GPUs: here on CPU, under Triton's interpreter.

vLLM must be made to believe, before it is imported, that Triton has a backend for CPUs. That happens in a process of
its own, where each job's engine runs in turn.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from steergate_server.runtime.config import EngineConfig
from support.engines import Answer, SteeredEngine, StockEngine, answer_of, parameters

from .conftest import REGISTERED, SETTINGS
from .oracle import Case

PROGRAM = """
import sys, types
import triton.backends
backend = types.SimpleNamespace(compiler=None, driver=types.SimpleNamespace(is_active=lambda: False))
triton.backends.backends["cpu"] = backend
from engine.v2_on_cpu import main
main(sys.argv[1:])
"""

Trace = dict[tuple[int, str, int, int], list[float]]
"""By member of the batch, site, position and lane: the weights that were applied, in the order of time."""


class Member(NamedTuple):
    """One request of a batch. `sampling`: settings beside; `leaves_at`: its client goes after so many tokens; `plan`:
    what is sent in place of its own."""

    case: Case
    sampling: Mapping[str, Any] = {}
    leaves_at: int | None = None
    plan: bytes | None = None


class Job(NamedTuple):
    """An engine, and batches that it runs one after the other, each from a cold prefix cache."""

    model: Path
    batches: dict[str, list[Member]]
    settings: Mapping[str, Any] = {}
    eager: bool = True
    steered: bool = True
    asynchronous: bool = False


class Ran(NamedTuple):
    """A batch's answers and what was applied to whom."""

    answers: list[Answer]
    trace: Trace


class Done(NamedTuple):
    """A job's batches, the modules of its runner's classes, the class of its scheduler, and what steering still held
    afterwards."""

    batches: dict[str, Ran]
    runner: list[str]
    scheduler: str
    status: dict[str, Any]


class Running:
    """Jobs that run in a process of their own, from now on."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        given, self._taken = Path(self._folder.name) / "jobs", Path(self._folder.name) / "done"
        given.write_bytes(pickle.dumps(list(jobs)))
        tests = str(Path(__file__).parents[1])
        environment = {
            **os.environ,
            "TRITON_INTERPRET": "1",
            "VLLM_USE_V2_MODEL_RUNNER": "1",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "PYTHONPATH": os.pathsep.join(filter(None, [tests, os.environ.get("PYTHONPATH")])),
        }
        self._log = (Path(self._folder.name) / "log").open("w+")
        command = [sys.executable, "-c", PROGRAM, str(given), str(self._taken)]
        self._process = subprocess.Popen(command, env=environment, stdout=self._log, stderr=self._log)

    def result(self) -> list[Done]:
        """What the jobs came to, once they are through."""
        try:
            code = self._process.wait(timeout=500)
            self._log.seek(0)
            if code:
                raise RuntimeError(self._log.read()[-6000:])
            done: list[Done] = pickle.loads(self._taken.read_bytes())
            return done
        finally:
            self.close()

    def close(self) -> None:
        """End the process, if it still runs, and forget its files."""
        self._process.kill()
        self._process.wait()
        self._log.close()
        self._folder.cleanup()


def run_batch(engine: StockEngine, members: Sequence[Member]) -> Ran:
    """Run one batch on any engine. Nothing runs before all members are queued."""
    core, steered = engine.llm.llm_engine, engine if isinstance(engine, SteeredEngine) else None
    engine.llm.reset_prefix_cache()
    if steered is not None:
        steered.trace()
    engine.llm.sleep(level=0, mode="keep")
    owners = {}
    for number, member in enumerate(members):
        plan = member.plan or (None if steered is None else steered.plan(member.case.request))
        params = parameters(plan, member.case.max_tokens, **member.sampling)
        owners[core.add_request(str(number), {"prompt_token_ids": member.case.prompt}, params)] = number
    engine.llm.wake_up(tags=["scheduling"])
    answers: dict[int, Answer] = {}
    while core.has_unfinished_requests():
        for output in core.step():
            number = int(output.request_id)
            answers[number] = answer_of(output)
            leaves_at = members[number].leaves_at
            if leaves_at is not None and len(answers[number].tokens) >= leaves_at:
                core.abort_request([output.request_id])
    trace: Trace = defaultdict(list)
    if steered is not None:
        for _, site, request_id, position, lane, _, weight in steered.trace():
            trace[owners[request_id], site, position, lane].append(weight)
        steered.release()
    return Ran([answers[number] for number in range(len(members))], dict(trace))


def _run(job: Job) -> Done:
    settings = {**SETTINGS, "enforce_eager": job.eager, **job.settings}
    if job.steered:
        config = EngineConfig(hooks=("pre_attn", "post_block"), memory_mib=16, trace=job.eager)
        engine: StockEngine = SteeredEngine(job.model, config=config, **settings)
    else:
        engine = StockEngine(job.model, **settings)
    if isinstance(engine, SteeredEngine):
        for kind, vectors in REGISTERED.items():
            for name, source in vectors.items():
                engine.register(name, kind, source["packed"])
    batches = {name: run_batch(engine, members) for name, members in job.batches.items()}
    # An engine tells its worker of an end in the step that follows.
    run_batch(engine, [Member(Case([1, 2], None, 2))] * 2)
    core = engine.llm.llm_engine
    status = engine.status() if isinstance(engine, SteeredEngine) else {}
    done = Done(
        batches,
        [base.__module__ for base in type(core.model_executor.driver_worker.worker.model_runner).__mro__],
        type(core.engine_core.engine_core.scheduler).__name__,
        status,
    )
    engine.close()
    return done


def _schedule(*, asynchronously: bool) -> None:
    """Let engines to come schedule asynchronously or not; vLLM's own choice on CPU is not to."""
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_engine_config

    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = create(self, *args, **kwargs)
        config.scheduler_config.async_scheduling = asynchronously
        return config

    EngineArgs.create_engine_config = create_engine_config  # type: ignore[method-assign]


def main(arguments: Sequence[str]) -> None:
    """What the process of its own does: two paths, of pickled jobs and of what they come to."""
    done = []
    for job in pickle.loads(Path(arguments[0]).read_bytes()):
        _schedule(asynchronously=job.asynchronous)
        done.append(_run(job))
    Path(arguments[1]).write_bytes(pickle.dumps(done))
