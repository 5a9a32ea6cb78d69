"""The controller driven by hand, without an engine, against a simulation of every row in float64."""

import numpy as np
import pytest
import torch

from steergate_server.algorithms import registry
from steergate_server.algorithms.base import BaseSteerVectorAlgorithm
from steergate_server.algorithms.registry import register_algorithm
from steergate_server.graph.kernels import all_in_range, in_range
from steergate_server.registry.numbers import StoredPayload
from steergate_server.registry.spool import Spool, SpoolError
from steergate_server.runtime.lowering import lowering_problem
from steergate_server.runtime.plan import Plan, PlannedGate, PlannedVector, VectorGroup
from steergate_server.schema.errors import SteeringError
from steergate_server.schema.requests import Where
from unit.algorithms import oracle
from unit.algorithms.cases import AFFINE, exact
from unit.runtime.world import (
    ALGORITHMS,
    SITES,
    STREAM,
    WIDTH,
    Request,
    assert_nothing_is_left,
    controller,
    geometry,
    library,
)

torch.set_num_threads(1)

ALL = {"prompt": "all", "generation": "all"}
CLAUSES = [
    ALL,
    {"prompt": "all"},
    {"generation": "all"},
    {"answer": "all"},
    {"prompt_positions": [0, -1]},
    {"prompt_positions": [-2, 50]},
    {"prompt_window": (1, -1), "generation_window": (1, 3)},
    {"prompt_window": (-3, None), "exclude_prompt_tokens": [1, 2]},
    {"prompt_tokens": [0, 3], "generation_positions": [0, 2]},
    {"generation_tokens": [1, 4]},
    {"answer": "all", "exclude_generation_tokens": [2, 5]},
    {**ALL, "exclude_prompt_positions": [-1], "exclude_generation_positions": [1]},
    {"generation": "all", "exclude_generation_window": (1, None)},
]


@pytest.fixture(scope="module")
def spool(tmp_path_factory):
    return Spool(tmp_path_factory.mktemp("spool"))


@pytest.fixture(scope="module")
def vectors(spool):
    return library(spool, np.random.default_rng(4))


