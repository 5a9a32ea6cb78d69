"""The names under which steering travels through vLLM's own structures, and the two records that travel back."""

from __future__ import annotations

from typing import Any

from steergate_server.runtime.capacity import Capacity
from steergate_server.runtime.controller import Evidence

PLAN_KEY = "steergate"
"""Key of the encoded plan in `SamplingParams.extra_args`, and of our dict in `EngineCoreOutput.kv_transfer_params`."""

HISTORY_ATTRIBUTE = "steergate_history"
"""Attribute of a `SchedulerOutput`: by request id, the History of requests that resume in this step."""

STEP_ATTRIBUTE = "steergate_step"
"""Attribute of a `ModelRunnerOutput` that holds a StepResult."""


class StepResult:
    """What a worker tells the scheduler about one step.

    `failures` and `evidence` of gates by request id, and `capacity`: what the worker has room for.
    """

    __slots__ = ("capacity", "evidence", "failures")

    def __init__(self, failures: dict[str, dict[str, Any]], evidence: dict[str, Evidence], capacity: Capacity) -> None:
        self.failures = failures
        self.evidence = evidence
        self.capacity = capacity


def plan_bytes(sampling_params: Any) -> bytes | None:
    """The encoded plan that a request carries, or None."""
    extra = getattr(sampling_params, "extra_args", None)
    return extra.get(PLAN_KEY) if extra else None
