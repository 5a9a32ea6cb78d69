"""A model that is split over two ranks: each finds the same sites, holds its part of attention's heads, and adds its
part of a row there. The ranks are threads, each with its half of the weights."""

from __future__ import annotations

from collections.abc import Callable
from threading import Barrier, Thread
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import layer_norm

from steergate_server.registry.numbers import canonical
from steergate_server.registry.spool import Spool
from steergate_server.runtime.blocks import UnrecognisedModelError, find_decoder_stack
from steergate_server.runtime.config import EngineConfig
from steergate_server.runtime.controller import Controller
from steergate_server.runtime.plan import Plan, PlannedGate, PlannedVector, VectorGroup
from steergate_server.runtime.sites import Site, attach_sites
from steergate_server.schema.errors import SteeringError
from steergate_server.schema.requests import Where
from unit.registry.payloads import direction
from unit.runtime.world import geometry

WIDTH, HEADS, INNER, ROWS, RANKS = 16, 24, 32, 5, 2
HOOKS = ("pre_attn", "attn_heads", "post_attn", "mlp_in", "mlp_out", "post_block")


class Group:
    """What the ranks have of each other."""

    def __init__(self) -> None:
        self._barrier = Barrier(RANKS)
        self._given: list[Any] = [None] * RANKS

    def gather(self, rank: int, rows: torch.Tensor) -> list[torch.Tensor]:
        self._given[rank] = rows
        self._barrier.wait(timeout=60)
        everybody = list(self._given)
        self._barrier.wait(timeout=60)
        return everybody

    def same(self, rank: int, rows: torch.Tensor) -> bool:
        return all(torch.equal(other, rows) for other in self.gather(rank, rows))

    def run(self, one: Callable[[int], Any]) -> list[Any]:
        """Let every rank do something; return what each came to, or what it raised."""
        results: list[Any] = [None] * RANKS

        def start(rank: int) -> None:
            try:
                results[rank] = one(rank)
            except Exception as error:
                results[rank] = error

        threads = [Thread(target=start, args=(rank,)) for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


class Attend(nn.Module):
    """Stands for an attention layer; during the trial it returns nonsense, as vLLM's does."""

    gain: float | None = 0.3

    def forward(self, heads: torch.Tensor) -> torch.Tensor:
        return heads.cumsum(0) * self.gain if self.gain else torch.full_like(heads, float("nan"))


class Row(nn.Module):
    """A linear layer that is given a part of each row; `total` sums the ranks' results, or hands its own on."""

    def __init__(self, weight: torch.Tensor, total: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.weight, self.total = nn.Parameter(weight), total

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.total(rows @ self.weight.T)


class Attention(nn.Module):
    def __init__(self, qkv: torch.Tensor, out: torch.Tensor, total: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.qkv, self.attn, self.o_proj = nn.Parameter(qkv), Attend(), Row(out, total)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.o_proj(self.attn(hidden @ self.qkv.T))


class Mlp(nn.Module):
    def __init__(self, up: torch.Tensor, down: torch.Tensor, total: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(up), Row(down, total)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(hidden @ self.up.T))


class Norm(nn.Module):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return layer_norm(hidden, hidden.shape[-1:])


class Block(nn.Module):
    """Each of its halves sums over the ranks."""

    def __init__(self, weights: list[np.ndarray], rank: int, group: Group) -> None:
        super().__init__()

        def total(rows: torch.Tensor) -> torch.Tensor:
            first, second = group.gather(rank, rows)
            return first + second

        def part(number: int, axis: int) -> torch.Tensor:
            return torch.from_numpy(np.split(weights[number], RANKS, axis)[rank].copy()).float()

        self.total = total
        inner = self.inner_total(total)
        self.self_attn = Attention(part(0, 0), part(1, 1), inner)
        self.mlp = Mlp(part(2, 0), part(3, 1), inner)
        self.input_layernorm, self.post_attention_layernorm = Norm(), Norm()

    def inner_total(self, total: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
        return total

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        stream = hidden_states + self.self_attn(self.input_layernorm(hidden_states))
        return stream + self.mlp(self.post_attention_layernorm(stream))


class SumsOnce(Block):
    """Attention and MLP side by side, summed over the ranks together: each one's output is a rank's own."""

    def inner_total(self, total: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:  # noqa: ARG002
        return lambda rows: rows

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        normed = self.input_layernorm(hidden_states)
        return hidden_states + self.total(self.self_attn(normed) + self.mlp(normed))


class Rank:
    """One rank's model, its sites, and where their op goes."""

    def __init__(self, make: type[Block], rank: int, group: Group, hooks: tuple[str, ...], known: bool = True) -> None:
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(make(weights, rank, group) for weights in WEIGHTS)
        self.rank, self.steer = rank, None
        layers = [module for module in self.model.modules() if isinstance(module, Attend)]
        stack = find_decoder_stack(self.model, lambda module: isinstance(module, Attend))
        for layer in layers:
            layer.gain = None
        self.sites = attach_sites(
            stack, hooks, WIDTH, lambda module: isinstance(module, Attend), lambda _: False, self._op,
            lambda: self.forward(torch.ones(ROWS, WIDTH)),
            lambda _: (rank, RANKS) if known else None,
            lambda rows: group.same(rank, rows),
        )  # fmt: skip
        for layer in layers:
            layer.gain = 0.3

    def _op(self, hidden: torch.Tensor, residual: torch.Tensor | None, site: int) -> None:
        if self.steer is not None:
            self.steer(hidden, residual, site)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for block in self.model.layers:
                rows = block(rows)
        return rows


def _weights() -> list[list[np.ndarray]]:
    rng = np.random.default_rng(0)
    shapes = [(HEADS, WIDTH), (WIDTH, HEADS), (INNER, WIDTH), (WIDTH, INNER)]
    return [[rng.normal(size=shape) * 0.4 for shape in shapes] for _ in range(2)]


WEIGHTS = _weights()


def dense(rows: np.ndarray, added: dict[tuple[str, int], np.ndarray]) -> np.ndarray:
    """The whole model in float64 with vectors added, by (hook, layer)."""

    def norm(x: np.ndarray) -> np.ndarray:
        x = x - x.mean(1, keepdims=True)
        return x / np.sqrt((x**2).mean(1, keepdims=True) + 1e-5)

    for layer, (qkv, out, up, down) in enumerate(WEIGHTS):

        def at(hook: str, value: np.ndarray, layer: int = layer) -> np.ndarray:
            return value + added.get((hook, layer), 0.0)

        stream = at("pre_attn", rows)
        heads = np.cumsum(norm(stream) @ qkv.T, 0) * 0.3
        stream = at("post_attn", stream + at("attn_heads", heads) @ out.T)
        inner = np.tanh(at("mlp_in", norm(stream)) @ up.T)
        rows = at("post_block", stream + at("mlp_out", inner @ down.T))
    return rows


def test_every_rank_finds_the_sites_and_its_part_of_the_heads() -> None:
    group = Group()
    found = group.run(lambda rank: Rank(Block, rank, group, HOOKS).sites)
    for rank, sites in enumerate(found):
        half = HEADS // RANKS
        assert sites == [
            Site(layer, hook, HEADS, (rank * half, (rank + 1) * half))
            if hook == "attn_heads"
            else Site(layer, hook, WIDTH)
            for layer in range(2)
            for hook in HOOKS
        ]


@pytest.mark.parametrize(
    ("make", "hook", "known"),
    [(SumsOnce, "mlp_out", True), (Block, "attn_heads", False)],
    ids=["the MLP's rows are not summed yet", "it is not known which heads a rank has"],
)
def test_rows_that_a_rank_has_a_share_of_are_no_hook(make: type[Block], hook: str, known: bool) -> None:
    group = Group()
    for error in group.run(lambda rank: Rank(make, rank, group, ("post_block", hook), known)):
        assert isinstance(error, UnrecognisedModelError)
        assert f"{make.__name__} has no place for hook '{hook}'" in str(error)
        assert "It has " in str(error)


EVERYWHERE = Where(prompt="all", generation="all")
VECTORS = {
    (hook, layer): np.random.default_rng(10 * layer + number).normal(size=HEADS if hook == "attn_heads" else WIDTH)
    for layer in range(2)
    for number, hook in enumerate(HOOKS)
}
PROBE = np.random.default_rng(99).normal(size=WIDTH)


def packed(spool: Spool, rows: dict[tuple[str, int], np.ndarray]) -> str:
    hooks: dict[str, dict[int, Any]] = {}
    for (hook, layer), row in rows.items():
        hooks.setdefault(hook, {})[layer] = row.tolist()
    return spool.put(canonical(direction(**hooks)), durable=False)[0]


def plan_of(spool: Spool, threshold: float) -> Plan:
    """Every hook of both layers, and a gate that adds a vector where the stream looks in a direction."""
    heads = {site: row for site, row in VECTORS.items() if site[0] == "attn_heads"}
    rest = {site: row for site, row in VECTORS.items() if site not in heads}
    vectors = tuple(
        PlannedVector(algorithm=name, digest=packed(spool, rows), sites=tuple(rows), where=EVERYWHERE)
        for name, rows in (("attention_add", heads), ("direct", rest))
    )
    gate = PlannedGate(
        when="probe", at="answer", scope="this_token", apply="add", threshold=threshold, sharpness=3.0,
        probe_digest=packed(spool, {("post_block", 0): PROBE}), probe_site=("post_block", 0),
        steer_digest=packed(spool, {("post_block", 1): PROBE}), steer_sites=(("post_block", 1),),
    )  # fmt: skip
    return Plan(groups=(VectorGroup(vectors=vectors),), gates=(gate,), report="summary")


@pytest.mark.parametrize("mode", ["in_graph", "split"])
def test_ranks_add_their_parts_and_decide_alike(tmp_path: Any, mode: str) -> None:
    group, spool = Group(), Spool(tmp_path)
    ranks = group.run(lambda rank: Rank(Block, rank, group, HOOKS))
    rows = np.random.default_rng(5).normal(size=(ROWS, WIDTH))
    config = EngineConfig(hooks=HOOKS, algorithms=("direct", "attention_add"), graph_mode=mode, memory_mib=1)
    plan = plan_of(spool, -4.5)

    def one(number: int) -> Any:
        rank = ranks[number]
        control = Controller(
            config, rank.sites, spool, dtype=torch.float32, device=torch.device("cpu"), max_rows=16, max_requests=2
        )
        control.add("a", plan, range(ROWS), 64)
        rank.steer = control.steer
        control.begin_step(geometry([("a", 0, ROWS)]))
        out = rank.forward(torch.from_numpy(rows).float())
        evidence = control.end_step()
        control.finish("a")
        assert (control.live, control.book.pool_used, control.lanes_nonzero()) == (0, 0, 0)
        return out, evidence

    (first, one_saw), (second, other_saw) = group.run(one)

    assert torch.equal(first, second)
    assert repr(one_saw) == repr(other_saw)  # NaN is where no gate looks
    expected = dense(rows, VECTORS)
    assert np.abs(expected - dense(rows, {})).max() > 1.0
    np.testing.assert_allclose(first[:-1], expected[:-1], rtol=0, atol=1e-4)
    # The last row is the only one of the answer.
    weight = one_saw["a"][-1].weights[0]
    assert 0.1 < weight < 0.9
    np.testing.assert_allclose(first[-1], expected[-1] + weight * PROBE, rtol=0, atol=1e-4)


@pytest.mark.parametrize("mode", ["in_graph", "split"])
def test_what_needs_complete_rows_is_not_installed_on_a_part(tmp_path: Any, mode: str) -> None:
    """Admission refuses it before."""
    spool = Spool(tmp_path)
    config = EngineConfig(hooks=("attn_heads",), algorithms=("erase", "attention_add"), graph_mode=mode, memory_mib=1)
    sites = [Site(0, "attn_heads", HEADS, (0, HEADS // 2))]
    control = Controller(
        config, sites, spool, dtype=torch.float32, device=torch.device("cpu"), max_rows=16, max_requests=2
    )
    digest = packed(spool, {("attn_heads", 0): np.ones(HEADS)})
    for name, normalize in (("erase", False), ("attention_add", True)):
        vector = PlannedVector(
            algorithm=name, digest=digest, sites=(("attn_heads", 0),), where=EVERYWHERE, normalize=normalize
        )
        with pytest.raises(SteeringError) as caught:
            control.add("a", Plan(groups=(VectorGroup(vectors=(vector,)),)), range(ROWS), 64)
        assert caught.value.code == "hook_not_allowed"
        assert (control.live, control.book.pool_used, control.payloads_held) == (0, 0, 0)
