"""A model's sites without a model: payloads in a spool, requests, and float64 rows of what they should become."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from steergate_server.algorithms.registry import create_algorithm
from steergate_server.registry.numbers import StoredPayload
from steergate_server.registry.spool import Spool
from steergate_server.runtime.config import EngineConfig
from steergate_server.runtime.controller import Controller
from steergate_server.runtime.geometry import StepGeometry
from steergate_server.runtime.plan import Plan, PlannedVector, SiteName, VectorGroup
from steergate_server.runtime.sites import Site
from steergate_server.schema.requests import Where
from unit.algorithms import oracle
from unit.algorithms.cases import HIDDEN, NORMALIZING, Case, exact, make, norms, router
from unit.algorithms.oracle import Array
from unit.runtime.predicate import selects

WIDTH, HEADS, EXPERTS = 12, 20, 6

SITES = [
    Site(0, "post_attn", WIDTH),
    Site(0, "post_block", WIDTH),
    Site(1, "attn_heads", HEADS),
    Site(1, "router_logits", EXPERTS),
    Site(1, "mlp_out", WIDTH),
    Site(1, "post_block", WIDTH),
]
"""In execution order."""

STREAM: tuple[SiteName, ...] = tuple((site.hook, site.layer) for site in SITES if site.width == WIDTH)
ALGORITHMS = (*HIDDEN, "moe_router")

Change = Callable[[Array, int], Array]
"""T on one float64 row [1, width], given its absolute position."""


class Vector(NamedTuple):
    """A registered payload with an algorithm and a scale, and what that means at each site."""

    algorithm: str
    digest: str | None
    scale: float
    normalize: bool
    params: dict[str, Any]
    rank: int
    changes: Mapping[SiteName, Change]
    reaches: Mapping[SiteName, Callable[[Array], Array]]

    def planned(self, sites: Sequence[SiteName], where: Mapping[str, Any]) -> PlannedVector:
        """As a plan holds it."""
        return PlannedVector(
            algorithm=self.algorithm,
            digest=self.digest,
            sites=tuple(sites),
            where=Where(**where),
            scale=self.scale,
            normalize=self.normalize,
            params=self.params,
            rank=self.rank,
        )


def library(spool: Spool, rng: np.random.Generator, variants: int = 3) -> list[Vector]:
    """Some vectors of every algorithm."""
    return [
        _vector(spool, rng, name, number, name in NORMALIZING and number == variants - 1)
        for name in ALGORITHMS
        for number in range(variants)
    ]


def _vector(spool: Spool, rng: np.random.Generator, name: str, number: int, normalize: bool) -> Vector:
    scale = float(rng.choice([1.0, -1.0, 0.5, 1.5]))
    if name == "moe_router":
        return _router(spool, rng, number)
    rank = int(rng.integers(1, 4))
    sites = (("attn_heads", 1),) if name == "attention_add" else STREAM
    if name in ("linear", "lm_steer", "loreft"):
        cases = dict.fromkeys(sites, make(name, rng, WIDTH, scale, rank=rank))
    else:
        # Clamps share their bounds over sites: they are the vector's parameters.
        seed = int(rng.integers(2**32))
        width = HEADS if name == "attention_add" else WIDTH
        cases = {
            site: make(name, np.random.default_rng(seed if name == "clamp" else (seed, at)), width, scale)
            for at, site in enumerate(sites)
        }
    one = cases[sites[0]]
    stored = StoredPayload(_KINDS[name], _numbers(name, cases), {})
    digest, _ = spool.put(stored, durable=False)
    return Vector(
        algorithm=name,
        digest=digest,
        scale=one.scale,
        normalize=normalize,
        params=dict(one.params),
        rank=one.rank,
        changes={site: _change(case, normalize) for site, case in cases.items()},
        reaches={site: case.reach for site, case in cases.items()},
    )


_KINDS = dict.fromkeys(HIDDEN, "direction") | {
    "concept_replace": "concept_pair",
    "linear": "linear",
    "lm_steer": "lowrank",
    "loreft": "reft",
}


def _numbers(name: str, cases: Mapping[SiteName, Case]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for (hook, layer), case in cases.items():
        path, payload = f"{hook}/{layer:08d}", case.payload
        if name == "concept_replace":
            found |= {f"{side}/{path}": payload[side].numpy() for side in ("h1", "h2")}
        elif _KINDS[name] == "direction":
            found[path] = (payload["direction"] if isinstance(payload, dict) else payload).numpy()
        else:
            found = {key: value.numpy() for key, value in payload.items()}
    return found


def _change(case: Case, normalize: bool) -> Change:
    def change(row: Array, _: int) -> Array:
        changed = case.change(row)
        return oracle.renormalized(row, changed) if normalize else changed

    return change


def _router(spool: Spool, rng: np.random.Generator, number: int) -> Vector:
    """Router settings, from a payload or from parameters; the random mode is drawn by the algorithm itself."""
    mode = ("soft_random", "deactivate", "soft_topk")[number % 3]
    settings = router(rng, EXPERTS, mode, layer=1)
    fields = {key: value for key, value in settings.items() if key not in ("experts", "layer")}
    digest, params = None, fields
    if number % 2 == 0:
        digest, params = spool.put(StoredPayload("router", {}, {"layers": {"1": fields}}), durable=False)[0], {}

    def change(row: Array, position: int) -> Array:
        algorithm = create_algorithm("moe_router")
        at = {**settings, "positions": torch.tensor([position])}
        return exact(algorithm._transform(torch.from_numpy(row).float(), at))

    site = ("router_logits", 1)
    return Vector(
        "moe_router", digest, 1.0, False, params, 0, {site: change}, {site: lambda row: 10 * (norms(row) + 5)}
    )


class Request(NamedTuple):
    """A request as a client means it: groups of (vector, sites, clause), each group with its conflict policy."""

    name: str
    tokens: list[int]
    prompt: int
    groups: list[tuple[str, list[tuple[Vector, tuple[SiteName, ...], Mapping[str, Any]]]]]

    @property
    def plan(self) -> Plan:
        """As an engine gets it."""
        return Plan(
            groups=tuple(
                VectorGroup(
                    conflict=conflict, vectors=tuple(vector.planned(sites, where) for vector, sites, where in vectors)
                )
                for conflict, vectors in self.groups
            )
        )

    def vectors_at(self, site: SiteName, row: int) -> list[Vector]:
        """What applies to a row at a site, in order, conflicts resolved."""
        found = []
        for conflict, vectors in self.groups:
            taken = False
            for vector, sites, where in vectors:
                if site in sites and selects(where, self.tokens, self.prompt, row):
                    if conflict != "priority" or not taken:
                        found.append(vector)
                    taken = True
        return found


def controller(spool: Spool, mode: str, dtype: torch.dtype = torch.float32, **more: Any) -> Controller:
    """A controller of all sites that may use every algorithm."""
    options = {"algorithms": ALGORITHMS, "memory_mib": 1, "max_slots": 300, "graph_max_rank": 24, **more}
    config = EngineConfig(hooks=tuple(dict.fromkeys(site.hook for site in SITES)), graph_mode=mode, **options)
    return Controller(config, SITES, spool, dtype=dtype, device=torch.device("cpu"), max_rows=128, max_requests=8)


def geometry(spans: Sequence[tuple[str, int, int]]) -> StepGeometry:
    """A step of (request, first row, rows)."""
    names = [name for name, _, _ in spans]
    return StepGeometry(names, np.array([n for _, _, n in spans]), np.array([start for _, start, _ in spans]))


def assert_nothing_is_left(control: Controller) -> None:
    """No request left a trace."""
    assert control.live == 0
    assert control._layout is None
    assert control.lanes_nonzero() == 0
    assert control.book.slots.used == 0
    assert control.book.pool_used == 0
    assert control.payloads_held == 0
    assert control.probes.used == 0
    assert not control.book.touches.any()
    assert not control.book._programs
    assert not control.book.faults
    for tables, _ in control.book._local:
        assert not tables.pool.rows.any()
        assert not any(value.any() for value in vars(tables).values() if isinstance(value, torch.Tensor))
        assert not any(value for value in vars(tables).values() if isinstance(value, dict | set))
    for value in vars(control).values():
        if isinstance(value, np.ndarray) and value.ndim > 1:
            assert not value.any()
