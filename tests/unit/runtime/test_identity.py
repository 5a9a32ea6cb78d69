"""Cache identity, and the chain of block hashes that carries it."""

import hashlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from steergate_server.runtime.identity import Epochs, cache_identity, first_changed_row, tagged_extension, tagged_hash
from steergate_server.runtime.plan import Plan, PlannedGate, PlannedVector, VectorGroup, decode_plan, encode_plan
from steergate_server.schema.requests import Where

EVERYWHERE = Where(prompt="all", generation="all")


def link(parent, block):
    """The plain hash of a block behind another."""
    return hashlib.sha256(parent + b"/" + repr(block).encode()).digest()


class Request:
    """Full blocks of a request, and the hasher that hashes those which have no hash yet."""

    def __init__(self, first_block, identity):
        self.blocks, self.hashes = [], []
        self.first_block, self.identity = first_block, identity

    def _plain(self):
        parent, fresh = (self.hashes[-1] if self.hashes else b"root"), []
        for block in self.blocks[len(self.hashes) :]:
            parent = link(parent, block)
            fresh.append(parent)
        return fresh

    def fill(self, blocks):
        self.blocks += blocks
        before = list(self.hashes)
        new = tagged_extension(self._plain, self.hashes, self.first_block, self.identity)
        assert self.hashes == before
        self.hashes += new


def chain(blocks, first_block, identity):
    """The hashes one by one: plain links, and the tag in one of them."""
    parent, found = b"root", []
    for number, block in enumerate(blocks):
        parent = link(parent, block)
        if number == first_block:
            parent = tagged_hash(parent, identity)
        found.append(parent)
    return found


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 9), max_size=10),
    st.integers(0, 14),
    st.lists(st.integers(0, 4), max_size=12),
)
def test_the_chain_does_not_depend_on_how_blocks_fill(blocks, first_block, pieces):
    identity = b"i" * 32
    wanted = chain(blocks, first_block, identity)
    together, piecewise = Request(first_block, identity), Request(first_block, identity)
    together.fill(blocks)
    rest = list(blocks)
    for count in (*pieces, len(rest)):
        piecewise.fill(rest[:count])
        rest = rest[count:]
    one_by_one = Request(first_block, identity)
    for block in blocks:
        one_by_one.fill([block])
    assert together.hashes == piecewise.hashes == one_by_one.hashes == wanted


def test_the_tag_parts_the_blocks_from_there_on():
    blocks = [random.Random(1).randrange(100) for _ in range(8)]
    plain, a, b = (chain(blocks, at, who) for at, who in ((99, b""), (3, b"a" * 32), (3, b"b" * 32)))
    for request, wanted in ((Request(99, b"x" * 32), plain), (Request(3, b"a" * 32), a), (Request(3, b"b" * 32), b)):
        request.fill(blocks)
        assert request.hashes == wanted
    assert plain[:3] == a[:3] == b[:3]
    assert len({*plain[3:], *a[3:], *b[3:]}) == 15


def test_a_hasher_that_fails_leaves_the_hashes_as_they_were():
    hashes, calls = [b"h"], []

    def plain():
        calls.append(list(hashes))
        if len(calls) > 1:
            raise RuntimeError("no more")
        return [b"x", b"y"]

    with pytest.raises(RuntimeError):
        tagged_extension(plain, hashes, 2, b"i" * 32)
    assert hashes == [b"h"]
    assert len(calls) == 2


# Identity


def vector(**more):
    return PlannedVector(
        **{"algorithm": "direct", "digest": "a" * 64, "sites": (("post_block", 1),), "where": EVERYWHERE, **more}
    )


def plan(*vectors, **more):
    return Plan(groups=(VectorGroup(vectors=vectors),), **more)


GATE = PlannedGate(when="always", at="generated", scope="this_token", apply="add", steer_digest="b" * 64)


def test_equal_content_has_one_identity():
    base = plan(vector(label="a", params={"min": 1.0, "max": 2.0}), gates=(GATE,))
    same = plan(vector(label="b", params={"max": 2.0, "min": 1.0}), gates=(replace(GATE, label="x"),), report="summary")
    assert cache_identity(base, 5) == cache_identity(same, 5)
    assert cache_identity(decode_plan(encode_plan(base)), 5) == cache_identity(base, 5)
    assert len(cache_identity(base, 5)) == 32


def test_other_content_has_another_identity():
    first = vector()
    plans = [
        plan(first),
        plan(vector(scale=2.0)),
        plan(vector(scale=-1.0)),
        plan(vector(digest="b" * 64)),
        plan(vector(algorithm="replace")),
        plan(vector(normalize=True)),
        plan(vector(params={"min": 1.0})),
        plan(vector(sites=(("post_block", 2),))),
        plan(vector(sites=(("mlp_out", 1),))),
        plan(vector(where=Where(prompt="all", answer="all"))),
        plan(vector(where=Where(prompt="all"))),
        plan(vector(where=Where(prompt="all", generation="all", exclude_prompt_tokens=[1]))),
        plan(first, first),
        plan(first, vector(scale=2.0)),
        plan(vector(scale=2.0), first),
        Plan(groups=(VectorGroup(vectors=(first,), conflict="priority"),)),
        Plan(locked=(VectorGroup(vectors=(first,)),)),
        Plan(groups=(VectorGroup(vectors=(first,)), VectorGroup(vectors=(first,)))),
        plan(first, gates=(GATE,)),
        plan(first, gates=(replace(GATE, strength=2.0),)),
        plan(gates=(GATE,)),
        plan(),
    ]
    found = [cache_identity(one, 7) for one in plans]
    found += [cache_identity(replace(plans[0], bridge=(GATE,)), 7)]
    assert len(set(found)) == len(found)


