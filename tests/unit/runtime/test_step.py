"""Steps that go on with the layout of the one before, against a controller that lays every step out anew."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from steergate_server.registry.numbers import StoredPayload
from steergate_server.registry.spool import Spool
from steergate_server.runtime.books import RequestBook
from steergate_server.runtime.controller import Controller
from steergate_server.runtime.history import History
from steergate_server.runtime.plan import Plan, PlannedGate, PlannedVector, VectorGroup
from steergate_server.schema.requests import Where
from unit.runtime.world import SITES, STREAM, assert_nothing_is_left, controller, geometry

LONGEST = 40
CLAUSES = (
    {"prompt": "all", "generation": "all"},
    {"answer": "all"},
    {"generation": "all"},
    {"generation_window": (2, 6)},
    {"generation_tokens": [3, 4]},
)


class Running(NamedTuple):
    """A request of the test: its plan and prompt, the account of its gates, the rows that it has computed, and how many
    it had computed before it was preempted."""

    plan: Plan
    prompt: list[int]
    book: RequestBook
    done: int = 0
    seen: int = 0

    @property
    def behind(self) -> int:
        """Rows that may be computed in one step."""
        return max(len(self.prompt), self.seen + 1) - self.done


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Spool, list[str]]:
    """Directions at every site of the stream, by digest."""
    rng, spool = np.random.default_rng(1), Spool(tmp_path_factory.mktemp("spool"))
    rows = [{f"{hook}/{layer:08d}": rng.standard_normal(12).astype("f4") for hook, layer in STREAM} for _ in range(6)]
    return spool, [spool.put(StoredPayload("direction", one, {}), durable=False)[0] for one in rows]


def a_plan(rng: np.random.Generator, digests: list[str]) -> Plan:
    """A random plan: static vectors by phase or by row, gates of every scope, attenuation, a locked group."""

    def group(clauses: Any) -> tuple[VectorGroup, ...]:
        vectors = tuple(
            PlannedVector(
                algorithm=str(rng.choice(["direct", "erase"])), digest=str(rng.choice(digests)), sites=STREAM,
                where=Where(**CLAUSES[int(clause)]),
            )
            for clause in clauses
        )  # fmt: skip
        return (VectorGroup(vectors=vectors),) if vectors else ()

    def one_gate() -> PlannedGate:
        when = str(rng.choice(["always", "probe", "probe"]))
        apply = str(rng.choice(["add", "attenuate"]))
        return PlannedGate(
            when=when,  # type: ignore[arg-type]
            at=str(rng.choice(["answer", "generated", "prompt_end"])),
            scope=str(rng.choice(["this_token", "next_step", "rest_of_request"])) if when == "probe" else "this_token",
            apply=apply,  # type: ignore[arg-type]
            probe_digest=str(rng.choice(digests)) if when == "probe" else None,
            probe_site=STREAM[0] if when == "probe" else None,
            threshold=float(rng.normal()),
            steer_digest=str(rng.choice(digests)) if apply == "add" else None,
            steer_sites=STREAM[1:] if apply == "add" else (),
            keep=0.5 if apply == "attenuate" else 1.0,
        )

    return Plan(
        groups=group(rng.integers(0, rng.choice([3, 3, len(CLAUSES)]), rng.integers(0, 3))),
        locked=group(rng.integers(0, 3, rng.integers(0, 2))),
        gates=tuple(one_gate() for _ in range(rng.integers(0, 3))),
        report=str(rng.choice(["none", "summary"])),
    )


def run_step(control: Controller, spans: list[tuple[str, int, int]], rng: np.random.Generator) -> Any:
    """One step over all sites; everything that it left behind."""
    rows = sum(count for _, _, count in spans)
    control.begin_step(geometry(spans))
    control.see_tokens(torch.from_numpy(rng.integers(0, 6, rows)))
    given = [torch.from_numpy(rng.standard_normal((rows, site.width)).astype("f4")) for site in SITES]
    for number, hidden in enumerate(given):
        control.steer(hidden, None, number)
    lanes = {name: value[:rows].clone() for name, value in vars(control.lanes).items() if not name.startswith("flat")}
    return given, lanes, control.end_step(), control.state.latched.clone(), control.state.fired_last.clone()


def assert_same(one: Any, other: Any) -> None:
    """Everything is equal, to the bit; NaN equals NaN."""
    for mine, theirs in ((one[0], other[0]), (one[1].values(), other[1].values()), (one[3:], other[3:])):
        for left, right in zip(mine, theirs, strict=True):
            torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)
    assert repr(one[2]) == repr(other[2])


@pytest.mark.parametrize("mode", ["in_graph", "split"])
@pytest.mark.parametrize("seed", range(8))
def test_a_layout_that_goes_on_is_that_of_a_step_laid_out_anew(numbers, mode, seed):
    spool, digests = numbers
    rng = np.random.default_rng(seed)
    kept, fresh = controller(spool, mode), controller(spool, mode)
    live: dict[str, Running] = {}
    away: set[str] = set()
    went_on = 0

    def everywhere(method: str, *arguments: Any) -> None:
        for control in (kept, fresh):
            getattr(control, method)(*arguments)

    for step in range(150):
        event = rng.random()
        if event < 0.08 and len(live) < 6:
            plan, prompt = a_plan(rng, digests), rng.integers(0, 6, rng.integers(1, 8)).tolist()
            live[f"r{step}"] = Running(plan, prompt, RequestBook(plan))
            if plan.acts:
                everywhere("add", f"r{step}", plan, prompt, LONGEST)
        elif event < 0.11 and live:
            name = str(rng.choice(list(live)))
            del live[name]
            away.discard(name)
            everywhere("finish", name)
        elif event < 0.13 and live:
            away.add(str(rng.choice(list(live))))
        elif event < 0.25 and away:
            name = away.pop()
            one = live[name]
            live[name] = one._replace(done=0)
            if one.plan.gates:
                everywhere("resume", name, one.book.history(max(one.seen, len(one.prompt) - 1)))
        spans = []
        for name, one in live.items():
            if name not in away:
                spans.append((name, one.done, int(rng.integers(1, one.behind + 1)) if one.behind > 1 else 1))
        if step % 17 == 0:
            rng.shuffle(spans)
        if not spans:
            continue
        last = kept._layout
        fresh._layout = None
        seed_of_step = int(rng.integers(2**32))
        found = [run_step(control, spans, np.random.default_rng(seed_of_step)) for control in (kept, fresh)]
        went_on += last is not None and kept._layout is last
        assert_same(*found)
        for name, start, count in spans:
            one = live[name]
            done = start + count
            if done >= len(one.prompt) and done > one.seen:
                for row in found[0][2].get(name, []):
                    one.book.accept(row)
            live[name] = one._replace(done=done, seen=max(done, one.seen))
            if start + count >= LONGEST:
                del live[name]
                everywhere("finish", name)
    for name in list(live):
        everywhere("finish", name)
    assert went_on > 5
    for control in (kept, fresh):
        assert_nothing_is_left(control)


def steered(control: Controller, spans: list[tuple[str, int, int]]) -> list[bool]:
    """By row, whether a step changes it at the first site of the stream."""
    control.begin_step(geometry(spans))
    hidden = torch.zeros(sum(count for *_, count in spans), SITES[0].width)
    control.steer(hidden, None, 0)
    control.end_step()
    return hidden.any(dim=1).tolist()


def plan_of(digest: str, **where: str) -> Plan:
    vector = PlannedVector(algorithm="direct", digest=digest, sites=STREAM, where=Where(**where))  # type: ignore[arg-type]
    return Plan(groups=(VectorGroup(vectors=(vector,)),))


def test_a_request_that_starts_over_is_no_request_that_goes_on(numbers):
    """One without gates tells nobody that it resumes; here its prompt is computed again row by row."""
    spool, digests = numbers
    control = controller(spool, "in_graph")
    control.add("a", plan_of(digests[0], generation="all"), [1, 2], LONGEST)
    assert steered(control, [("a", 2, 1)]) == [True]
    assert steered(control, [("a", 3, 1)]) == [True]
    assert steered(control, [("a", 0, 1)]) == [False]
    assert steered(control, [("a", 1, 1)]) == [False]
    assert steered(control, [("a", 2, 1)]) == [True]


def test_a_name_that_comes_back_with_steering_is_steered(numbers):
    spool, digests = numbers
    control = controller(spool, "in_graph")
    everywhere = {"prompt": "all", "generation": "all"}
    control.add("a", plan_of(digests[0], **everywhere), [1], LONGEST)
    assert steered(control, [("a", 1, 1), ("plain", 0, 1)]) == [True, False]
    assert steered(control, [("a", 2, 1), ("plain", 1, 1)]) == [True, False]
    control.finish("plain")
    control.add("plain", plan_of(digests[1], **everywhere), [1], LONGEST)
    assert steered(control, [("a", 3, 1), ("plain", 0, 1)]) == [True, True]


def test_several_rows_of_a_request_are_no_step_that_goes_on(numbers):
    """As many rows as requests, but not one each; a draft has the second."""
    spool, digests = numbers
    control = controller(spool, "in_graph")
    control.add("a", plan_of(digests[0], generation="all"), [1], LONGEST)
    assert steered(control, [("a", 1, 1), ("plain", 1, 1)]) == [True, False]
    assert steered(control, [("a", 2, 2), ("plain", 2, 0)]) == [True, True]


@pytest.mark.parametrize(("scope", "steered_rows"), [("rest_of_request", [2, 3]), ("next_step", [3])])
def test_a_resumed_gate_follows_its_history_whatever_its_score_is_now(numbers, scope, steered_rows):
    """It fired at row 2, though the rows that are computed again score far below its threshold; row 3 is new."""
    spool, digests = numbers
    control = controller(spool, "in_graph")
    gate = PlannedGate(
        when="probe", at="answer", scope=scope, apply="add", probe_digest=digests[0], probe_site=STREAM[0],
        threshold=1.0, steer_digest=digests[1], steer_sites=STREAM[1:],
    )  # fmt: skip
    control.add("a", Plan(gates=(gate,)), [1, 2], LONGEST)
    control.resume("a", History([[2]], 3))
    control.begin_step(geometry([("a", 0, 4)]))
    given = [torch.zeros(4, site.width) for site in SITES]
    for number, hidden in enumerate(given):
        control.steer(hidden, None, number)
    control.end_step()
    assert given[1].any(dim=1).nonzero().flatten().tolist() == steered_rows
    # It goes on from what its history says, and at last without it.
    for row in (4, 5, 6):
        control.begin_step(geometry([("a", row, 1)]))
        for number, site in enumerate(SITES):
            control.steer(hidden := torch.zeros(1, site.width), None, number)
            assert bool(hidden.any()) == (scope == "rest_of_request" and (site.hook, site.layer) in STREAM[1:])
        control.end_step()
    assert not control._history
