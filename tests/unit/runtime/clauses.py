"""Random where-clauses that the rules admit."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from steergate_server.schema.requests import Where
from steergate_server.schema.rules_where import check_where

TOKENS = st.integers(0, 4)
"""Token ids that clauses name; prompts and answers hold one more."""

_ids = st.lists(TOKENS, min_size=1, max_size=3)
_prompt_positions = st.lists(st.integers(-12, 12), min_size=1, max_size=3)
_generation_positions = st.lists(st.integers(0, 12), min_size=1, max_size=3)
_prompt_windows = st.tuples(st.integers(-12, 12), st.one_of(st.none(), st.integers(-12, 12)))
_generation_windows = st.tuples(st.integers(0, 9), st.one_of(st.none(), st.integers(1, 12)))

_MEMBERS: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.just("all"),
    "generation": st.just("all"),
    "answer": st.just("all"),
    "prompt_tokens": _ids,
    "prompt_positions": _prompt_positions,
    "prompt_window": _prompt_windows,
    "generation_tokens": _ids,
    "generation_positions": _generation_positions,
    "generation_window": _generation_windows,
}
_MEMBERS |= {f"exclude_{name}": values for name, values in _MEMBERS.items() if "_" in name}

CLAUSES = st.sets(st.sampled_from(sorted(_MEMBERS)), min_size=1, max_size=5).flatmap(
    lambda names: st.fixed_dictionaries({name: _MEMBERS[name] for name in sorted(names)})
)
"""Clauses as plain mappings, of which `admitted` tells whether the rules let them through."""


def admitted(clause: dict[str, Any]) -> bool:
    """Whether the rules of clauses find nothing wrong with one."""
    return not list(check_where(Where(**clause)))
