"""Fixtures of the client's tests: a playing server, a client of it, and its waits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sdk.player import Played, Player, player
from steergate import SteeringClient


@pytest.fixture(scope="session")
def running() -> Iterator[Player]:
    with player() as state:
        yield state


@pytest.fixture
def server(running: Player, monkeypatch: pytest.MonkeyPatch) -> Player:
    for name in ("BASE_URL", "API_KEY", "STEERING_API_KEY", "TIMEOUT"):
        monkeypatch.delenv(f"STEERGATE_{name}", raising=False)
    running.play(Played(body={}))
    return running


@pytest.fixture
def client(server: Player) -> Iterator[SteeringClient]:
    with SteeringClient(server.url, api_key="server-secret", steering_api_key="steering-secret") as made:
        yield made


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What the client slept, without sleeping."""
    slept: list[float] = []
    monkeypatch.setattr("steergate._transport.sleep", slept.append)
    return slept
