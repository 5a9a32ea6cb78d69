"""Requests without steering get what stock vLLM gives them, bit for bit, whoever is beside them."""

from __future__ import annotations

from typing import Any

from reference.models import random_direction
from reference.wire import ALWAYS_IN_ANSWER, OBSERVE, add, gate, probe, static

from .conftest import HIDDEN, Pair
from .oracle import differ, prompt

PROMPTS = [
    prompt(300 + number, length) for number, length in enumerate((1, 2, 3, 17, 31, 32, 33, 40, 64, 65, 90, 150) * 2)
]
LENGTHS = [6 + number % 11 for number in range(len(PROMPTS))]
"""They leave at different steps."""

VECTOR = random_direction(80, HIDDEN, [0, 1, 2, 3], norm=8.0)
EARLY = random_direction(81, HIDDEN, [0, 1, 2, 3], "pre_attn", norm=8.0)
PROBE = random_direction(82, HIDDEN, [1])

NEIGHBOURS: list[Any] = [
    {"vectors": [static(VECTOR), static(EARLY)]},
    [gate(ALWAYS_IN_ANSWER, "this_token", add(EARLY))],
    {"vectors": [static(EARLY, {"generation": "all"})]},
    {
        "vectors": [static(VECTOR)],
        "gates": [gate(probe(PROBE, 0.0, at="answer"), "rest_of_request", {"kind": "attenuate", "keep": 0.0})],
    },
    [gate(probe(PROBE, 0.0), "this_token", OBSERVE)],
    [gate(probe(PROBE, 0.5, at="answer"), "next_step", add(VECTOR))],
]


def test_alone(pair: Pair) -> None:
    for engine in pair:
        engine.llm.reset_prefix_cache()
    requests = [None] * len(PROMPTS)
    assert pair.steered.run(PROMPTS, requests, LENGTHS) == pair.stock.run(PROMPTS, requests, LENGTHS)


def test_beside_steered_neighbours(pair: Pair) -> None:
    """Every second request is steered; the batch has the same shape as on stock vLLM."""
    for engine in pair:
        engine.llm.reset_prefix_cache()
    requests = [NEIGHBOURS[number // 2 % len(NEIGHBOURS)] if number % 2 else None for number in range(len(PROMPTS))]
    beside = pair.steered.steer(PROMPTS, requests, LENGTHS)
    stock = pair.stock.run(PROMPTS, [None] * len(PROMPTS), LENGTHS)
    assert beside[::2] == stock[::2]
    observing = [number for number, request in enumerate(requests) if request == NEIGHBOURS[4]]
    assert [beside[number]._replace(ours={}) for number in observing] == [stock[number] for number in observing]
    steered = [number for number, request in enumerate(requests) if request not in (None, NEIGHBOURS[4])]
    changed = sum(differ(beside[number], stock[number]) for number in steered)
    assert changed > 0.7 * len(steered)


def test_after_steered_requests(pair: Pair) -> None:
    """Nothing of requests that have ended stays in the lanes."""
    for engine in pair:
        engine.llm.reset_prefix_cache()
    pair.steered.steer(PROMPTS, [NEIGHBOURS[0]] * len(PROMPTS), LENGTHS)
    requests = [None] * 8
    assert pair.steered.run(PROMPTS[:8], requests, LENGTHS[:8]) == pair.stock.run(PROMPTS[:8], requests, LENGTHS[:8])
