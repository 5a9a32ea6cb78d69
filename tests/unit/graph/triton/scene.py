"""A step at one site without an engine: tables, gates and lanes at random, and what should come of them.

`by_hand` says it in float64 numpy, a row at a time, from what the slots and gates were made of; `by_torch` from the
tensors that the kernel has, with the functions of the op on CPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from steergate_server.graph.affine import Affine, Clamp, SiteChange
from steergate_server.graph.families import FAMILIES
from steergate_server.graph.kernels import complete, in_range, kept_share, table_change
from steergate_server.graph.lanes import BELOW, COSINE, LASTING, SOFT, GateTable, Lanes
from steergate_server.graph.pools import Pool
from steergate_server.graph.tables import SiteTables
from unit.algorithms import oracle
from unit.algorithms.cases import exact
from unit.graph.scoring import score_gates

CPU = torch.device("cpu")
SITE, LOCAL, SITES = 2, 1, 4
"""The site of the step, its number in its tables, and how many there are."""

STATIC, ADDING, ELSEWHERE, SLOTS = range(1, 9), range(9, 12), 12, 13
"""Static slots, gates' slots, and one that does something at another site alone."""

REQUESTS, CAPACITY = 5, 80
KINDS = ("bias", "replace", "projection", "lowrank", "clamp", "clamped", "kept_norm", "clamped_norm")


class Gate(NamedTuple):
    """One gate of one request, as the oracle knows it. `site` -1: it has no probe; row None likewise."""

    site: int
    probe: np.ndarray
    threshold: float
    sharpness: float
    mode: int
    damp: float


@dataclass
class Scene:
    """Everything that a launch reads and writes."""

    width: int
    dtype: torch.dtype
    lanes: Lanes
    gates: GateTable
    probes: torch.Tensor
    tables: SiteTables
    touches: torch.Tensor
    locked: torch.Tensor | None
    changes: dict[int, SiteChange] = field(default_factory=dict)
    known: dict[tuple[int, int], Gate] = field(default_factory=dict)

    @property
    def places(self) -> list[tuple[SiteTables, int]]:
        """By site."""
        return [(self.tables, 0), (self.tables, 0), (self.tables, LOCAL), (self.tables, 0)]


class Outcome(NamedTuple):
    """What a step leaves behind. weight, score, fired: of the gates' lanes."""

    hidden: torch.Tensor
    weight: torch.Tensor
    score: torch.Tensor
    fired: torch.Tensor
    faults: set[int]


def scene(
    rng: np.random.Generator,
    width: int,
    dtype: torch.dtype,
    gates: int,
    rank: int,
    locked: bool,
    only_biases: bool = False,
) -> Scene:
    """Tables, pools and gates of a scene; the lanes are empty. rank 0: no family that has pairs."""
    families = ["additive"] if only_biases else [name for name in FAMILIES if rank or name not in _PAIRED]
    made = Scene(
        width=width,
        dtype=dtype,
        lanes=Lanes(CAPACITY, gates, CPU),
        gates=GateTable(REQUESTS, gates, CPU),
        probes=torch.zeros(1 + REQUESTS * max(gates, 1), width + 3),
        tables=SiteTables(2, SLOTS, Pool(400, width, dtype, CPU), families, rank, CPU),
        touches=torch.zeros(SITES, SLOTS, dtype=torch.bool),
        locked=torch.zeros(CAPACITY, dtype=torch.int32) if locked else None,
    )
    fill(made, rng)
    return made


_PAIRED = ("projection", "lowrank")


def fill(made: Scene, rng: np.random.Generator) -> None:
    """Give every slot and every gate a new meaning, in place."""
    kinds = [kind for kind in KINDS if made.tables.max_rank or kind not in _PAIRED]
    if made.tables.forget is None:
        kinds = ["bias"]
    for slot in made.changes:
        made.tables.clear(LOCAL, slot)
    made.touches.zero_()
    made.touches[1, ELSEWHERE] = True
    rng.shuffle(kinds)
    for number, slot in enumerate((*STATIC, *ADDING)):
        kind = kinds[number % len(kinds)] if slot in STATIC else "bias"
        made.changes[slot] = _change(rng, kind, made)
        made.tables.write(slot, [(LOCAL, (slot, int(rng.integers(2**40))), made.changes[slot])])
        made.touches[SITE, slot] = True
    for request in range(1, REQUESTS):
        for number in range(made.lanes.look.shape[1]):
            _gate(rng, made, request, number)


