"""Isolation: 32 requests that join, leave and are aborted over time; each is steered by its own vector alone."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import pytest

from reference.models import one_hot, random_direction
from reference.sources import Site
from reference.static import selects
from reference.wire import EVERYWHERE, gate, inline, probe
from support.engines import Answer, SteeredEngine, answer_of, parameters

from .conftest import HIDDEN
from .oracle import Case, Oracle, prompt

COUNT = 32
PROBE = random_direction(89, HIDDEN, [0], "pre_attn")
CLAUSES = [{"prompt": "all"}, {"generation": "all"}, {"answer": "all"}, EVERYWHERE]
SCOPES = ("this_token", "next_step", "rest_of_request")


class Client:
    """One request: static or gated, by a one-hot vector that is its own, registered or inline."""

    def __init__(self, number: int) -> None:
        self.name = f"own-{number}"
        hook, layers = ("post_block", "pre_attn")[number % 2], sorted({number % 4, 3})
        self.sites = [Site(layer, hook) for layer in layers]
        self.packed = one_hot(number, HIDDEN, layers, hook, value=9.0 if number % 3 else -9.0)
        self.named = number % 4 < 2
        source = {"kind": "name", "name": self.name} if self.named else inline(self.packed)
        # A few are aborted after three tokens, long before their end.
        self.leaves_early = number % 8 == 5
        self.gated = number % 3 == 2
        self.where = CLAUSES[number // 3 % 4]
        if self.gated:
            when = probe(PROBE, 0.0, at="answer", sharpness=2.0)
            request: Any = {"gates": [gate(when, SCOPES[number // 3 % 3], {"kind": "add", "steer": source})]}
        else:
            request = {"vectors": [{"steer": source, "where": self.where}]}
        tokens = 300 if self.leaves_early else 6 + number % 13
        self.case = Case(prompt(500 + number, number * 7 % 90 + 1), request, tokens)
        self.answer = Answer([], [], "", {}, 0)

    def lane(self) -> int:
        """Lane 0 is static steering, lane 1 the first gate."""
        return int(self.gated)

    def rows(self, stop: int) -> list[int]:
        """Rows below `stop` that its vector may act at."""
        length = len(self.case.prompt)
        if self.gated:
            return list(range(length - 1, stop))
        return [row for row in range(stop) if selects(self.where, row, [0] * stop, length)]


class Applied(NamedTuple):
    """One record of the trace: a lane of a row at a site was applied with a weight, from a slot."""

    step: int
    site: str
    request_id: str
    position: int
    lane: int
    slot: int
    weight: float


@pytest.fixture(scope="module")
def clients() -> list[Client]:
    return [Client(number) for number in range(COUNT)]


@pytest.fixture(scope="module")
def trace(eager: SteeredEngine, clients: list[Client], oracle: Oracle) -> dict[str, list[Applied]]:
    """What was applied, by client name. All of it belongs to some client."""
    eager.llm.reset_prefix_cache()
    eager.trace()
    for client in clients:
        if client.named:
            eager.register(client.name, "steer", client.packed)
    owners = _serve(eager, clients)
    eager.release()
    records: dict[str, list[Applied]] = defaultdict(list)
    for record in map(Applied._make, eager.trace()):
        records[owners[record.request_id].name].append(record)
    for client in clients:
        if client.named:
            eager.names.unregister(client.name, "steer")
    known = {client.name: {"packed": client.packed} for client in clients}
    oracle.registered["steer"].update(known)
    return records


def _serve(engine: SteeredEngine, clients: list[Client]) -> dict[str, Client]:
    """Eight clients are there from the start, one more joins with every output; returns them by request id."""
    core = engine.llm.llm_engine
    waiting, owners = list(clients), {}

    def join(count: int) -> None:
        for client in [waiting.pop(0) for _ in range(min(count, len(waiting)))]:
            params = parameters(engine.plan(client.case.request), client.case.max_tokens)
            owners[core.add_request(client.name, {"prompt_token_ids": client.case.prompt}, params)] = client

    by_name = {client.name: client for client in clients}
    join(8)
    while core.has_unfinished_requests():
        for output in core.step():
            client = by_name[output.request_id]
            client.answer = answer_of(output)
            if client.leaves_early and len(client.answer.tokens) >= 3:
                core.abort_request([client.name])
        join(1)
    assert not waiting
    return owners


def test_each_answer_is_its_own_vectors(trace: dict[str, Any], clients: list[Client], oracle: Oracle) -> None:
    assert trace
    for client in clients:
        if client.leaves_early:
            assert 3 <= len(client.answer.tokens) < client.case.max_tokens
            expected = oracle.along(client.case, client.answer.tokens)
            np.testing.assert_allclose(client.answer.logprobs, expected.logprobs, rtol=0, atol=1e-4)
        else:
            oracle.check(client.case, client.answer)


def test_everything_that_was_selected_was_applied_and_nothing_else(
    trace: dict[str, list[Applied]], clients: list[Client]
) -> None:
    for client in clients:
        records = trace[client.name]
        seen = len(client.case.prompt) + len(client.answer.tokens) - 1  # rows that produced what was seen
        # An aborted request ran on for a while, as long as the abort was on its way.
        stop = max(seen, *(record.position + 1 for record in records)) if client.leaves_early else seen
        applied = [(record.site, record.position, record.lane) for record in records]
        expected = {(str(site), row, client.lane()) for site in client.sites for row in client.rows(stop)}
        assert sorted(applied) == sorted(expected), client.name


def test_weights(trace: dict[str, list[Applied]], clients: list[Client], oracle: Oracle) -> None:
    for client in clients:
        expected = dict.fromkeys(client.rows(10**3), 1.0)
        if client.gated:
            rows = oracle.along(client.case, client.answer.tokens).gates[0].rows
            expected = {row.row: row.weight for row in rows}
        for record in trace[client.name]:
            if record.position in expected:  # beyond an aborted answer, the tokens are not known
                assert record.weight == pytest.approx(expected[record.position], abs=1e-4), (client.name, record)


def test_slots_belong_to_one_request(trace: dict[str, list[Applied]], clients: list[Client]) -> None:
    owner: dict[tuple[int, int], str] = {}
    at_once: dict[int, set[str]] = defaultdict(set)
    for name, records in trace.items():
        assert len({record.slot for record in records}) == 1, f"{name} kept its slot"
        for record in records:
            assert record.slot != 0
            assert owner.setdefault((record.step, record.slot), name) == name
            at_once[record.step].add(name)
    assert max(map(len, at_once.values())) >= 8
    slots = [records[0].slot for records in trace.values()]
    assert len(set(slots)) < len(clients), "slots were used again after their requests had left"


def test_nothing_is_left(trace: dict[str, Any], eager: SteeredEngine) -> None:
    assert trace
    held = ("live", "pool_used", "slots_used", "probes_used", "payloads_held", "lanes_nonzero")
    deadline = time.monotonic() + 5
    while any((status := eager.status())[name] for name in held) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert {name: status[name] for name in held} == dict.fromkeys(held, 0)
