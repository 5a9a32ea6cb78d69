"""Selection of rows against the predicate, row by row."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from steergate_server.runtime.rows import RowSlots
from steergate_server.runtime.selection import (
    has_generation_part,
    ignores_phase,
    is_phase_only,
    reachable_phases,
    select,
)
from steergate_server.schema.requests import Where
from unit.runtime.clauses import CLAUSES, admitted
from unit.runtime.predicate import selects

torch.set_num_threads(1)

CPU = torch.device("cpu")
TOKEN_LISTS = st.lists(st.integers(0, 5), min_size=1, max_size=9)
PLANS = st.lists(CLAUSES.filter(admitted), min_size=1, max_size=4)


def mask_of(clauses, tokens, prompt, row):
    """The vectors that select a row, as a bit mask."""
    return sum(selects(clause, tokens, prompt, row) << number for number, clause in enumerate(clauses))


def masks(clauses, prompt, answer):
    """Masks of every row of a request, from the predicate."""
    tokens = [*prompt, *answer]
    return [mask_of(clauses, tokens, len(prompt), row) for row in range(len(tokens))]


def resolved(clauses, prompt, length):
    return select([Where(**clause) for clause in clauses], prompt, length)


@settings(max_examples=300, deadline=None)
@given(PLANS, TOKEN_LISTS, TOKEN_LISTS)
@example([{"prompt_positions": [-1], "exclude_prompt_positions": [0]}], [3], [1])
@example([{"prompt_window": (-20, None), "exclude_prompt_window": (2, -2)}], [1, 2, 3, 4, 5], [1])
@example([{"prompt_window": (-3, 4)}, {"prompt_window": (1, -1)}], [1, 2, 3, 4, 5], [1])
@example([{"answer": "all", "exclude_generation_window": (0, 1), "exclude_prompt_positions": [-1]}], [1], [1, 2])
def test_every_row(clauses, prompt, answer):
    selection = resolved(clauses, prompt, len(prompt) + len(answer))
    wanted = masks(clauses, prompt, answer)
    assert selection.prompt.tolist() == wanted[: len(prompt)]
    positions = np.arange(len(answer))
    assert selection.generated(positions, np.asarray(answer)).tolist() == wanted[len(prompt) :]
    assert set(wanted) - {0} <= set(selection.distinct())
    assert 0 not in selection.distinct()


@settings(max_examples=200, deadline=None)
@given(PLANS, TOKEN_LISTS, st.integers(1, 4))
def test_distinct_masks_are_those_of_some_answer(clauses, prompt, later):
    """Slots are acquired for every mask: one that no row can have must not make a request fail."""
    selection = resolved(clauses, prompt, len(prompt) + later)
    # More rows cannot be told apart by phase alone, so one stands for all of them.
    rows = [masks(clauses, prompt, [token] * later) for token in range(6)]
    assert set(selection.distinct()) == {mask for found in rows for mask in found} - {0}


@settings(max_examples=150, deadline=None)
@given(PLANS, TOKEN_LISTS, st.integers(1, 4))
def test_first_row(clauses, prompt, later):
    rows = np.array([masks(clauses, prompt, [token] * later) for token in range(6)]).any(axis=0).nonzero()[0]
    found = resolved(clauses, prompt, len(prompt) + later).first_row(len(prompt))
    if not any("generation_tokens" in clause and "exclude_generation_tokens" in clause for clause in clauses):
        assert found == (int(rows[0]) if len(rows) else None)
    else:
        # A row too early costs shared blocks only; one too late would share what must not be.
        assert not len(rows) or (found is not None and found <= rows[0])


@settings(max_examples=200, deadline=None)
@given(CLAUSES.filter(admitted), TOKEN_LISTS, TOKEN_LISTS, TOKEN_LISTS)
def test_what_is_said_of_a_clause_holds(clause, first, second, answer):
    where = Where(**clause)
    end = len(first) - 1
    found = masks([clause], first, answer)
    before, at_end, generated = reachable_phases(where)
    assert before or not any(found[:end])
    assert at_end or not found[end]
    assert generated or not any(found[end + 1 :])
    assert has_generation_part(where) or not any(found[end + 1 :])
    if is_phase_only(where):
        assert len({*found[:end]}) <= 1
        assert len({*found[end + 1 :]}) == 1
    if ignores_phase(where):
        tokens = [*first, *second, *answer]
        for prompt in range(1, len(tokens)):
            assert all(selects(clause, tokens, prompt, row) for row in range(len(tokens)))


@pytest.mark.parametrize(
    ("clause", "wanted"),
    [
        ({"prompt": "all"}, False),
        ({"prompt": "all", "generation": "all"}, True),
        ({"prompt": "all", "answer": "all"}, True),
        ({"answer": "all", "generation": "all"}, False),
        ({"prompt": "all", "generation": "all", "exclude_prompt_positions": [0]}, False),
    ],
)
def test_ignoring_the_phase(clause, wanted):
    assert ignores_phase(Where(**clause)) == wanted


# RowSlots


@settings(max_examples=200, deadline=None)
@given(PLANS, TOKEN_LISTS, TOKEN_LISTS, st.data())
def test_row_slots_over_chunks(clauses, prompt, answer, data):
    total = len(prompt) + len(answer)
    selection = resolved(clauses, prompt, total)
    slot_of = {0: 0} | {mask: 7 * number + 3 for number, mask in enumerate(reversed(selection.distinct()))}
    exact = not all(is_phase_only(Where(**clause)) for clause in clauses)
    rows = RowSlots(selection, slot_of, exact=exact, device=CPU)
    wanted = [slot_of[mask] for mask in masks(clauses, prompt, answer)]
    named = ("generation_tokens", "exclude_generation_tokens")
    assert rows.depends_on_token == any(name in clause for clause in clauses for name in named)
    if not exact:
        phases = [min(2, max(0, row - len(prompt) + 2)) if row >= len(prompt) - 1 else 0 for row in range(total)]
        assert rows.by_phase[phases].tolist() == wanted
    start = 0
    while start < total:
        count = data.draw(st.integers(1, total - start))
        found = rows.rows(start, count)
        assert found.dtype == np.int32
        settled = wanted[start : start + count]
        if rows.depends_on_token:
            settled = [slot if start + at < len(prompt) else 0 for at, slot in enumerate(settled)]
        assert found.tolist() == settled
        first = max(start, len(prompt))
        if rows.depends_on_token and first < start + count:
            positions = torch.arange(first, start + count) - len(prompt)
            tokens = torch.tensor(answer)[positions]
            assert rows.conditioned(positions, tokens).tolist() == wanted[first : start + count]
        start += count