class Drive:
    """Random requests through random steps; every row of every step is compared with the simulation."""

    def __init__(self, control, vectors, rng, mode, dtype):
        self.control, self.vectors, self.rng, self.mode, self.dtype = control, vectors, rng, mode, dtype
        self.live, self.at, self.compared, self.refused = {}, {}, 0, 0

    def new_request(self, number):
        prompt, later = int(self.rng.integers(1, 8)), int(self.rng.integers(1, 7))
        tokens = self.rng.integers(0, 6, size=prompt + later).tolist()
        groups = []
        if self.rng.random() < 0.8:
            for _ in range(int(self.rng.integers(1, 3))):
                conflict = str(self.rng.choice(["sequential", "priority"]))
                groups.append((conflict, [self._use() for _ in range(int(self.rng.integers(1, 4)))]))
        return Request(f"request-{number}", tokens, prompt, groups)

    def _use(self):
        vectors = self.vectors
        if self.mode == "in_graph":  # admission keeps `linear` from engines in this mode
            vectors = [vector for vector in vectors if vector.algorithm != "linear"]
        if self.mode == "in_graph" and self.rng.random() < 0.8:
            vectors = [vector for vector in vectors if vector.algorithm in AFFINE and not vector.normalize]
        vector = vectors[self.rng.integers(len(vectors))]
        sites = [site for site in vector.changes if self.rng.random() < 0.6] or [next(iter(vector.changes))]
        return vector, tuple(sites), CLAUSES[self.rng.integers(len(CLAUSES))]

    def join(self, request):
        self.at[request.name] = 0
        self.live[request.name] = request
        if not request.groups:
            return
        add = (request.name, request.plan, request.tokens[: request.prompt], len(request.tokens))
        if self.mode == "in_graph" and self._has_a_problem(request):
            with pytest.raises(SteeringError) as caught:
                self.control.add(*add)
            assert caught.value.code == "not_lowerable"
            self.live[request.name] = request._replace(groups=[])
            self.refused += 1
        else:
            self.control.add(*add)

    def _has_a_problem(self, request):
        """Whether some row of some answer to the prompt selects vectors that do not compose at some site."""
        later = len(request.tokens) - request.prompt
        answers = [request.tokens[: request.prompt] + [token] * later for token in range(7)]
        return any(
            lowering_problem([vector.planned([name], ALL) for vector in other.vectors_at(name, row)], 24)
            for other in [request._replace(tokens=tokens) for tokens in answers]
            for name in [(site.hook, site.layer) for site in SITES]
            for row in range(len(request.tokens))
        )

    def leave(self, name):
        del self.live[name], self.at[name]
        self.control.finish(name)

    def step(self):
        spans, tokens, owners = [], [], []
        names = [name for name in self.live if self.rng.random() < 0.85]
        self.rng.shuffle(names)
        for name in names:
            request, start = self.live[name], self.at[name]
            left = len(request.tokens) - start
            most = request.prompt - start if start < request.prompt else 1
            if self.rng.random() < 0.15:
                most = left  # several generated rows at once, or a chunk across the prompt's end
            count = int(self.rng.integers(1, most + 1))
            spans.append((name, start, count))
            tokens += request.tokens[start : start + count]
            owners += [(request, row) for row in range(start, start + count)]
            self.at[name] += count
        if not spans:
            return
        self.control.begin_step(geometry(spans))
        padding = int(self.rng.integers(0, 4))
        self.control.see_tokens(torch.tensor(tokens + [1] * padding, dtype=torch.int32))
        for number, site in enumerate(SITES):
            self._at_site(number, site, owners, padding)
        assert self.control.end_step() == {}
        assert self.control.take_fallen() == {}

    def _at_site(self, number, site, owners, padding):
        shape = (len(owners) + padding, site.width)
        hidden = torch.from_numpy(self.rng.normal(size=shape) * 3).to(self.dtype)
        residual = None
        if site.hook in ("post_block", "post_attn"):
            residual = torch.from_numpy(self.rng.normal(size=shape) * 3).to(self.dtype)
        before, kept = hidden.clone(), None if residual is None else residual.clone()
        self.control.steer(hidden, residual, number)
        if self.control._fault is not None:
            raise self.control._fault
        assert residual is None or torch.equal(residual, kept)
        assert torch.equal(hidden[len(owners) :], before[len(owners) :])
        name = (site.hook, site.layer)
        for at, (request, row) in enumerate(owners):
            vectors = request.vectors_at(name, row)
            if not vectors:
                assert torch.equal(hidden[at], before[at]), (request.name, row, name)
                continue
            other = np.zeros((1, site.width)) if residual is None else exact(residual[at : at + 1])
            value = exact(before[at : at + 1]) + other
            self._compare(exact(hidden[at : at + 1]), value, other, vectors, name, row)

    def _compare(self, found, value, other, vectors, site, row):
        eps = float(torch.finfo(self.dtype).eps)
        error = reach = oracle.norms(value)
        error = error * 2e-6
        for vector in vectors:
            reach = vector.reaches[site](value)
            gain = min(reach / max(oracle.norms(value), 1e-9), 30.0)
            after = vector.changes[site](value, row)
            error = error * gain + (3 * eps if self.mode == "in_graph" else 2e-6) * reach
            if vector.normalize:
                error = 2 * error * (1 + oracle.norms(value) / max(oracle.norms(after), 1e-9))
            value = after
        wanted = value - other
        allowed = error + eps * (np.abs(wanted) + np.abs(other)) + 1e-6
        off = float(np.abs(found - wanted).max())
        names = [(vector.algorithm, vector.normalize) for vector in vectors]
        assert (np.abs(found - wanted) <= allowed).all(), (site, row, names, off, float(error[0]))
        self.compared += 1

    def run(self, requests):
        number = 0
        while number < requests or self.live:
            while number < requests and len(self.live) < 8 and self.rng.random() < 0.5:
                self.join(self.new_request(number))
                number += 1
            self.step()
            for name in list(self.live):
                if self.at[name] >= len(self.live[name].tokens) or self.rng.random() < 0.03:
                    self.leave(name)
                elif self.rng.random() < 0.04:
                    self.at[name] = 0  # preempted: prompt and generated rows are computed again


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", ["in_graph", "split"])
def test_random_requests(spool, vectors, mode, dtype, seed):
    control = controller(spool, mode, dtype)
    drive = Drive(control, vectors, np.random.default_rng((seed, 9)), mode, dtype)
    drive.run(25)
    assert drive.compared > 100
    assert drive.refused < 20
    assert_nothing_is_left(control)
    hidden = torch.ones(4, WIDTH)
    control.steer(hidden, None, 1)
    assert torch.equal(hidden, torch.ones(4, WIDTH))