OTHER_VALUES = {
    PlannedGate: {
        "when": "always", "at": "answer", "scope": "next_step", "apply": "attenuate", "probe_digest": "c" * 64,
        "probe_site": ("pre_attn", 1), "threshold": 0.5, "sharpness": 2.0, "fires": "below", "score": "cosine",
        "steer_digest": "d" * 64, "steer_sites": (("post_block", 2),), "strength": 2.0, "keep": 0.5,
    },
    PlannedVector: {
        "algorithm": "erase", "digest": "c" * 64, "sites": (("post_block", 2),), "where": Where(prompt="all"),
        "scale": 2.0, "normalize": True, "params": {"min": 1.0}, "rank": 3,
    },
    VectorGroup: {"vectors": (), "conflict": "priority"},
}  # fmt: skip
"""Of everything that a plan is made of, each field but the label with another value than below."""

PROBES = PlannedGate(
    when="probe", at="generated", scope="this_token", apply="add", probe_digest="a" * 64,
    probe_site=("post_block", 1), steer_digest="b" * 64, steer_sites=(("post_block", 1),),
)  # fmt: skip


def test_every_field_is_told_apart():
    for struct, values in OTHER_VALUES.items():
        assert set(struct.__struct_fields__) - {"label"} == set(values)


@pytest.mark.parametrize("field", OTHER_VALUES[PlannedGate])
def test_every_field_of_a_gate_is_identity(field):
    """Of its cache identity, as a gate and in a bridge, and of what it latches under: an attenuation's share, too."""
    other = replace(PROBES, **{field: OTHER_VALUES[PlannedGate][field]})
    assert other != PROBES
    assert other.identity != PROBES.identity
    for member in ("gates", "bridge"):
        one, another = (Plan(**{member: (gate,)}) for gate in (PROBES, other))
        assert cache_identity(one, 7) != cache_identity(another, 7)


@pytest.mark.parametrize(
    ("struct", "field"), [(struct, name) for struct in (PlannedVector, VectorGroup) for name in OTHER_VALUES[struct]]
)
def test_every_field_of_a_vector_is_identity(struct, field):
    changes = {field: OTHER_VALUES[struct][field]}
    group = VectorGroup(vectors=(vector(),))
    other = replace(group, **changes) if struct is VectorGroup else VectorGroup(vectors=(vector(**changes),))
    for member in ("groups", "locked"):
        one, another = (Plan(**{member: (part,)}, gates=(GATE,)) for part in (group, other))
        assert cache_identity(one, 7) != cache_identity(another, 7)


@pytest.mark.parametrize(
    ("one", "free"),
    [
        (plan(vector()), True),
        (plan(vector(), vector(where=Where(prompt="all", answer="all"))), True),
        (plan(vector(where=Where(prompt="all"))), False),
        (plan(vector(), vector(where=Where(generation="all"))), False),
        (plan(vector(where=Where(prompt="all", generation="all", exclude_generation_tokens=[1]))), False),
        (plan(vector(), gates=(GATE,)), False),
    ],
)
def test_the_prompts_length_matters_where_the_phase_does(one, free):
    assert (cache_identity(one, 5) == cache_identity(one, 6)) == free


@pytest.mark.parametrize(
    ("one", "row"),
    [
        (plan(), None),
        (plan(vector()), 0),
        (plan(vector(where=Where(answer="all"))), 3),
        (plan(vector(where=Where(generation="all"))), 4),
        (plan(vector(where=Where(prompt_positions=[-2]))), 2),
        (plan(vector(where=Where(prompt_positions=[9]))), None),
        (plan(vector(where=Where(generation_positions=[3])), vector(where=Where(prompt_tokens=[12]))), 2),
        (plan(vector(where=Where(generation_tokens=[1], exclude_generation_window=(0, 2)))), 6),
        (plan(vector(where=Where(generation_positions=[99]))), None),
        (plan(gates=(GATE,)), 4),
        (plan(gates=(replace(GATE, at="answer"),)), 3),
        (plan(vector(where=Where(generation_positions=[3])), gates=(GATE,)), 4),
        (plan(vector(where=Where(generation_positions=[3])), bridge=(GATE,)), 3),
        (plan(locked=(VectorGroup(vectors=(vector(where=Where(prompt_positions=[-2])),)),)), 2),
    ],
)
def test_the_first_row_that_changes(one, row):
    assert first_changed_row(one, one.select([10, 11, 12, 13], 20), 4) == row


def test_epochs_replace_the_identities_of_failed_requests_alone() -> None:
    epochs = Epochs(limit=3)
    names = [bytes([number]) * 32 for number in range(6)]
    assert [epochs.current(name) for name in names] == names
    epochs.advance([names[0]])
    once = epochs.current(names[0])
    assert once != names[0]
    assert [epochs.current(name) for name in names[1:]] == names[1:]
    epochs.advance([once])
    assert epochs.current(names[0]) not in (names[0], once)
    seen = {epochs.current(name) for name in names} | {names[0], once}
    for name in names[1:5]:  # more than it remembers: everything is replaced, nothing comes back
        epochs.advance([epochs.current(name)])
    assert not {epochs.current(name) for name in names} & seen
