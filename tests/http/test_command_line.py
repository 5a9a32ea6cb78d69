"""`steergate-serve` with a command line that it cannot honour: exit code 2, the flag's name, no engine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from steergate_server.runtime.config import SPOOL_ENVIRONMENT
from steergate_server.runtime.front_config import FRONT_ENVIRONMENT
from steergate_server.vllm_plugin import serve
from support.server import COMMAND, environment

NO_MODEL = "no-such-model"

REFUSED: dict[str, tuple[list[str], str]] = {
    "nothing": ([], "MODEL"),
    "no-model": (["--steer-hooks", "post_block"], "MODEL"),
    "model-and-demo": ([NO_MODEL, "--demo"], "--demo"),
    "unknown-flag": ([NO_MODEL, "--steer-foo", "1"], "--steer-foo"),
    "unknown-flag-with-equals": ([NO_MODEL, "--steering-foo=1"], "--steering-foo"),
    "unknown-flag-with-underscores": ([NO_MODEL, "--steer_foo", "1"], "--steer-foo"),
    "abbreviated": ([NO_MODEL, "--steer-hook", "post_block"], "--steer-hook"),
    "graph-mode": ([NO_MODEL, "--steer-graph-mode", "fast"], "--steer-graph-mode"),
    "default": ([NO_MODEL, "--steering-default", "default.json"], "--steering-default"),
    "store": ([NO_MODEL, "--steering-store", ":memory:"], "--steering-store"),
    "worker": ([NO_MODEL, "--worker-cls", "a.B"], "--worker-cls"),
    "worker-with-equals": ([NO_MODEL, "--worker-cls=a.B"], "--worker-cls"),
    "worker-with-underscore": ([NO_MODEL, "--worker_cls", "a.B"], "worker"),
    "scheduler": ([NO_MODEL, "--scheduler-cls", "a.B"], "--scheduler-cls"),
    "scheduler-with-underscore": ([NO_MODEL, "--scheduler_cls=a.B"], "scheduler"),
    "api-servers": ([NO_MODEL, "--api-server-count", "2"], "--api-server-count"),
    "api-servers-with-underscores": ([NO_MODEL, "--api_server_count", "2"], "api"),
    "unknown-hook": ([NO_MODEL, "--steer-hooks", "post_blok"], "--steer-hooks"),
    "no-hooks": ([NO_MODEL, "--steer-hooks", ","], "--steer-hooks"),
    "unknown-algorithm": ([NO_MODEL, "--steer-algorithms", "direct,nothing"], "--steer-algorithms"),
    "unknown-source": ([NO_MODEL, "--steer-sources", "file"], "--steer-sources"),
    "no-memory": ([NO_MODEL, "--steering-memory", "0"], "--steering-memory"),
    "no-gates": ([NO_MODEL, "--max-gates-per-request", "0"], "--max-gates-per-request"),
    "gates-as-text": ([NO_MODEL, "--max-gates-per-request", "four"], "--max-gates-per-request"),
    "additional-config-broken": ([NO_MODEL, "--additional-config", "{"], "--additional-config"),
    "additional-config-list": ([NO_MODEL, "--additional-config", "[]"], "--additional-config"),
    "additional-config-number": ([NO_MODEL, "--additional-config", "3"], "--additional-config"),
    "additional-config-steering": ([NO_MODEL, "--additional-config", '{"steering": {}}'], "--additional-config"),
}


@pytest.mark.parametrize(("arguments", "named"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_honoured_is_a_usage_error(
    arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (FRONT_ENVIRONMENT, SPOOL_ENVIRONMENT, "VLLM_PLUGINS"):
        monkeypatch.setenv(name, "")  # so that what a command line that is let through sets is taken back
    handed_over: list[list[str]] = []
    monkeypatch.setattr(serve, "_hand_over", handed_over.append)
    code: object = None
    try:
        serve.main(arguments)
    except SystemExit as ended:
        code = ended.code
    assert handed_over == [], "vLLM would have been started"
    assert_usage_error(code, capsys.readouterr().err, named)


@pytest.mark.parametrize("name", ["no-model", "unknown-flag", "graph-mode", "worker"])
def test_a_usage_error_ends_the_process_at_once(name: str, tmp_path: Path) -> None:
    arguments, named = REFUSED[name]
    started = time.monotonic()
    ended = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, env=environment(), cwd=tmp_path, timeout=60, check=False
    )
    assert_usage_error(ended.returncode, ended.stderr, named)
    assert ended.stdout == ""
    assert time.monotonic() - started < 20


def assert_usage_error(code: object, output: str, named: str) -> None:
    """Exit code 2, and a last line that names the flag in a user's words."""
    assert code == 2, output
    last = output.rstrip().splitlines()[-1]
    assert last.startswith("steergate-serve: error: "), last
    assert named in last
    for word in ("_positive", "_words", "loads"):
        assert word not in last, "no names of functions in a message"


def test_the_console_script_is_the_same_program() -> None:
    script = Path(sys.executable).with_name("steergate-serve")
    ended = subprocess.run(
        [script, "--help"], capture_output=True, text=True, env=environment(), timeout=60, check=False
    )
    assert ended.returncode == 0
    assert ended.stdout.startswith("usage: steergate-serve MODEL")
    for flag in ("--steer-hooks", "--steer-algorithms", "--steering-api-key", "--max-gates-per-request"):
        assert flag in ended.stdout


def test_spools_of_killed_servers_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen([sys.executable, "-c", "pass"])
    ended.wait()
    gone, kept = tmp_path / f"steergate-spool-{ended.pid}-a", tmp_path / f"steergate-spool-{os.getpid()}-b"
    other = tmp_path / "steergate-spool-notes-c"
    for folder in (gone, kept, other):
        folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    serve._sweep_spools()
    assert [folder.exists() for folder in (gone, kept, other)] == [False, True, True]
