"""Pools and slots: content addressing, counting, zeroing, and what happens when there is no room."""

import random

import pytest
import torch

from steergate_server.graph.affine import Affine, Clamp, SiteChange
from steergate_server.graph.families import FAMILIES
from steergate_server.graph.pools import CapacityError, Pool, Slots
from steergate_server.graph.tables import RouterTables, SiteTables

CPU = torch.device("cpu")


def row(number, width=3):
    return torch.full((width,), float(number))


def never():
    raise AssertionError("the row is there already")


def test_equal_keys_share_one_row():
    pool = Pool(4, 3, torch.float32, CPU)
    rows = pool.rows
    entry = pool.acquire("a", lambda: row(1))
    assert entry != 0
    assert pool.acquire("a", never) == entry
    other = pool.acquire("b", lambda: row(2))
    assert other not in (0, entry)
    assert pool.used == 2
    assert pool.rows is rows
    assert rows[entry].tolist() == [1.0] * 3
    assert not rows[0].any()
    pool.release(entry)
    assert rows[entry].tolist() == [1.0] * 3
    pool.release(entry)
    assert not rows[entry].any()
    assert pool.used == 1
    pool.release(0)
    assert pool.used == 1


def test_a_full_pool_holds_nothing_of_what_it_refuses():
    pool = Pool(3, 3, torch.float32, CPU)
    entries = [pool.acquire(key, lambda: row(1)) for key in "ab"]
    before = pool.rows.clone()
    with pytest.raises(CapacityError):
        pool.acquire("c", lambda: row(3))
    assert torch.equal(pool.rows, before)
    assert pool.acquire("a", never) == entries[0]
    pool.release(entries[1])
    assert pool.acquire("c", lambda: row(3)) == entries[1]


@pytest.mark.parametrize(
    ("dtype", "number"), [(torch.float16, 65520.0), (torch.float16, -1e6), (torch.bfloat16, 3.4e38)]
)
def test_numbers_out_of_range_are_refused(dtype, number):
    pool = Pool(3, 3, dtype, CPU)
    with pytest.raises(OverflowError):
        pool.acquire("a", lambda: torch.tensor([0.0, number, 1.0]))
    assert pool.used == 0
    assert not pool.rows.any()
    assert {pool.acquire(key, lambda: row(1)) for key in "ab"} == {1, 2}


def test_the_largest_number_of_a_dtype_is_taken():
    pool = Pool(2, 3, torch.float16, CPU)
    assert pool.rows[pool.acquire("a", lambda: row(65504.0))].tolist() == [65504.0] * 3


def test_a_row_that_cannot_be_made_holds_nothing():
    pool = Pool(2, 3, torch.float32, CPU)
    with pytest.raises(ZeroDivisionError):
        pool.acquire("a", lambda: row(1 / 0))
    assert pool.used == 0
    assert pool.acquire("a", lambda: row(1)) == 1


@pytest.mark.parametrize("seed", range(5))
def test_a_pool_against_a_book_kept_by_hand(seed):
    choose = random.Random(seed)
    pool, book = Pool(6, 2, torch.float32, CPU), {}
    for _ in range(600):
        key = choose.randrange(9)
        if choose.random() < 0.55:
            try:
                entry = pool.acquire(key, lambda key=key: row(key + 1, 2))
            except CapacityError:
                assert len(book) == 5
                assert key not in book
                continue
            assert book.setdefault(key, [entry, 0])[0] == entry
            book[key][1] += 1
        elif key in book:
            pool.release(book[key][0])
            book[key][1] -= 1
            if not book[key][1]:
                del book[key]
        wanted = torch.zeros(6, 2)
        for held, (entry, _) in book.items():
            wanted[entry] = held + 1
        assert torch.equal(pool.rows, wanted)
        assert pool.used == len(book)


@pytest.mark.parametrize("seed", range(5))
def test_slots_against_a_book_kept_by_hand(seed):
    choose = random.Random(seed)
    slots, book, built = Slots(5), {}, {}

    def build(slot, key):
        assert slot not in built
        assert 1 <= slot <= 4
        if key == 8:
            raise KeyError(key)
        built[slot] = key

    for _ in range(600):
        key = choose.randrange(9)
        if choose.random() < 0.55:
            try:
                slot = slots.acquire(key, lambda slot, key=key: build(slot, key))
            except CapacityError:
                assert len(book) == 4
                continue
            except KeyError:
                assert key == 8
                continue
            assert built[slot] == key
            assert book.setdefault(key, [slot, 0])[0] == slot
            book[key][1] += 1
        elif key in book:
            slots.release(book[key][0], built.pop)
            book[key][1] -= 1
            if not book[key][1]:
                del book[key]
        assert sorted(built.values()) == sorted(book)
        assert slots.used == len(book)


