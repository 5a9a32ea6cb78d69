"""`can_overlap` against a search over every small prompt and answer."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from steergate_server.schema.requests import Where
from steergate_server.schema.rules_where import can_overlap

TOKENS = (0, 1, 2)  # 2 is in no clause
LONGEST = 9  # positions and bounds stay within 3 of either end, so longer prompts bring nothing new


def in_window(window, position, length):
    start, stop = window
    if length is not None:
        return position in range(length)[start:stop]
    return start <= position and (stop is None or position < stop)


def selects(where, phase, position, length, token):
    """Whether the clause selects one row, straight from the wire document."""

    def matches(prefix):
        tokens = getattr(where, f"{prefix}_tokens")
        positions = getattr(where, f"{prefix}_positions")
        window = getattr(where, f"{prefix}_window")
        here = {position, position - length} if length is not None else {position}
        return (
            (tokens is not None and token in tokens)
            or (positions is not None and bool(here & set(positions)))
            or (window is not None and in_window(window, position, length))
        )

    everything = where.prompt if phase == "prompt" else where.generation
    answer = where.answer is not None and (phase == "generation" or position == length - 1)
    return (everything is not None or answer or matches(phase)) and not matches(f"exclude_{phase}")


def search(a, b):
    rows = [("prompt", p, length, t) for length in range(1, LONGEST) for p in range(length) for t in TOKENS]
    rows += [("generation", j, None, t) for j in range(LONGEST) for t in TOKENS]
    return any(selects(a, *row) and selects(b, *row) for row in rows)


def optional(strategy):
    return st.none() | st.none() | strategy


TOKEN_LISTS = st.lists(st.sampled_from((0, 1)), min_size=1, max_size=2)
PROMPT_POSITIONS = st.lists(st.integers(-3, 3), min_size=1, max_size=2)
PROMPT_WINDOWS = st.tuples(st.integers(-3, 3), st.none() | st.integers(-3, 3))
POSITIONS = st.lists(st.integers(0, 3), min_size=1, max_size=2)
WINDOWS = st.tuples(st.integers(0, 3), st.none() | st.integers(0, 4))
ALL = st.just("all")
WHERE = st.builds(
    Where,
    prompt=optional(ALL),
    generation=optional(ALL),
    answer=optional(ALL),
    prompt_tokens=optional(TOKEN_LISTS),
    prompt_positions=optional(PROMPT_POSITIONS),
    prompt_window=optional(PROMPT_WINDOWS),
    generation_tokens=optional(TOKEN_LISTS),
    generation_positions=optional(POSITIONS),
    generation_window=optional(WINDOWS),
    exclude_prompt_tokens=optional(TOKEN_LISTS),
    exclude_prompt_positions=optional(PROMPT_POSITIONS),
    exclude_prompt_window=optional(PROMPT_WINDOWS),
    exclude_generation_tokens=optional(TOKEN_LISTS),
    exclude_generation_positions=optional(POSITIONS),
    exclude_generation_window=optional(WINDOWS),
)


@settings(max_examples=3000, deadline=None)
@given(WHERE, WHERE)
@example(Where(prompt_positions=[-1]), Where(answer="all"))
@example(Where(prompt="all", exclude_prompt_positions=[-1]), Where(answer="all", exclude_generation_window=(0, None)))
@example(Where(prompt_window=(1, -1)), Where(prompt="all", exclude_prompt_window=(1, -1)))
@example(Where(generation_tokens=[0]), Where(generation_tokens=[1]))
@example(Where(generation_tokens=[0]), Where(generation_positions=[1]))
def test_it_finds_a_common_row_when_there_is_one(a, b):
    assert can_overlap(a, b) == can_overlap(b, a) == search(a, b)


def test_long_lists_are_quick():
    even, odd = list(range(0, 200_000, 2)), list(range(1, 200_000, 2))
    assert not can_overlap(Where(prompt_positions=even), Where(prompt_positions=odd))
    everything_but = Where(prompt_window=(0, 200_000), exclude_prompt_positions=even)
    assert not can_overlap(everything_but, Where(prompt_positions=even))
    assert can_overlap(everything_but, Where(prompt_positions=odd))