# By hand


def stored(spool, name="direction", **rows):
    return spool.put(
        StoredPayload(name, {key: np.asarray(row, dtype=np.float32) for key, row in rows.items()}, {}), durable=False
    )[0]


@pytest.fixture(scope="module")
def ones(spool):
    """A direction of ones at two sites."""
    return stored(spool, **{"post_block/00000000": [1.0] * WIDTH, "post_block/00000001": [1.0] * WIDTH})


FIRST, SECOND = ("post_block", 0), ("post_block", 1)


def simple(digest, where=ALL, sites=(FIRST,), **more):
    return PlannedVector(**{"algorithm": "direct", "digest": digest, "sites": sites, "where": Where(**where), **more})


def plan_of(*vectors, **more):
    return Plan(groups=(VectorGroup(vectors=vectors),), **more)


def forward(control, spans, site=1, tokens=None, rows=None):
    """One step at one site over rows of zeros; the sums of the rows over the width, divided by it."""
    control.begin_step(geometry(spans))
    total = sum(count for _, _, count in spans)
    if tokens is not None:
        control.see_tokens(torch.tensor(tokens))
    hidden = torch.zeros(rows or total, WIDTH)
    control.steer(hidden, None, site)
    control.end_step()
    return hidden.mean(dim=1).tolist()


@pytest.mark.parametrize("mode", ["in_graph", "split"])
def test_the_prompts_end_is_a_row_not_a_chunk(spool, ones, mode):
    control = controller(spool, mode)
    control.add("a", plan_of(simple(ones, {"prompt_positions": [-1]})), [5, 5, 5, 5], 10)
    assert forward(control, [("a", 0, 2)]) == [0, 0]
    assert forward(control, [("a", 2, 1)]) == [0]
    assert forward(control, [("a", 3, 1)]) == [1]
    assert forward(control, [("a", 4, 1)]) == [0]
    control.add("b", plan_of(simple(ones, {"answer": "all"}, scale=2.0)), [5], 10)
    assert forward(control, [("b", 0, 1), ("a", 5, 1)]) == [2, 0]
    assert forward(control, [("a", 6, 1), ("b", 1, 1)]) == [0, 2]
    control.finish("a")
    control.finish("b")
    assert_nothing_is_left(control)


@pytest.mark.parametrize("mode", ["in_graph", "split"])
def test_equal_content_shares_a_slot_until_the_last_holder_ends(spool, ones, mode):
    control = controller(spool, mode)
    for name in "ab":
        control.add(name, plan_of(simple(ones, label=name)), [1, 2], 6)
    assert control.book.slots.used == 1
    control.add("c", plan_of(simple(ones, scale=3.0)), [1, 2], 6)
    assert control.book.slots.used == 2
    control.finish("a")
    assert forward(control, [("c", 0, 1), ("b", 0, 2), ("a", 0, 1)]) == [3, 1, 1, 0]
    control.finish("b")
    assert control.payloads_held == 1
    assert forward(control, [("c", 1, 1), ("b", 2, 1)]) == [3, 0]
    control.finish("c")
    control.finish("c")
    assert_nothing_is_left(control)


@pytest.mark.parametrize("mode", ["in_graph", "split"])
def test_the_same_name_twice_is_refused(spool, ones, mode):
    control = controller(spool, mode)
    control.add("a", plan_of(simple(ones)), [1], 6)
    with pytest.raises(ValueError, match="live"):
        control.add("a", plan_of(simple(ones, scale=5.0)), [1], 6)
    assert forward(control, [("a", 0, 1)]) == [1]
    control.finish("a")
    assert_nothing_is_left(control)


