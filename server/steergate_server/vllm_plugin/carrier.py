"""The names under which steering travels through vLLM's own structures, and the two records that travel back."""

from __future__ import annotations

import copy
from typing import Any

from steergate_server.runtime.capacity import Capacity
from steergate_server.runtime.controller import Evidence
from steergate_server.schema.errors import SteeringError

PLAN_KEY = "steergate"
"""Key of the encoded plan in `SamplingParams.extra_args`, and of our dict in `EngineCoreOutput.kv_transfer_params`."""

HISTORY_ATTRIBUTE = "steergate_history"
"""Attribute of a `SchedulerOutput`: by request id, the History of requests that resume in this step."""

STEP_ATTRIBUTE = "steergate_step"
"""Attribute of a `ModelRunnerOutput` that holds a StepResult."""


class StepResult:
    """What a worker tells the scheduler about one step.

    `failures` and `evidence` of gates by request id, `capacity`: what the worker has room for, and `pool_used`: bytes
    of its payload pools in use.
    """

    __slots__ = ("capacity", "evidence", "failures", "pool_used")

    def __init__(
        self,
        failures: dict[str, dict[str, Any]],
        evidence: dict[str, list[Evidence]],
        capacity: Capacity,
        pool_used: int,
    ) -> None:
        self.pool_used = pool_used
        self.failures = failures
        self.evidence = evidence
        self.capacity = capacity


def failure(error: SteeringError) -> dict[str, Any]:
    """An error as plain values, the way it travels from the engine to the API server."""
    return {"code": error.code, "message": error.message, "param": error.param}


def plan_bytes(sampling_params: Any) -> bytes | None:
    """The encoded plan that a request carries, or None."""
    extra = getattr(sampling_params, "extra_args", None)
    return extra.get(PLAN_KEY) if extra else None


def with_plan(sampling_params: Any, encoded: bytes | None) -> Any:
    """A copy of sampling parameters that carries this plan, or none."""
    changed = copy.copy(sampling_params)
    extra = {name: value for name, value in (changed.extra_args or {}).items() if name != PLAN_KEY}
    if encoded is not None:
        extra[PLAN_KEY] = encoded
    changed.extra_args = extra or None
    return changed