def _change(rng: np.random.Generator, kind: str, made: Scene) -> SiteChange:
    def rows(count: int, size: float) -> torch.Tensor:
        return torch.from_numpy(rng.normal(size=(count, made.width)) * size).to(made.dtype).float()

    width, most = made.width, made.tables.max_rank
    rank = {"projection": 1, "lowrank": most}.get(kind, int(rng.integers(0, most + 1)) if kind == "clamped" else 0)
    affine = Affine(
        0.0 if kind == "replace" else float(rng.choice([1.0, 0.5])) if kind == "lowrank" else 1.0,
        rows(rank, 1 / math.sqrt(width)),
        rows(rank, 1.0),
        rows(1, 1.0)[0] if kind not in ("projection", "clamp") else torch.zeros(width),
    )
    clamp = None
    if "clamp" in kind:
        unit = torch.from_numpy(oracle.unit(rng.normal(size=width))).to(made.dtype).float()
        low, high = sorted(rng.normal(size=2).round(2).tolist())
        low, high = ((low, high), (-math.inf, high), (low, math.inf))[int(rng.integers(3))]
        clamp = Clamp(unit, low, high, float(rng.choice([1.0, 0.5, -2.0])))
    return SiteChange(affine, clamp, "norm" in kind)


_MODES = [0, SOFT, LASTING, SOFT | BELOW, LASTING | BELOW, SOFT | COSINE, COSINE, LASTING | COSINE | BELOW]


def _gate(rng: np.random.Generator, made: Scene, request: int, number: int) -> None:
    at, entry = (request, number), 1 + (request * made.lanes.look.shape[1] + number) % (len(made.probes) - 1)
    gate = Gate(
        site=int(rng.choice([-1, SITE, SITE, SITE + 1])),
        probe=exact(torch.from_numpy(rng.normal(size=made.width)).float()),
        threshold=float(rng.normal()),
        sharpness=float(np.float32(rng.choice([0.0, 0.5, 3.0, 1e30]))),
        mode=int(rng.choice(_MODES)),
        damp=float(np.float32(rng.choice([0.0, 0.0, 1.0, 0.3]))),
    )
    made.known[at] = gate
    made.gates.site[at], made.gates.probe[at], made.gates.mode[at] = gate.site, entry, gate.mode
    made.gates.threshold[at], made.gates.sharpness[at] = gate.threshold, gate.sharpness
    made.gates.damp[at] = gate.damp
    made.probes[entry] = float("nan")  # beyond the site's width
    made.probes[entry, : made.width] = torch.from_numpy(gate.probe)


def lay(made: Scene, rng: np.random.Generator, rows: int) -> None:
    """Lanes of a step of so many rows. The lanes beyond them are full of what must not be looked at."""
    lanes, shape = made.lanes, made.lanes.look.shape
    lanes.request[:] = torch.from_numpy(rng.integers(0, REQUESTS, size=CAPACITY))
    lanes.slot[:, 0] = torch.from_numpy(rng.choice([0, 0, ELSEWHERE, *STATIC], size=CAPACITY))
    lanes.slot[:, 1:] = torch.from_numpy(rng.choice([0, ELSEWHERE, *ADDING], size=shape))
    lanes.look[:] = torch.from_numpy(rng.random(shape) < 0.6)
    lanes.forced[:] = torch.from_numpy(rng.random(shape) < 0.1)
    lanes.weight[:, 0], lanes.weight[:, 1:] = 1.0, torch.from_numpy(rng.choice([0.0, 1.0], size=shape))
    lanes.score[:], lanes.fired[:] = float("nan"), False
    if made.locked is not None:
        made.locked[:] = torch.from_numpy(rng.choice([0, ELSEWHERE, *STATIC], size=CAPACITY))
    none = lanes.request[:rows] == 0
    lanes.slot[:rows][none] = 0
    lanes.look[:rows][none] = False
    # Some rows have nothing, as padding has.
    bare = torch.from_numpy(rng.random(rows) < 0.15)
    for tensor in (lanes.slot, lanes.look, lanes.request, *([made.locked] if made.locked is not None else [])):
        tensor[:rows][bare] = 0