def test_what_cannot_be_installed_holds_nothing(spool, ones):
    many = stored(spool, **{f"post_block/{layer:08d}": [1.0] * WIDTH for layer in (0, 1)})
    huge = stored(spool, **{"post_block/00000000": [6e4] * WIDTH})
    weight = stored(spool, "linear", weight=np.eye(WIDTH))
    cases = [
        ("in_graph", {}, plan_of(simple(ones), simple(weight, algorithm="linear")), Exception, ""),
        ("in_graph", {}, plan_of(simple(ones, normalize=True), simple(many)), SteeringError, "not_lowerable"),
        (
            "in_graph",
            {},
            plan_of(simple(ones, sites=(SECOND,)), simple(huge, scale=2.0)),
            SteeringError,
            "out_of_range",
        ),
        (
            "in_graph",
            {"max_slots": 2},
            plan_of(simple(ones), simple(many, {"prompt": "all"})),
            SteeringError,
            "capacity",
        ),
        ("split", {"max_slots": 2}, plan_of(simple(ones), simple(many, {"prompt": "all"})), SteeringError, "capacity"),
        ("split", {}, plan_of(simple(ones), simple("0" * 64)), SpoolError, ""),
        ("split", {}, plan_of(simple(ones), simple(ones, sites=(("mlp_out", 1),))), KeyError, ""),
    ]
    for mode, options, plan, kind, code in cases:
        control = controller(spool, mode, torch.float16, **options)
        with pytest.raises(kind) as caught:
            control.add("a", plan, [1, 2, 3], 9)
        assert code in getattr(caught.value, "code", "")
        assert_nothing_is_left(control)
        control.add("a", plan_of(simple(ones)), [1, 2, 3], 9)
        assert forward(control, [("a", 0, 2)]) == [1, 1]
        control.finish("a")
        assert_nothing_is_left(control)


def test_a_vector_without_a_closed_form_is_refused_as_such(spool):
    weight = stored(spool, "linear", weight=np.eye(WIDTH))
    control = controller(spool, "in_graph")
    with pytest.raises(SteeringError) as caught:
        control.add("a", plan_of(simple(weight, algorithm="linear")), [1], 9)
    assert caught.value.code == "not_lowerable"


@pytest.mark.parametrize("mode", ["in_graph", "split"])
def test_nothing_is_steered_between_steps(spool, ones, mode):
    control = controller(spool, mode)
    control.add("a", plan_of(simple(ones)), [1, 2, 3], 9)
    assert forward(control, [("a", 0, 2)]) == [1, 1]
    hidden = torch.zeros(8, WIDTH)
    control.steer(hidden, None, 1)
    assert not hidden.any()
    control.begin_step(geometry([("a", 2, 1)]))
    assert control.abandon_step() == ["a"]
    control.steer(hidden, None, 1)
    assert not hidden.any()
    assert forward(control, [("b", 0, 4)]) == [0] * 4


def test_a_step_that_cannot_be_laid_out_names_its_requests(spool, ones):
    control = controller(spool, "in_graph")
    control.add("a", plan_of(simple(ones)), [1, 2, 3], 9)
    with pytest.raises(Exception, match=r"shape|size"):
        control.begin_step(geometry([("b", 0, 1), ("a", 0, 10**4)]))
    assert control.abandon_step() == ["a"]
    assert forward(control, [("a", 0, 3)]) == [1, 1, 1]
    assert forward(control, [("b", 4, 1), ("a", 3, 1)], rows=5) == [0, 1, 0, 0, 0]
    control.finish("a")
    assert_nothing_is_left(control)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("mode", ["in_graph", "split"])
def test_a_gate_that_always_adds(spool, ones, mode, static):
    """A gate's vector is added whatever the graph mode, with static vectors beside it or without."""
    control = controller(spool, mode)
    gate = PlannedGate(
        when="always", at="generated", scope="this_token", apply="add", strength=0.5,
        steer_digest=ones, steer_sites=(FIRST, SECOND),
    )  # fmt: skip
    vectors = (simple(ones, scale=4.0),) if static else ()
    control.add("a", plan_of(*vectors, gates=(gate,)), [1, 2], 9)
    base = 4.0 if static else 0.0
    assert forward(control, [("a", 0, 2)]) == [base, base]
    assert forward(control, [("b", 0, 1), ("a", 2, 1)]) == [0, base + 0.5]
    assert forward(control, [("a", 3, 1)], site=5) == [0.5]
    control.finish("a")
    assert_nothing_is_left(control)


