"""Prometheus metrics of the API server process; they join vLLM's own at `/metrics`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from steergate_server.runtime.engine_status import load_status
from steergate_server.runtime.plan import Plan
from steergate_server.schema.errors import SteeringError

_REQUESTS = Counter(
    "steergate_requests",
    "Admitted requests by what steers them: static, gates, both, conversation (no steering of its own).",
    ["kind"],
)
_REJECTIONS = Counter("steergate_rejections", "Refused requests by error code.", ["code"])
_FIRINGS = Counter("steergate_gate_firings", "Rows at which gates fired, of the requests that keep books of it.")
_ADMISSION = Histogram(
    "steergate_admission_seconds",
    "Time from a request's body to its plan.",
    buckets=(0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0),
)
_POOL = Gauge("steergate_pool_used_bytes", "Bytes of the payload pools in use, as of the engine's last step.")
_LATCHES = Gauge("steergate_latches", "Conversations with a latch, as of the engine's last step.")


def watch(folder: Path) -> None:
    """Read the engine's gauges from its status file whenever they are scraped."""
    _POOL.set_function(lambda: load_status(folder).pool_used)
    _LATCHES.set_function(lambda: load_status(folder).latches)


@contextmanager
def admission() -> Iterator[None]:
    """Time an admission, and count the refusal that it may end with."""
    start = time.perf_counter()
    try:
        yield
    except SteeringError as error:
        _REJECTIONS.labels(error.code).inc()
        raise
    finally:
        _ADMISSION.observe(time.perf_counter() - start)


def admitted(plan: Plan) -> None:
    """Count an admitted request."""
    static, gates = bool(plan.groups or plan.locked), bool(plan.gates)
    kind = "both" if static and gates else "static" if static else "gates" if gates else "conversation"
    _REQUESTS.labels(kind).inc()


def refused(error: SteeringError) -> None:
    """Count a refusal that came after admission."""
    _REJECTIONS.labels(error.code).inc()


def fired(rows: int) -> None:
    """Count rows at which the gates of a finished request fired."""
    if rows:
        _FIRINGS.inc(rows)


def counters() -> dict[str, int]:
    """Every counter of ours by its metric name, labels in braces, for the status route."""
    found = {}
    for metric in REGISTRY.collect():
        if metric.type == "counter" and metric.name.startswith("steergate_"):
            for sample in metric.samples:
                if sample.name.endswith("_total"):
                    labels = ",".join(f'{name}="{value}"' for name, value in sample.labels.items())
                    found[f"{sample.name}{{{labels}}}" if labels else sample.name] = int(sample.value)
    return found
