"""What the requests of a load ask for, as wire objects, and the vectors that they name."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.model import LAYERS, WIDTH

DISTINCT = 256
"""Registered vectors of all layers, each another."""

PROBED = (2, 4, 6, 8)
STEERED_BY_GATES = (10, 11)
SCOPES = ("this_token", "next_step", "rest_of_request", "this_token")
NEVER, ALWAYS = 1e6, -1e6
"""Thresholds that no score of this model passes, or every one."""

LENGTH = 8.0

_EVERYWHERE = {"prompt": "all", "generation": "all"}


class Scenario(NamedTuple):
    """What a load's requests ask for. `aim`: the most that its time over stock vLLM's should be, None for no aim.

    `changes`: answers must differ from unsteered ones, or the benchmark would measure steering that is not there.
    """

    name: str
    steering: Callable[[int], dict[str, Any] | None]
    aim: float | None
    changes: bool


def _nothing(_: int) -> None:
    return None


def vector(name: str) -> dict[str, Any]:
    """A named vector at every row."""
    return {"vectors": [{"steer": {"kind": "name", "name": name}, "where": _EVERYWHERE}]}


def gates(count: int, threshold: float) -> dict[str, Any]:
    """Gates of named probes that add the vector `late`."""
    return {
        "gates": [
            {
                "when": {
                    "kind": "probe",
                    "probe": {"kind": "name", "name": f"probe-{PROBED[number]}"},
                    "threshold": threshold,
                },
                "scope": SCOPES[number],
                "apply": {"kind": "add", "steer": {"kind": "name", "name": "late"}},
            }
            for number in range(count)
        ]
    }


STOCK = Scenario("stock", _nothing, None, False)
CONTROL = Scenario("stock again", _nothing, None, False)
IDLE = Scenario("idle", _nothing, 1.01, False)
ONE_LAYER = Scenario("one layer", lambda _: vector("single"), None, True)
ALL_LAYERS = Scenario("all layers", lambda _: vector("all-0"), 1.03, True)
EACH_ITS_OWN = Scenario("each its own", lambda index: vector(f"all-{index % DISTINCT}"), 1.05, True)
GATES = tuple(
    Scenario(
        f"{count} gate{'s' * (count > 1)}, {'firing' if fires else 'quiet'}",
        lambda _, count=count, fires=fires: gates(count, ALWAYS if fires else NEVER),  # type: ignore[misc]
        1.03 if count == 1 else 1.05,
        fires,
    )
    for count in (1, 4)
    for fires in (False, True)
)

DECODE_ONLY = Scenario(
    "vectors and gates on the answer",
    lambda index: {
        "vectors": [{"steer": {"kind": "name", "name": f"all-{index}"}, "where": {"generation": "all"}}],
        **gates(2, ALWAYS),
    },
    None,
    True,
)
"""What leaves the prompt alone, another vector for each request."""

SERVED = (CONTROL, IDLE, ONE_LAYER, ALL_LAYERS, EACH_ITS_OWN, *GATES)
"""In the order of the report. `stock again` is a second process of stock vLLM: what two equal processes differ by."""

BY_NAME = {scenario.name: scenario for scenario in (STOCK, DECODE_ONLY, *SERVED)}


def served(batch: int, *, quick: bool) -> list[Scenario]:
    """The scenarios that are worth their time at a batch size."""
    if batch > 32 or (quick and batch > 8):
        return [CONTROL, EACH_ITS_OWN]
    kept = [scenario for scenario in SERVED if scenario is not EACH_ITS_OWN or batch > 1]
    return [scenario for scenario in kept if scenario.changes or scenario not in GATES] if quick else kept


def registered() -> dict[tuple[str, str], dict[str, Any]]:
    """The vectors that scenarios name: by kind and name, the numbers as the wire packs them."""
    random = np.random.default_rng(7)
    every = range(LAYERS)
    found = {("steer", f"all-{number}"): packed(random, every) for number in range(DISTINCT)}
    found |= {("probe", f"probe-{layer}"): packed(random, [layer]) for layer in PROBED}
    return found | {
        ("steer", "single"): packed(random, [LAYERS // 2]),
        ("steer", "late"): packed(random, STEERED_BY_GATES),
    }


def packed(random: np.random.Generator, layers: Sequence[int], width: int = WIDTH) -> dict[str, Any]:
    """Random directions of a length that changes answers, one for each layer, after the blocks."""
    rows = random.standard_normal((len(layers), width))
    rows *= LENGTH / np.linalg.norm(rows, axis=1, keepdims=True)
    return {
        "post_block": {
            "dtype": "float32",
            "shape": [len(layers), width],
            "layer_indices": list(layers),
            "data": base64.b64encode(rows.astype("<f4").tobytes()).decode(),
        }
    }
