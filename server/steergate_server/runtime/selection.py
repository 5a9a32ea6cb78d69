"""Which rows a clause selects: by phase here; the row range and the phase words are wire.md's.

Row p is the forward pass whose input is token p. A prompt has P rows; row P - 1 is the prompt end and rows from P on
are generated. A phase is a property of the row alone, never of the size of a chunk.
"""

from __future__ import annotations

import msgspec

from steergate_server.schema.requests import Where

BEFORE_PROMPT_END, PROMPT_END, GENERATED = 0, 1, 2
PHASES = 3

_PHASE_FIELDS = frozenset({"prompt", "generation", "answer"})


def unsupported_selectors(where: Where) -> list[str]:
    """Fields of a clause that this version cannot resolve yet, in the order of the wire."""
    given = msgspec.structs.asdict(where)
    return [name for name, value in given.items() if value is not None and name not in _PHASE_FIELDS]


def selects_phase(where: Where) -> tuple[bool, bool, bool]:
    """Whether a clause selects rows (before the prompt end, at the prompt end, generated)."""
    prompt = where.prompt is not None
    answer = where.answer is not None
    return prompt, prompt or answer, where.generation is not None or answer


def first_selected_row(where: Where, prompt_length: int) -> int:
    """The first row that a clause can select, given the prompt's length."""
    before, end, _ = selects_phase(where)
    if before:
        return 0
    return prompt_length - 1 if end else prompt_length


def ignores_phase(where: Where) -> bool:
    """Whether the clause treats every row alike, so that its effect does not depend on where the prompt ends."""
    return all(selects_phase(where))


def count_selected(where: Where, prompt_length: int, rows: int) -> int:
    """How many of the first `rows` rows of a request the clause selects."""
    before, end, generated = selects_phase(where)
    prompt_rows = min(rows, prompt_length)
    counts = (
        max(0, min(prompt_rows, prompt_length - 1)) if before else 0,
        int(prompt_rows == prompt_length) if end else 0,
        max(0, rows - prompt_length) if generated else 0,
    )
    return sum(counts)
