"""The op of a site by itself, beside the memory that it must move: how far from the limit it is."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.clock import Now
from benchmarks.scenarios import ALWAYS, PROBED, gates, packed, vector
from benchmarks.spread import spread

WIDTH = 4096
ROWS = (8, 64, 512)
"""One token of so many requests."""

_COLD_BYTES = 64 * 2**20
"""The rows come from memory, as after a block's matrices, not out of a cache."""


class OpTiming(NamedTuple):
    """Seconds of one call by round, and the bytes that it must read and write. `limit`: bytes a second of a plain copy
    of many megabytes on this machine."""

    name: str
    samples: list[float]
    bytes: int
    limit: float

    @property
    def share(self) -> float:
        """The share of the bandwidth that the call reaches."""
        return self.bytes / spread(self.samples).median / self.limit


def op(now: Now, rounds: int, dtype: str) -> list[OpTiming]:
    """Time the op for one vector, for as many vectors as rows, and for one gate of every row."""
    import torch

    kind = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
    limit = _copy_bandwidth(now)
    found = []
    with tempfile.TemporaryDirectory(prefix="steergate-bench-") as folder:
        admit, control = _world(Path(folder), kind)
        for rows in ROWS:
            row = WIDTH * kind.itemsize
            cases: dict[str, tuple[Callable[[int], dict[str, Any]], int]] = {
                # Read the rows and what is added, write the rows.
                f"{rows} rows, one vector": (lambda _: vector("steer-0"), 2 * rows * row + row),
                f"{rows} rows, each its own vector": (lambda n: vector(f"steer-{n}"), 3 * rows * row),
                # The probe is float32.
                f"{rows} rows, one gate that adds": (lambda _: gates(1, ALWAYS), 2 * rows * row + row + 4 * WIDTH),
            }
            for name, (steering, size) in cases.items():
                found.append(OpTiming(name, _time(control, admit, steering, rows, kind, now, rounds), size, limit))
    return found


def _time(
    control: Any, admit: Callable[[dict[str, Any]], Any], steering: Callable[[int], dict[str, Any]], rows: int,
    kind: Any, now: Now, rounds: int,
) -> list[float]:  # fmt: skip
    import torch

    from steergate_server.runtime.geometry import StepGeometry

    names = [f"request-{number}" for number in range(rows)]
    for number, name in enumerate(names):
        control.add(name, admit(steering(number)), [1, 2], 64)
    control.begin_step(StepGeometry(names, np.ones(rows, dtype=np.int64), np.full(rows, 5, dtype=np.int64)))
    several = [
        torch.zeros(rows, WIDTH, dtype=kind) for _ in range(max(2, _COLD_BYTES // (rows * WIDTH * kind.itemsize)))
    ]
    turn = cycle(several)
    samples = []
    for _ in range(rounds + 1):
        started = now()
        for _ in range(50):
            control.steer(next(turn), None, 0)
        samples.append((now() - started) / 50)
    control.end_step()
    assert all(bool(hidden.any()) for hidden in several[:50]), "the op did nothing"
    for name in names:
        control.finish(name)
    return samples[1:]


def _copy_bandwidth(now: Now) -> float:
    import torch

    source = torch.zeros(_COLD_BYTES, dtype=torch.uint8)
    target = torch.ones_like(source)
    samples = []
    for _ in range(9):
        started = now()
        target.copy_(source)
        samples.append(now() - started)
    return 2 * _COLD_BYTES / spread(samples).median


def _world(folder: Path, kind: Any) -> tuple[Callable[[dict[str, Any]], Any], Any]:
    """What makes a plan of a request, and a controller of one site."""
    import msgspec
    import torch

    from steergate_server.registry.names import NameIndex
    from steergate_server.registry.spool import Spool
    from steergate_server.runtime.admission import Admission
    from steergate_server.runtime.config import EngineConfig
    from steergate_server.runtime.controller import Controller
    from steergate_server.runtime.sites import Site
    from steergate_server.runtime.sources import ModelFacts
    from steergate_server.schema.decode import decode_steering, encode
    from steergate_server.schema.payloads import DirectionPayload

    spool, random = Spool(folder), np.random.default_rng(5)
    names, config, sites = NameIndex(spool), EngineConfig(memory_mib=64), (Site(0, "post_block", WIDTH),)
    for number in range(max(ROWS)):
        rows = msgspec.convert({"kind": "direction", "packed": packed(random, [0], WIDTH)}, DirectionPayload)
        names.register(f"steer-{number}", "steer", rows)
    names.register(f"probe-{PROBED[0]}", "probe", rows)
    names.register("late", "steer", rows)
    control = Controller(
        config, sites, spool, dtype=kind, device=torch.device("cpu"), max_rows=max(ROWS), max_requests=max(ROWS)
    )
    admission = Admission(config, ModelFacts("op", 1, WIDTH, sites, control.book.capacity), names)

    def admit(steering: dict[str, Any]) -> Any:
        request = decode_steering(encode(steering))
        assert request
        return admission.admit(request).plan

    return admit, control
