"""Starts `steergate-serve --demo` on a free loopback port, and ends it."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import httpx

START_SECONDS = 180


@contextlib.contextmanager
def demo_server() -> Iterator[tuple[str, str]]:
    """The server's base URL and its steering key. Raises RuntimeError with the log's end where it does not come up."""
    port, key = _free_port(), secrets.token_urlsafe(16)
    environment = os.environ | {
        "STEERGATE_STEERING_API_KEY": key,
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [sys.executable, "-m", "steergate_server.vllm_plugin.serve", "--demo"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"]
    with tempfile.TemporaryFile() as log:
        # A session of its own, so that the engine's processes end with it.
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            url = f"http://127.0.0.1:{port}"
            if not _comes_up(url, process):
                log.seek(max(0, log.tell() - 4_000))
                raise RuntimeError(f"the server did not start:\n{log.read().decode(errors='replace')}")
            yield url, key
        finally:
            _end(process)


def _comes_up(url: str, process: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=2).is_success:
                return True
        time.sleep(0.25)
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    for how in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=15)
            return


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