# Tables


def tables(dtype=torch.float32, entries=8, rank=3):
    return SiteTables(2, 4, Pool(entries, 3, dtype, CPU), list(FAMILIES), rank, CPU)


def change(*numbers, rank=1, normalize=False, clamp=None):
    reads = torch.tensor([[number + 0.5] * 3 for number in numbers[:rank]]).reshape(-1, 3)
    return SiteChange(Affine(0.5, reads, 2 * reads, row(numbers[-1])), clamp, normalize)


def tensors_of(made):
    return [value for value in vars(made).values() if isinstance(value, torch.Tensor)]


def test_a_slot_is_written_and_cleared_again():
    made = tables()
    kept = [id(tensor) for tensor in tensors_of(made)]
    made.write(2, [(1, "key", change(1.0, 2.0, clamp=Clamp(row(1), -1.0, 2.0, 0.5), normalize=True))])
    assert made.pool.used == 4
    assert made.rank == {(1, 2): 1}
    made.write(3, [(1, "key", change(1.0, 2.0))])
    assert made.pool.used == 4
    made.clear(1, 2)
    assert made.pool.used == 3
    made.clear(1, 3)
    made.clear(1, 3)
    assert made.pool.used == 0
    assert not made.pool.rows.any()
    assert not any(tensor.any() for tensor in tensors_of(made))
    assert not made.rank
    assert [id(tensor) for tensor in tensors_of(made)] == kept


@pytest.mark.parametrize("entries", [2, 3])
def test_tables_hold_nothing_of_what_does_not_fit_the_pool(entries):
    made = tables(entries=entries)
    with pytest.raises(CapacityError):
        made.write(1, [(0, "key", change(1.0, 2.0))])
    assert made.pool.used == 0
    assert not made.pool.rows.any()
    assert not any(tensor.any() for tensor in tensors_of(made))


def test_tables_hold_nothing_of_a_rank_over_the_limit():
    made = tables(rank=1)
    with pytest.raises(CapacityError, match="rank"):
        made.write(1, [(0, "key", change(1.0, 2.0, rank=2))])
    assert made.pool.used == 0


@pytest.mark.parametrize("numbers", [(1.0, 1e6), (1e6, 1.0)])
def test_tables_hold_nothing_of_what_overflows(numbers):
    made = tables(torch.float16)
    with pytest.raises(OverflowError):
        made.write(1, [(0, "key", change(*numbers))])
    assert made.pool.used == 0
    assert not made.pool.rows.any()
    assert not any(tensor.any() for tensor in tensors_of(made))


def lowered(up, down):
    masks = {"moe_raise": torch.tensor(up), "moe_lower": torch.tensor(down)}
    return masks | {"moe_plan": torch.ones(4), "moe_draw": torch.tensor([7, 2])}


def test_router_tables():
    made = RouterTables(2, 4, Pool(3, 3, torch.float32, CPU), CPU)
    made.write(0, 1, "a", lowered([1.0, 0.0, 0.0], [0.0, 0.0, 1.0]))
    made.write(1, 1, "a", lowered([1.0, 0.0, 0.0], [0.0, 0.0, 1.0]))
    assert made.pool.used == 2
    with pytest.raises(CapacityError):
        made.write(0, 2, "b", lowered([1.0, 0.0, 0.0], [0.0, 1.0, 0.0]))
    made.clear(1, 1)
    assert made.pool.used == 2
    made.clear(0, 1)
    assert made.pool.used == 0
    made = RouterTables(2, 4, Pool(2, 3, torch.float32, CPU), CPU)
    with pytest.raises(CapacityError):
        made.write(0, 2, "b", lowered([1.0, 0.0, 0.0], [0.0, 1.0, 0.0]))
    for tensor in (*tensors_of(made), made.pool.rows):
        assert not tensor.any()
    assert made.pool.used == 0
