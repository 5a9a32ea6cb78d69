"""Clients that go away: nothing of theirs stays behind."""

from __future__ import annotations

import functools
import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import httpx

from reference.models import random_direction
from reference.wire import ALWAYS, EVERYWHERE, add, gate, static
from support.server import ROUTES, Api, Server, request_body

HIDDEN = 64


def steering(seed: int) -> dict[str, Any]:
    """A vector and three gates with numbers of their own: four slots, four payloads. The server has 64 slots."""
    vectors = [random_direction(seed * 10 + part, HIDDEN, [0, 1, 2, 3], norm=2.0) for part in range(4)]
    gates = [gate(ALWAYS, "rest_of_request", add(vector)) for vector in vectors[1:]]
    return {"vectors": [static(vectors[0], EVERYWHERE)], "gates": gates, "report": "summary"}


def leave_mid_stream(url: str, seed: int) -> None:
    """Read some of a long stream, of one choice or of several, and close the connection."""
    several = {"n": 2, "temperature": 1} if seed % 2 else {}
    body = request_body("completions", stream=True, max_tokens=250, steering=steering(seed), **several)
    with (
        httpx.Client(base_url=url, timeout=30, trust_env=False) as client,
        client.stream("POST", ROUTES["completions"], json=body) as response,
    ):
        assert response.status_code == 200
        lines = response.iter_lines()
        for _ in range(3):
            assert next(line for line in lines if line).startswith("data: {")


def leave_at_once(url: str, seed: int, stream: bool) -> None:
    """Send a request and close the connection without reading anything."""
    address = urlsplit(url)
    body = json.dumps(request_body("chat", stream=stream, max_tokens=250, steering=steering(seed))).encode()
    head = f"POST {ROUTES['chat']} HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((address.hostname or "", address.port or 0)) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(0.02)


def leave(url: str, seed: int) -> None:
    """Go away in one of three ways."""
    if seed % 3:
        leave_mid_stream(url, seed)
    else:
        leave_at_once(url, seed, stream=seed % 2 == 0)


def test_clients_that_go_away_leave_nothing(server: Server, api: Api, reference: Any) -> None:
    spool = server.spool()
    stored = {path.name for path in spool.iterdir()}
    assert stored, "the registered vectors are there, so this is the right folder"
    plain, kept = api.ask("completions"), steering(0)
    steered = api.ask("completions", steering=kept)
    assert steered.tokens == reference(kept).tokens
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(functools.partial(leave, server.url), range(1, 31)))
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        busy = api.metric("vllm:num_requests_running") + api.metric("vllm:num_requests_waiting")
        left = {path.name for path in spool.iterdir()} - stored
        if not busy and not left:
            break
        time.sleep(0.1)
    assert not busy
    assert not left, "payloads of requests that are over"
    assert api.ask("completions").logprobs == plain.logprobs
    # More requests than there is room for at once: a slot that was kept would be missing now.
    for seed in range(0, 20):
        assert api.ask("completions", max_tokens=2, steering=steering(seed)).status == 200
    again = api.ask("completions", steering=kept)
    assert (again.tokens, again.logprobs, again.report) == (steered.tokens, steered.logprobs, steered.report)
