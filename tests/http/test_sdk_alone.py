"""The SDK's wheel, installed by itself into an empty environment, drives a running server from there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import venv
from pathlib import Path

import pytest

from support.server import MODEL_NAME, Server

ROOT = Path(__file__).parents[2]
WHEELS = Path(sys.prefix) / "wheels"
"""Wheels of what the SDK depends on; `make setup` keeps them, so that this test needs no network."""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An interpreter whose environment holds the SDK's wheel and what it depends on, and nothing of the server."""
    folder = tmp_path_factory.mktemp("alone")
    build = [
        sys.executable,
        "-m",
        "build",
        "--wheel",
        "--no-isolation",
        "--outdir",
        str(folder),
        str(ROOT / "sdk/python"),
    ]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = folder.glob("steergate-*.whl")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    install = ["-m", "pip", "install", "--quiet", "--no-index", "--find-links", str(WHEELS)]
    subprocess.run([python, *install, f"{wheel}[cli]", "numpy", "safetensors"], check=True, capture_output=True)
    return python


def run(python: Path, *arguments: str, server: Server | None = None) -> subprocess.CompletedProcess[str]:
    """Run something in the empty environment."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if server is not None:
        environment |= {"STEERGATE_BASE_URL": server.url, "STEERGATE_STEERING_API_KEY": "steering-key"}
    return subprocess.run(
        [python, *arguments], capture_output=True, text=True, env=environment, timeout=120, check=False
    )


def test_nothing_of_the_server_is_there(python: Path) -> None:
    missing = run(python, "-c", "import steergate_server")
    assert "No module named 'steergate_server'" in missing.stderr
    check = "import sys, steergate; print(*(name for name in ('httpx', 'numpy') if name in sys.modules))"
    assert run(python, "-c", check).stdout.strip() == ""


def test_the_sdk_steers(python: Path, server: Server) -> None:
    program = f"""
        import json
        from steergate import InvalidSteering, Steering, SteeringClient, When, Where

        with SteeringClient() as client:
            plan = Steering().vector("happy", where=Where.answer()).report("summary")
            plan = plan.gate(When.probe("topic", threshold=-1e6).scope("rest_of_request").add("happy", strength=0.5))
            client.check(plan)
            asked = dict(model={MODEL_NAME!r}, prompt="t5 t6 t7 t8", max_tokens=6, temperature=0)
            plain, steered = client.complete(**asked), client.complete(**asked, steering=plan)
            gate = steered.steering_report.choices[0].gates[0]
            try:
                When.probe("topic", threshold=float("nan")).scope("this_token").observe()
            except InvalidSteering as error:
                refused = [error.code, error.param]
            print(json.dumps([plain.text != steered.text, gate.evaluated, gate.fired, bool(steered.applied), refused]))
    """
    result = run(python, "-c", textwrap.dedent(program), server=server)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout) == [True, 5, 5, True, ["not_finite", "when.threshold"]]


def test_steerctl_registers_lists_and_unregisters(python: Path, server: Server, tmp_path: Path) -> None:
    write = "import numpy, sys; numpy.savez(sys.argv[1], **{'layer.1': numpy.ones(64, 'f4')})"
    file = tmp_path / "calm.npz"
    assert run(python, "-c", write, str(file)).returncode == 0

    def steerctl(*arguments: str) -> subprocess.CompletedProcess[str]:
        return run(python, "-m", "steergate.cli", *arguments, server=server)

    registered = steerctl("vectors", "register", "calm", "--file", str(file), "--kind", "steer", "-o", "json")
    assert registered.returncode == 0, registered.stderr
    assert json.loads(registered.stdout)["status"] == "created"
    listed = json.loads(steerctl("vectors", "list", "-o", "json").stdout)
    assert {"calm", "happy", "topic"} <= {entry["name"] for entry in listed}
    assert steerctl("vectors", "unregister", "calm", "--kind", "steer").returncode == 0
    assert steerctl("vectors", "unregister", "calm", "--kind", "steer").returncode == 5
    capabilities = json.loads(steerctl("server", "capabilities", "-o", "json").stdout)
    assert capabilities["layers"] == 4
    wide = tmp_path / "wide.npz"
    run(python, "-c", write.replace("64", "65"), str(wide))
    refused = steerctl("vectors", "register", "wide", "--file", str(wide), "--kind", "steer", "-o", "json")
    assert refused.returncode == 3
    assert json.loads(refused.stderr)["error"]["code"] == "width_mismatch"
