"""Where-clauses: unions, excludes, and what cannot be one clause."""

from __future__ import annotations

import pytest

from steergate import InvalidSteering, Where

MEMBERS = {
    "answer": Where.answer(),
    "prompt": Where.prompt(),
    "generation": Where.generation(),
    "prompt_tokens": Where.prompt_tokens(5, 6),
    "prompt_positions": Where.prompt_positions(0, -1),
    "prompt_window": Where.prompt_window(-5),
    "generation_tokens": Where.generation_tokens(7),
    "generation_positions": Where.generation_positions(0, 3),
    "generation_window": Where.generation_window(2, 9),
}


@pytest.mark.parametrize("name", MEMBERS)
def test_each_include_sets_its_own_member(name):
    clause = MEMBERS[name].clause
    assert [field for field in clause.__struct_fields__ if getattr(clause, field) is not None] == [name]


@pytest.mark.parametrize("name", MEMBERS)
def test_a_repr_is_a_program(name):
    clause = MEMBERS[name] | Where.answer()
    excluded = clause.exclude(generation_positions=[1, 2], generation_window=(3, None))
    for made in (MEMBERS[name], clause, excluded):
        assert eval(repr(made)) == made
        assert hash(eval(repr(made))) == hash(made)


def test_a_union_has_the_members_of_both():
    union = Where.prompt_tokens(5, 6) | Where.prompt_tokens(6, 7) | Where.generation_window(2)
    assert union.clause.prompt_tokens == [5, 6, 7]
    assert union.clause.generation_window == (2, None)
    assert Where.prompt_window(1, 2) | Where.prompt_window(1, 2) == Where.prompt_window(1, 2)


def test_excludes_add_up():
    clause = Where.answer().exclude(prompt_positions=range(2)).exclude(prompt_positions=[1, 5], generation_tokens={9})
    assert clause.clause.exclude_prompt_positions == [0, 1, 5]
    assert clause.clause.exclude_generation_tokens == [9]


def test_two_windows_are_not_one_clause():
    with pytest.raises(ValueError, match=r"one prompt window, and \(0, 2\) and \(4, 6\)"):
        Where.prompt_window(0, 2) | Where.prompt_window(4, 6)
    with pytest.raises(ValueError, match="one generation window"):
        Where.generation().exclude(generation_window=(0, 2)).exclude(generation_window=(4, 6))


def test_an_exclude_never_reaches_into_another_clause():
    prompt = Where.prompt().exclude(prompt_tokens=[1])
    with pytest.raises(ValueError, match="would hit prompt rows of the other"):
        prompt | Where.prompt_positions(3)
    with pytest.raises(ValueError, match="would hit prompt rows of the other"):
        Where.answer() | prompt
    assert (prompt | Where.generation()).clause.exclude_prompt_tokens == [1]
    assert (Where.generation() | prompt) == (prompt | Where.generation())
    assert (prompt | prompt) == prompt


@pytest.mark.parametrize(
    ("code", "param", "build"),
    [
        ("empty_selection", "prompt_tokens", lambda: Where.prompt_tokens()),
        ("invalid_window", "generation_window", lambda: Where.generation_window(5, 5)),
        ("invalid_window", "generation_window[0]", lambda: Where.generation_window(-1)),
        ("invalid_position", "generation_positions[0]", lambda: Where.generation_positions(-1)),
        ("out_of_range", "prompt_tokens[1]", lambda: Where.prompt_tokens(1, -1)),
        ("invalid_type", "prompt_positions[0]", lambda: Where.prompt_positions(1.5)),
        ("exclude_without_phase", "exclude_prompt_window", lambda: Where.generation().exclude(prompt_window=(0, 1))),
        ("invalid_window", "exclude_prompt_window", lambda: Where.prompt().exclude(prompt_window=(0, 1, 2))),
    ],
)
def test_a_clause_is_checked_when_it_is_made(code, param, build):
    with pytest.raises(InvalidSteering) as caught:
        build()
    assert (caught.value.code, caught.value.param) == (code, param)
