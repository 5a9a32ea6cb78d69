"""`make demo ARGS=--json`: the bundled model, its vectors, and what the three variants must show."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "server" / "steergate_server" / "demo"


@pytest.fixture(scope="module")
def variants() -> dict[str, dict]:
    """What the demonstration prints as its last line."""
    command = [sys.executable, "-m", "steergate_server.demo", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout.splitlines()[-1])["variants"]


def test_shares(variants: dict[str, dict]) -> None:
    assert set(variants) == {"plain", "steered", "gated"}
    assert all(len(variant["prompts"]) == len(variant["texts"]) >= 40 for variant in variants.values())
    assert 0.35 <= variants["plain"]["positive_share"] <= 0.65
    assert variants["steered"]["positive_share"] >= 0.9


def test_the_gate_changes_its_topic_alone(variants: dict[str, dict]) -> None:
    topic = json.loads((DEMO / "vectors" / "vectors.json").read_text())["probe"]["topic"]
    prompts = json.loads((DEMO / "prompts.json").read_text())
    plain, gated = variants["plain"], variants["gated"]
    assert gated["prompts"] == [prompt["text"] for prompt in prompts]
    inside = [index for index, prompt in enumerate(prompts) if prompt["topic"] == topic]
    outside = [index for index, prompt in enumerate(prompts) if prompt["topic"] != topic]
    assert [gated["texts"][index] for index in outside] == [plain["texts"][index] for index in outside]
    assert sum(gated["texts"][index] != plain["texts"][index] for index in inside) >= len(inside) / 3
    fired = [gate["fired"] > 0 for gate in gated["report"]["gates"]]
    assert fired == [prompt["topic"] == topic for prompt in prompts]