@pytest.mark.parametrize("mode", ["in_graph", "split"])
def test_a_router_that_no_row_of_the_step_selects(spool, mode):
    """Nothing happens, and nothing is warned of."""
    control = controller(spool, mode)
    router = PlannedVector(
        algorithm="moe_router", digest=None, sites=(("router_logits", 1),), where=Where(prompt_positions=[3]),
        params={"mode": "soft", "expert_ids": [1], "lambda": 2.0},
    )  # fmt: skip
    control.add("a", plan_of(router), [1, 2, 3, 4], 9)
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]] * 3)
    for spans, changed in (([("a", 0, 3)], False), ([("b", 0, 2), ("a", 3, 1)], True)):
        found = logits.clone()
        control.begin_step(geometry(spans))
        control.steer(found, None, 3)
        control.end_step()
        assert torch.equal(found[:2], logits[:2])
        assert torch.equal(found[2], logits[2]) != changed
    control.finish("a")
    assert_nothing_is_left(control)


@pytest.mark.parametrize("mode", ["in_graph", "split"])
def test_gates_beside_a_router_and_beside_wider_sites(spool, ones, mode):
    """A gate's vector is none of a router's business, and a probe is as wide as the stream, not as the widest site."""
    adds = PlannedGate(
        when="probe", at="prompt_end", scope="this_token", apply="add", strength=0.5, threshold=-1.0, sharpness=0.0,
        probe_digest=ones, probe_site=FIRST, steer_digest=ones, steer_sites=(FIRST,),
    )  # fmt: skip
    router = PlannedVector(
        algorithm="moe_router", digest=None, sites=(("router_logits", 1),), where=Where(**ALL),
        params={"mode": "activate", "expert_ids": [1]},
    )  # fmt: skip
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]])
    found = []
    for gates in ((), (adds,)):
        control = controller(spool, mode)
        control.add("a", plan_of(router, gates=gates), [1], 9)
        control.begin_step(geometry([("a", 0, 1)]))
        hidden, at_router = torch.ones(1, WIDTH), logits.clone()
        control.steer(hidden, None, 1)
        control.steer(at_router, None, 3)
        score = control.lanes.score[0].tolist()[: len(gates)]
        control.end_step()
        assert not control.book.faults
        assert score == [WIDTH] * len(gates)
        assert (hidden == 1 + 0.5 * 0.5 * len(gates)).all()
        found.append(at_router)
        control.finish("a")
        assert_nothing_is_left(control)
    assert torch.equal(found[0], found[1])
    assert found[0].argmax() == 1


# Algorithms of third parties


class Raises(BaseSteerVectorAlgorithm):
    def _transform(self, hidden_state, params):  # noqa: ARG002
        hidden_state.fill_(9)
        raise RuntimeError("third party")


class OtherShape(BaseSteerVectorAlgorithm):
    def _transform(self, hidden_state, params):  # noqa: ARG002
        return hidden_state[:, :-1]


class FewerRows(BaseSteerVectorAlgorithm):
    def _transform(self, hidden_state, params):  # noqa: ARG002
        return hidden_state.mean(dim=0)


class NotANumber(BaseSteerVectorAlgorithm):
    def _transform(self, hidden_state, params):  # noqa: ARG002
        result = hidden_state.clone()
        result[0, 0] = float("nan")
        return result


class Infinite(BaseSteerVectorAlgorithm):
    def _transform(self, hidden_state, params):  # noqa: ARG002
        return hidden_state + float("inf")


class Nothing(BaseSteerVectorAlgorithm):
    def _transform(self, hidden_state, params):  # noqa: ARG002
        return None


class Unpreparable(BaseSteerVectorAlgorithm):
    def _transform(self, hidden_state, params):  # noqa: ARG002
        return hidden_state

    def set_payload(self, payload, scale_factor=1.0):  # noqa: ARG002
        raise ArithmeticError("third party")


