"""The command line of the benchmarks, and that a load fits the engines it is meant for."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.engines import MOST_REQUESTS, MOST_ROWS
from benchmarks.model import LAYERS
from benchmarks.options import FULL, PARTS, QUICK, Shape, modes, parse, shapes
from benchmarks.scenarios import CONTROL, DISTINCT, SERVED, STOCK, registered, served
from steergate_server.schema.decode import decode_steering, encode
from steergate_server.schema.requests import NamedVec, ProbeWhen


def test_defaults_measure_everything_in_both_modes() -> None:
    options = parse([])
    assert options.only == PARTS
    assert modes(options) == ("eager", "compiled")
    assert shapes(options) == FULL
    assert (options.dtype, options.threads, options.json, options.cpu_time) == ("float32", None, None, False)


def test_quick_is_eager_only() -> None:
    options = parse(["--quick"])
    assert modes(options) == ("eager",)
    assert shapes(options) == QUICK


def test_only_keeps_the_order_of_the_parts() -> None:
    assert parse(["--only", "imports,serving"]).only == ("serving", "imports")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "serving,speed"], "there is no speed"),
        (["--threads", "0"], "0 was given"),
        (["--cpu-time", "--threads", "2"], "takes one thread"),
        (["--json", "no/such/folder/file.json"], "does not exist"),
    ],
)
def test_usage_errors(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(arguments)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_a_file_in_the_folder_at_hand_is_fine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse(["--json", "found.json"]).json == Path("found.json")


@pytest.mark.parametrize("shape", [*QUICK, *FULL])
def test_a_prefill_is_one_step(shape: Shape) -> None:
    assert shape.batch <= MOST_REQUESTS
    assert shape.batch * shape.prompt <= MOST_ROWS


def test_all_256_requests_of_the_largest_load_are_steered_differently() -> None:
    largest = max(FULL, key=lambda shape: shape.batch)
    (one,) = [scenario for scenario in served(largest.batch, quick=False) if scenario is not CONTROL]
    assert len({str(one.steering(index)) for index in range(largest.batch)}) == largest.batch == DISTINCT


@pytest.mark.parametrize("scenario", [STOCK, *SERVED], ids=lambda scenario: scenario.name)
def test_scenarios_are_valid_and_name_what_is_registered(scenario) -> None:
    names = registered()
    steering = scenario.steering(3)
    if steering is None:
        assert not scenario.changes
        return
    request = decode_steering(encode(steering))
    assert request
    sources = [("steer", vector.steer) for vector in request.vectors]
    for gate in request.gates:
        assert isinstance(gate.when, ProbeWhen)
        sources += [("probe", gate.when.probe), ("steer", gate.apply.steer)]
    assert sources
    for kind, source in sources:
        assert isinstance(source, NamedVec)
        assert (kind, source.name) in names
    if scenario.name == "all layers":
        (name,) = [vector.steer.name for vector in request.vectors]
        assert names["steer", name]["post_block"]["layer_indices"] == list(range(LAYERS))
