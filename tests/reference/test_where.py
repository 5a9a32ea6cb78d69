"""Row selection of the oracle against brute force."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from .checks import (
    PROMPT,
    P,
)
from .interpreter import selects
from .wire import Json


def _brute_force(where: Json, tokens: list[int]) -> set[int]:
    """The selected rows by slicing the list of rows: no per-row predicate anywhere."""
    rows = list(range(len(tokens)))
    prompt, generated = rows[:P], rows[P:]

    def phase(prefix: str) -> set[int]:
        chosen: set[int] = set()
        chosen |= {row for row in prompt if tokens[row] in where.get(f"{prefix}prompt_tokens", ())}
        chosen |= {row for row in generated if tokens[row] in where.get(f"{prefix}generation_tokens", ())}
        for position in where.get(f"{prefix}prompt_positions", ()):
            chosen |= set(prompt[position : position + 1 or None]) if -P <= position < P else set()
        for position in where.get(f"{prefix}generation_positions", ()):
            chosen |= set(generated[position : position + 1])
        if f"{prefix}prompt_window" in where:
            start, stop = where[f"{prefix}prompt_window"]
            chosen |= set(prompt[start:stop])
        if f"{prefix}generation_window" in where:
            start, stop = where[f"{prefix}generation_window"]
            chosen |= set(generated[start:stop])
        return chosen

    included = phase("")
    included |= set(prompt) if where.get("prompt") else set()
    included |= set(generated) if where.get("generation") else set()
    included |= set(rows[P - 1 :]) if where.get("answer") else set()
    return included - phase("exclude_")


def _choose(rng: np.random.Generator, options: list[Any]) -> Any:
    return options[int(rng.integers(len(options)))]


def _random_where(rng: np.random.Generator, tokens: list[int]) -> Json:
    makers = {
        "prompt_tokens": lambda: rng.choice(tokens, 2).tolist(),
        "generation_tokens": lambda: rng.choice(tokens, 2).tolist(),
        "prompt_positions": lambda: rng.integers(-P - 2, P + 2, 2).tolist(),
        "generation_positions": lambda: rng.integers(0, 10, 2).tolist(),
        "prompt_window": lambda: [int(rng.integers(-P - 2, P)), _choose(rng, [None, *range(-P, P + 3)])],
        "generation_window": lambda: _choose(
            rng, [[start, stop] for start in range(9) for stop in (None, start + 1, start + 4)]
        ),
    }
    where: Json = {name: "all" for name in ("prompt", "generation", "answer") if rng.random() < 0.3}
    for prefix, (name, make) in itertools.product(("", "exclude_"), makers.items()):
        if rng.random() < 0.3:
            where[prefix + name] = make()
    return where


def test_where_by_brute_force() -> None:
    rng = np.random.default_rng(2)
    sizes = set()
    for _ in range(3000):
        tokens = rng.integers(0, 8, P + 8).tolist()
        where = _random_where(rng, tokens)
        selected = {row for row in range(len(tokens)) if selects(where, row, tokens, P)}
        assert selected == _brute_force(where, tokens), (where, tokens)
        sizes.add(len(selected))
    assert sizes == set(range(P + 9))


@pytest.mark.parametrize(
    ("where", "rows"),
    [
        ({"prompt": "all"}, [0, 1, 2, 3, 4, 5]),
        ({"generation": "all"}, [6, 7, 8]),
        ({"answer": "all"}, [5, 6, 7, 8]),
        ({"answer": "all", "exclude_prompt_positions": [-1], "exclude_generation_positions": [1]}, [6, 8]),
        ({"prompt_positions": [-6, -7, 9, 2]}, [0, 2]),
        ({"prompt_window": [-2, None]}, [4, 5]),
        ({"prompt_window": [1, -3]}, [1, 2]),
        ({"prompt_window": [-99, 2]}, [0, 1]),
        ({"generation_window": [1, 2]}, [7]),
        ({"generation_window": [1, None], "exclude_generation_tokens": [7]}, [8]),
        ({"prompt_tokens": [7]}, [0, 2]),
        ({"generation_tokens": [7]}, [7]),
        ({"prompt": "all", "exclude_prompt_tokens": [7], "exclude_prompt_window": [3, 5]}, [1, 5]),
    ],
)
def test_where_in_examples(where: Json, rows: list[int]) -> None:
    tokens = [*PROMPT, 31, 7, 102]
    assert [row for row in range(len(tokens)) if selects(where, row, tokens, P)] == rows