FAULTY = [Raises, OtherShape, FewerRows, NotANumber, Infinite, Nothing]


@pytest.fixture
def faulty(request, monkeypatch):
    """The name under which a faulty algorithm is registered for one test."""
    monkeypatch.setattr(registry, "_ALGORITHMS", dict(registry._ALGORITHMS))
    register_algorithm("faulty")(request.param)
    return "faulty"


@pytest.mark.parametrize("faulty", FAULTY, indirect=True)
def test_a_faulty_algorithm_fails_its_own_request_alone(spool, ones, faulty):
    control = controller(spool, "split")
    bad = plan_of(simple(ones, {"prompt": "all"}), simple(ones, {"generation": "all"}, algorithm=faulty))
    control.add("bad", bad, [1, 2], 9)
    control.add("good", plan_of(simple(ones, scale=2.0)), [1, 2], 9)
    control.add("other", plan_of(simple(ones, scale=-1.0, sites=(FIRST, SECOND))), [1, 2], 9)
    assert forward(control, [("good", 0, 2), ("bad", 0, 2), ("plain", 0, 1)]) == [2, 2, 1, 1, 0]
    assert control.take_fallen() == {}
    found = forward(control, [("good", 2, 1), ("bad", 2, 1), ("plain", 1, 1), ("other", 0, 2)])
    assert found == [2, 0, 0, -1, -1]
    fallen = control.take_fallen()
    assert list(fallen) == ["bad"]
    assert type(fallen["bad"]) is str
    assert control.take_fallen() == {}
    assert forward(control, [("other", 2, 1), ("good", 3, 1)]) == [-1, 2]
    assert control.take_fallen() == {}
    for name in ("bad", "good", "other"):
        control.finish(name)
    assert_nothing_is_left(control)


@pytest.mark.parametrize("faulty", [Raises], indirect=True)
def test_all_requests_that_share_a_faulty_slot_fall(spool, ones, faulty):
    control = controller(spool, "split")
    for name in "ab":
        control.add(name, plan_of(simple(ones, algorithm=faulty)), [1, 2], 9)
    control.add("c", plan_of(simple(ones)), [1, 2], 9)
    assert forward(control, [("a", 0, 1), ("c", 0, 1)]) == [0, 1]
    assert set(control.take_fallen()) == {"a", "b"}


@pytest.mark.parametrize("faulty", [Raises], indirect=True)
def test_a_fault_is_not_blamed_on_the_slots_next_holder(spool, ones, faulty):
    control = controller(spool, "split")
    control.add("bad", plan_of(simple(ones, algorithm=faulty)), [1, 2], 9)
    forward(control, [("bad", 0, 1)])
    control.finish("bad")
    control.add("good", plan_of(simple(ones)), [1, 2], 9)
    assert control.take_fallen() == {}


@pytest.mark.parametrize("faulty", [Unpreparable], indirect=True)
def test_an_algorithm_that_cannot_take_its_payload_holds_nothing(spool, ones, faulty):
    control = controller(spool, "split")
    with pytest.raises(ArithmeticError):
        control.add("bad", plan_of(simple(ones), simple(ones, algorithm=faulty, sites=(SECOND,))), [1, 2], 9)
    assert_nothing_is_left(control)


def test_the_world_has_every_algorithm_and_site():
    assert set(registry.registered_algorithms()) == set(ALGORITHMS)
    assert len(STREAM) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("worst", ["nan", "inf", "-inf", "largest", "-largest", "beyond", "-beyond"])
def test_one_pass_over_all_rows_finds_what_a_look_at_each_row_finds(dtype, worst):
    largest = torch.finfo(dtype).max / (1 if dtype == torch.float16 else 16)
    beyond = float(torch.tensor(largest, dtype=dtype).nextafter(torch.tensor(torch.inf, dtype=dtype)))
    numbers = {"largest": largest, "beyond": beyond}
    rows = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows[3, 7] = (-1 if worst[0] == "-" else 1) * (numbers.get(worst.strip("-")) or float(worst.strip("-")))
    assert all_in_range(rows) is bool(in_range(rows).all()) is (worst.strip("-") == "largest")
    assert all_in_range(rows[:0])
