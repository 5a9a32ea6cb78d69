"""The op for CUDA without CUDA: interpreted, compiled for devices that are not there, and on tensors without data."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from steergate_server.graph.lanes import GateTable, Lanes
from steergate_server.graph.pools import Pool
from steergate_server.graph.router_op import steer_router
from steergate_server.graph.tables import RouterTables
from steergate_server.registry.numbers import StoredPayload
from steergate_server.registry.spool import Spool
from steergate_server.runtime.config import EngineConfig
from steergate_server.runtime.controller import Controller
from steergate_server.runtime.gates import CERTAIN, FIRED_LAST, LATCHED, NOTHING, GateState, sources_of
from steergate_server.runtime.history import History
from steergate_server.runtime.plan import Plan, PlannedGate
from unit.runtime.world import SITES, STREAM, WIDTH, geometry

HERE = Path(__file__).parent
META = torch.device("meta")
"""Tensors on it have no values: whatever asks for one raises, and so does mixing them with tensors of the host."""


@pytest.mark.parametrize(("file", "interpret"), [("interpreted.py", "1"), ("compiled.py", "0")])
def test_in_a_process_of_its_own(tmp_path, file, interpret):
    """Whether Triton interprets is settled as it is first imported, for the whole process."""
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "triton" / file)],
        env=os.environ | {"TRITON_INTERPRET": interpret, "TRITON_CACHE_DIR": str(tmp_path / "cache")},
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert "skipped" not in found.stdout


def test_the_state_of_gates_advances_without_a_question():
    state, lanes = GateState(5, 2, META), Lanes(8, 2, META)
    source = np.array([[CERTAIN, LATCHED], [FIRED_LAST, NOTHING]] * 2, dtype=np.int8)
    weights = state.weights(sources_of(source, np.array([1, 1, 2, 2]), np.array([0, 1]), META))
    assert weights.shape == (4, 2)
    assert weights.device == META
    state.advance(lanes, torch.tensor([1, 3], device=META), torch.tensor([2, 1], device=META))


@pytest.mark.parametrize("locked", [False, True])
def test_routers_are_steered_without_a_question(locked):
    tables = RouterTables(2, 5, Pool(4, 6, torch.float32, META), META)
    lanes, gates = Lanes(8, 2, META), GateTable(5, 2, META)
    logits = torch.zeros(7, 6, dtype=torch.bfloat16, device=META)
    numbers = [torch.zeros(count, dtype=torch.int32, device=META) for count in (1, 5, 8)]
    touches = torch.zeros(5, dtype=torch.bool, device=META)
    steer_router(logits, numbers[0], lanes, gates, touches, tables, 1, numbers[2] if locked else None, numbers[1])


def test_a_step_asks_the_device_nothing(tmp_path):
    """Laying out a step and advancing after it, with a gate whose history is replayed."""
    spool = Spool(tmp_path)
    ones = {f"{hook}/{layer:08d}": torch.ones(WIDTH).numpy() for hook, layer in STREAM}
    digest, _ = spool.put(StoredPayload("direction", ones, {}), durable=False)
    config = EngineConfig(hooks=tuple(dict.fromkeys(site.hook for site in SITES)), algorithms=("direct",), memory_mib=1)
    control = Controller(config, SITES, spool, dtype=torch.float32, device=META, max_rows=16, max_requests=4)
    gate = PlannedGate(
        when="probe", at="generated", scope="rest_of_request", apply="attenuate", keep=0.5,
        probe_digest=digest, probe_site=STREAM[0],
    )  # fmt: skip
    control.add("a", Plan(gates=(gate,)), [1, 2], 9)
    control._evidence = lambda _: {}  # it is the one thing that is read back
    control.resume("a", History([[2]], 3))
    for spans in ([("a", 0, 3), ("b", 0, 1)], [("b", 1, 1), ("a", 3, 1)], [("a", 4, 1)]):
        control.begin_step(geometry(spans))
        control.see_tokens(torch.zeros(16, dtype=torch.int64, device=META))
        assert control.end_step() == {}
