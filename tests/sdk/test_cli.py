"""`steerctl` as a process: what it prints where, and its exit codes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from safetensors.numpy import save_file

from sdk.player import CAPABILITIES, CONTRACT, Played, Player, refusal
from sdk.test_client_vectors import INFO, REGISTERED

STEERCTL = (sys.executable, "-m", "steergate.cli")


class Ran(NamedTuple):
    code: int
    out: str
    err: str


def environment(url: str, **more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("STEERGATE_")}
    return {**kept, "STEERGATE_BASE_URL": url, "STEERGATE_STEERING_API_KEY": "steering-secret", "COLUMNS": "60", **more}


def steerctl(server: Player | str, *arguments: str | Path, **more: str) -> Ran:
    url = server if isinstance(server, str) else server.url
    result = subprocess.run(
        [*STEERCTL, *map(str, arguments)],
        capture_output=True, text=True, env=environment(url, **more), timeout=120, check=False,
    )  # fmt: skip
    return Ran(result.returncode, result.stdout, result.stderr)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "calm.safetensors"
    save_file({f"layer.{layer}": np.full(2, layer, "f4") for layer in (3, 4, 11)}, path)
    return path


# register


def test_register(server, file):
    server.play(Played(body=REGISTERED))
    ran = steerctl(server, "vectors", "register", "calm", "--file", file, "--kind", "steer", "--scale", "0.5",
                   "--layers", "3-4", "--hook", "mlp_out", "-o", "json")  # fmt: skip
    assert (ran.code, json.loads(ran.out)) == (0, REGISTERED)
    assert ran.err == "", "under -o json, stderr holds one object or nothing"
    (request,) = server.requests
    assert request.headers["x-steering-api-key"] == "steering-secret"
    body = request.json
    assert (body["name"], body["kind"], body["replace"]) == ("calm", "steer", False)
    assert (body["packed"]["mlp_out"]["layer_indices"], body["packed"]["mlp_out"]["scales"]) == ([3, 4], [0.5, 0.5])


def test_register_prints_a_table(server, file):
    server.play(Played(body={**REGISTERED, "status": "replaced"}))
    ran = steerctl(
        server, "vectors", "register", "calm", "--file", file, "--kind", "probe", "--layers", "3", "--replace"
    )
    assert ran.code == 0
    lines = [line.split() for line in ran.out.splitlines() if line.strip()]
    assert lines[0] == ["STATUS", "NAME", "KIND", "DIGEST"]
    assert lines[-1] == ["replaced", "calm", "steer", "0" * 64]
    assert server.requests[0].json["replace"] is True


def test_a_name_that_exists(server, file):
    conflict = Played(409, refusal("name_conflict", "It exists.", "name"), {**CONTRACT, "x-request-id": "r1"})
    server.play(conflict)
    ran = steerctl(server, "vectors", "register", "calm", "--file", file, "-o", "json")
    assert (ran.code, ran.out) == (6, "")
    said = json.loads(ran.err.splitlines()[-1])
    assert said == {"error": {"code": "name_conflict", "message": "It exists.", "param": "name", "request_id": "r1"}}
    assert len(server.requests) == 1
    server.play(conflict, Played(body=INFO))
    ran = steerctl(server, "vectors", "register", "calm", "--file", file, "--if-absent", "-o", "json")
    assert (ran.code, json.loads(ran.out)["status"]) == (0, "present")


def test_the_convention_is_inferred_from_the_model(server, tmp_path):
    np.save(tmp_path / "stack.npy", np.ones((7, 2), "f4"))
    server.play(Played(body=CAPABILITIES), Played(body=REGISTERED))
    ran = steerctl(server, "vectors", "register", "calm", "--file", tmp_path / "stack.npy")
    assert ran.code == 0
    assert ran.err.splitlines()[:2] == ["stack.npy[0] -> the embeddings; not used", "stack.npy[1] -> 0:post_block"]
    assert server.requests[1].json["packed"]["post_block"]["layer_indices"] == [*range(6)]
    server.play(Played(body=REGISTERED))
    arguments = ("vectors", "register", "calm", "--file", tmp_path / "stack.npy", "--convention")
    assert steerctl(server, *arguments, "blocks").code == 0
    assert server.requests[0].json["packed"]["post_block"]["layer_indices"] == [*range(7)]


# The others


def test_list(server):
    server.play(Played(body=[{**INFO, "name": "n" * 60, "layers": [3, 4, 5, 9]}]))
    ran = steerctl(server, "vectors", "list", "--kind", "steer")
    assert (ran.code, ran.err, server.requests[0].path) == (0, "", "/v1/steering/vectors?kind=steer")
    lines = [line.split() for line in ran.out.splitlines() if line.strip()]
    assert lines[0] == ["NAME", "KIND", "HOOKS", "LAYERS", "WIDTH", "DIGEST"]
    assert lines[-1] == ["n" * 60, "steer", "post_block", "3-5,", "9", "2", "0" * 12]
    ran = steerctl(server, "vectors", "list", "-o", "json")
    assert json.loads(ran.out)[0]["layers"] == [3, 4, 5, 9]


def test_unregister(server):
    server.play(Played(body={"status": "unregistered", "name": "calm", "kind": "steer"}))
    ran = steerctl(server, "vectors", "unregister", "calm", "--kind", "steer", "-o", "json")
    assert (ran.code, json.loads(ran.out)["status"]) == (0, "unregistered")
    server.play(Played(404, refusal("unknown_vector")))
    ran = steerctl(server, "vectors", "unregister", "calm", "--kind", "steer")
    assert (ran.code, ran.out, ran.err) == (5, "", "error: No.\n")


def test_capabilities(server):
    server.play(Played(body=CAPABILITIES))
    ran = steerctl(server, "server", "capabilities", "-o", "json")
    assert (ran.code, json.loads(ran.out)["hidden_width"]) == (0, 4)
    ran = steerctl(server, "server", "capabilities")
    assert ran.code == 0
    assert "post_block" in ran.out
    assert "0-5" in ran.out


# Keys and addresses


def test_keys_come_from_files(server, tmp_path):
    server.play(Played(body=[]))
    (tmp_path / "key").write_text("file-secret\n")
    ran = steerctl(
        "http://127.0.0.1:1", "vectors", "list", "--api-key-file", tmp_path / "key", "--base-url", server.url
    )
    assert (ran.code, server.requests[0].headers["authorization"]) == (0, "Bearer file-secret")
    (tmp_path / "key").write_text("\n")
    assert steerctl(server, "vectors", "list", "--api-key-file", tmp_path / "key").code == 2


# Exit codes


@pytest.mark.parametrize(
    ("status", "code"), [(400, 3), (413, 3), (422, 3), (401, 4), (403, 4), (404, 5), (409, 6), (418, 1)]
)
def test_the_exit_code_of_each_refusal(server, status, code):
    server.play(Played(status, refusal("name_conflict" if status == 409 else "x", "Said so.")))
    ran = steerctl(server, "vectors", "list", "-o", "json")
    assert (ran.code, ran.out) == (code, "")
    assert json.loads(ran.err)["error"]["message"] == "Said so."


def test_a_server_that_is_not_there():
    ran = steerctl("http://127.0.0.1:1", "vectors", "list", "--output=json")
    assert (ran.code, json.loads(ran.err)["error"]["code"]) == (7, "unreachable")


def test_another_contract_is_a_failure(server):
    server.play(Played(body=[], headers={"X-Steering-Contract": "2.0"}))
    ran = steerctl(server, "vectors", "list")
    assert ran.code == 1
    assert ran.err.startswith("error: The server speaks steering contract 2.0")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["vectors"],
        ["bogus"],
        ["vectors", "list", "-o", "xml"],
        ["vectors", "register", "calm"],
        ["vectors", "unregister", "calm"],
        ["vectors", "register", "calm", "--file", "x.npy", "--layers", "5-3"],
        ["vectors", "register", "calm", "--file", "x.npy", "--layers", "3,3"],
        ["vectors", "register", "calm", "--file", "x.npy", "--replace", "--if-absent"],
    ],
    ids=" ".join,
)
def test_usage_errors(server, arguments):
    ran = steerctl(server, *arguments)
    assert (ran.code, ran.out) == (2, "")
    assert ran.err
    assert "Traceback" not in ran.err
    assert server.requests == []


def test_usage_errors_are_json_too(server):
    ran = steerctl(server, "vectors", "list", "--kind", "bogus", "-o", "json")
    assert (ran.code, json.loads(ran.err)["error"]["code"]) == (2, "usage")


def test_invalid_input(server, tmp_path):
    ran = steerctl(server, "vectors", "register", "calm", "--file", tmp_path / "none.npy", "-o", "json")
    assert (ran.code, json.loads(ran.err)["error"]["code"]) == (3, "unreadable")
    save_file({"layer.3": np.ones(2, "f4"), "bias": np.ones(2, "f4")}, tmp_path / "v.safetensors")
    ran = steerctl(server, "vectors", "register", "calm", "--file", tmp_path / "v.safetensors")
    assert ran.code == 3
    assert ran.err.startswith("error: Tensor `bias` names no layer")
    assert server.requests == []


def test_interrupted(server):
    server.play(Played(body=[], delay=5))
    command = [*STEERCTL, "vectors", "list"]
    process = subprocess.Popen(command, env=environment(server.url), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not server.requests and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130


def test_help_goes_to_stdout_and_is_quick(server):
    times = []
    for _ in range(5):
        start = time.perf_counter()
        ran = steerctl(server, "--help")
        times.append(time.perf_counter() - start)
    sys.stdout.write(f"steerctl --help: {min(times) * 1000:.0f} ms\n")
    assert (ran.code, ran.err) == (0, "")
    assert "130 interrupted" in " ".join(ran.out.split())
    assert min(times) < 2.0
    program = "import sys; sys.argv[1:] = ['--help']\nfrom steergate.cli.app import run\nrun(['--help'])\n"
    program += "print([name for name in ('httpx', 'rich', 'numpy', 'msgspec') if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert result.stdout.splitlines()[-1] == "[]"
