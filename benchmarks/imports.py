"""What imports cost, in fresh interpreters, beside an interpreter that imports nothing."""

from __future__ import annotations

import resource
import subprocess
import sys
from time import perf_counter

from benchmarks.calls import Timing

BARE = "python, nothing imported"
CASES = {
    BARE: ["-c", "pass"],
    "import steergate": ["-c", "import steergate"],
    "a gate built, checked and encoded": [
        "-c",
        "from steergate import When, steering_body; "
        "steering_body(When.probe('a', layer=1, threshold=1).scope('this_token').add('b'))",
    ],
    "import steergate; SteeringClient": ["-c", "from steergate import SteeringClient"],
    "import steergate_server.schema.requests": ["-c", "import steergate_server.schema.requests"],
    "steerctl --help": ["-m", "steergate.cli", "--help"],
}
AIMS = {"import steergate": 60e-3}
"""Beyond the bare interpreter."""


def imports(rounds: int, *, cpu_time: bool) -> list[Timing]:
    """Time of each case, whole, and beyond the bare interpreter of the same round."""
    now = _childrens_time if cpu_time else perf_counter
    samples: dict[str, list[float]] = {name: [] for name in CASES}
    for number in range(rounds + 1):
        for name, arguments in CASES.items():
            started = now()
            subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
            if number:  # the first round fills the caches of files
                samples[name].append(now() - started)
    beyond = [
        Timing(
            f"{name} (beyond bare)",
            [whole - bare for whole, bare in zip(found, samples[BARE], strict=True)],
            AIMS.get(name),
        )
        for name, found in samples.items()
        if name != BARE
    ]
    return [Timing(BARE, samples[BARE], None), *beyond]


def _childrens_time() -> float:
    """Processor time of the processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