def stream(rng: np.random.Generator, made: Scene, rows: int, split: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows of hidden values, and the other summand where the stream is split."""
    made_of = [torch.from_numpy(rng.normal(size=(rows, made.width))).to(made.dtype) for _ in range(1 + split)]
    made_of[0][torch.from_numpy(rng.random(rows) < 0.1)] = 0
    return made_of[0], made_of[1] if split else None


def by_torch(made: Scene, rows: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> Outcome:
    """The functions of the op on CPU, in the controller's order; the lanes are left as they were."""
    lanes, hidden = made.lanes, hidden.clone()
    kept_lanes = lanes.weight.clone(), lanes.score.clone(), lanes.fired.clone()
    score_gates(hidden, residual, SITE, rows, lanes, made.gates, made.probes[:, : made.width])
    slots = lanes.slot[:rows].long()
    last = made.locked[:rows].long() if made.locked is not None else torch.zeros(rows, dtype=torch.int64)
    touched = made.touches[SITE][torch.cat((slots, last.unsqueeze(1)), dim=1)].any(dim=1)
    active = touched.nonzero().flatten()
    slots, last, faults = slots[active], last[active], set()
    if len(active):
        value, rank = complete(hidden, residual, active), made.tables.max_rank
        change = table_change(value, slots[:, 0], LOCAL, made.tables, rank)
        change = change * kept_share(active, lanes, made.gates, slots.shape[1])
        for lane in range(1, slots.shape[1]):
            vectors = made.tables.pool.rows[made.tables.bias[LOCAL][slots[:, lane]].long()].float()
            change = change + lanes.weight[active, lane].unsqueeze(1) * vectors
        change = change + table_change(value + change, last, LOCAL, made.tables, rank)
        before = hidden[active]
        changed = (before.float() + change).to(hidden.dtype)
        spoiled = ~in_range(changed) & in_range(before)
        hidden[active] = torch.where(spoiled.unsqueeze(1), before, changed)
        own = slots[spoiled]
        faults = set(own.flatten().tolist()) | set(last[spoiled][~own.any(dim=1)].tolist())
    found = Outcome(
        hidden,
        lanes.weight[:, 1:].clone(),
        lanes.score.clone(),
        lanes.fired.clone(),
        {int(slot) for slot in faults} - {0},
    )
    lanes.weight[:], lanes.score[:], lanes.fired[:] = kept_lanes
    return found


def by_hand(made: Scene, rows: int, hidden: torch.Tensor, residual: torch.Tensor | None) -> Any:
    """(hidden, weight, score, fired, margin, size): arrays of what the step should come to.

    margin: how far each score is from its threshold; size [rows]: how large numbers got on the way.
    """
    lanes = made.lanes
    out, size = exact(hidden).copy(), np.ones(len(hidden))
    weight, score = exact(lanes.weight[:, 1:]).copy(), exact(lanes.score).copy()
    fired, margin = lanes.fired.numpy().copy(), np.full(score.shape, np.inf)
    for row in range(rows):
        x = exact(hidden[row]) + (0 if residual is None else exact(residual[row]))
        kept, added = 1.0, np.zeros(made.width)
        for number in range(score.shape[1]):
            at, gate = (row, number), made.known.get((int(lanes.request[row]), number))
            if gate is not None and bool(lanes.look[at]) and gate.site == SITE:
                score[at] = _score(x, gate)
                margin[at] = (score[at] - gate.threshold) * (-1 if gate.mode & BELOW else 1)
                fired[at] = margin[at] > 0 or bool(lanes.forced[at])
                if gate.mode & SOFT:
                    weight[at] = 1 / (1 + math.exp(-max(-700.0, min(700.0, gate.sharpness * margin[at]))))
                if gate.mode & LASTING and fired[at]:
                    weight[at] = 1
            slot = int(lanes.slot[row, number + 1])
            kept *= 1 - (gate.damp if gate is not None else 0) * weight[at]
            added += weight[at] * (exact(made.changes[slot].affine.bias) if slot in made.changes else 0)
        changed, reach = _changed(x, made.changes.get(int(lanes.slot[row, 0])))
        last = int(made.locked[row]) if made.locked is not None else 0
        middle = x + kept * (changed - x) + added
        end, more = _changed(middle, made.changes.get(last))
        out[row] = out[row] + (end - x)
        size[row] = max(reach, more, *np.abs(x), *np.abs(added))
    return out, weight, score, fired, margin, size


def _score(x: np.ndarray, gate: Gate) -> float:
    if not gate.mode & COSINE:
        return float(x @ gate.probe)
    size = math.sqrt(x @ x) * math.sqrt(gate.probe @ gate.probe)
    return float(x @ gate.probe) / size if size else 0.0


def _changed(x: np.ndarray, change: SiteChange | None) -> tuple[np.ndarray, float]:
    """T(x), and how far an error of the size of float32's in the numbers on the way can have moved it."""
    if change is None:
        return x, 0.0
    affine = change.affine
    y = affine.keep * x + (exact(affine.reads) @ x) @ exact(affine.writes) + exact(affine.bias)
    reach = np.linalg.norm(x) + np.linalg.norm(y) + np.abs(exact(affine.reads) @ x).sum()
    if change.clamp is not None:
        u, component = exact(change.clamp.direction), y @ exact(change.clamp.direction)
        y = y + change.clamp.strength * (np.clip(component, change.clamp.low, change.clamp.high) - component) * u
    if change.normalize:
        reach *= max(1.0, np.linalg.norm(x) / max(np.linalg.norm(y), 1e-30))
        y = oracle.renormalized(x[None], y[None])[0]
    return y, float(reach)
