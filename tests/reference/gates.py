"""Gates: when x scope x apply, as gates.md puts it."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

import torch

from .results import GateRow, GateTrace
from .sources import Json, Registered, Site, directions, fields, require, same_numbers_key

SCOPES = ("this_token", "next_step", "rest_of_request", "rest_of_conversation")


def _decode_when(when: Json, registered: Registered) -> tuple[dict[str, Any], Site | None, torch.Tensor | None]:
    """A When with its defaults, and the probe's one site and row."""
    if when["kind"] == "always":
        when = fields(when, required=("kind",), at="generated")
        require(when["at"] in ("generated", "answer"), "out_of_range", f"always at {when['at']}")
        return when, None, None
    require(when["kind"] == "probe", "unknown_kind", when["kind"])
    required = ("kind", "probe", "threshold")
    when = fields(when, required=required, sharpness=1.0, fires="above", score="dot", at="generated")
    require(when["at"] in ("generated", "prompt_end", "answer"), "out_of_range", f"at {when['at']}")
    require(when["fires"] in ("above", "below"), "out_of_range", f"fires {when['fires']}")
    require(when["score"] in ("dot", "cosine"), "out_of_range", f"score {when['score']}")
    require(0 < when["sharpness"] < math.inf, "out_of_range", f"sharpness {when['sharpness']}")
    rows = directions(when["probe"], "probe", registered)
    require(len(rows) == 1, "probe_not_single_site", f"{list(map(str, rows))}")
    ((site, probe),) = rows.items()
    require(bool(probe.any()), "zero_vector", f"probe at {site}")
    return when, site, probe


def _decode_apply(apply: Json, registered: Registered) -> tuple[dict[str, Any], dict[Site, torch.Tensor]]:
    """An Apply with its defaults, and the rows that an add adds."""
    match apply["kind"]:
        case "add":
            apply = fields(apply, required=("kind", "steer"), strength=1.0)
            return apply, directions(apply["steer"], "steer", registered)
        case "attenuate":
            apply = fields(apply, required=("kind", "keep"))
            require(0 <= apply["keep"] <= 1, "out_of_range", f"keep {apply['keep']}")
            return apply, {}
        case other:
            require(other == "observe", "unknown_kind", other)
            return fields(apply, required=("kind",)), {}


@dataclass
class Gate:
    """One gate of one request and what it has seen so far."""

    when: dict[str, Any]
    scope: str
    apply: dict[str, Any]
    prompt_length: int
    probe_site: Site | None
    probe: torch.Tensor | None
    steer: dict[Site, torch.Tensor]
    trace: GateTrace
    bridged: bool = False
    scores: dict[int, float] = field(default_factory=dict)
    fired: set[int] = field(default_factory=set)

    @classmethod
    def decode(cls, gate: Json, registered: Registered, prompt_length: int) -> Gate:
        """Resolve the probe and the steer vector, and hold the rules on sites."""
        gate = fields(gate, required=("when", "scope", "apply"), label=None)
        scope = gate["scope"]
        when, probe_site, probe = _decode_when(gate["when"], registered)
        apply, steer = _decode_apply(gate["apply"], registered)
        require(scope in SCOPES, "unknown_kind", scope)
        require(apply["kind"] != "observe" or scope == "this_token", "observe_scope", scope)
        if probe_site is not None and scope == "this_token":
            late = all(probe_site.order <= site.order for site in steer)
            require(late, "steer_before_probe", f"probe at {probe_site}, steer at {list(map(str, steer))}")
        return cls(when, scope, apply, prompt_length, probe_site, probe, steer, GateTrace(gate["label"]))

    def identity(self) -> str:
        """gates.md, latch: "(when, scope, apply) with payload digests in place of names"; labels do not count."""
        when = {k: float(v) if k in ("threshold", "sharpness") else v for k, v in self.when.items()}
        apply = {k: float(v) if k in ("strength", "keep") else v for k, v in self.apply.items()}
        if self.probe_site is not None and self.probe is not None:
            when["probe"] = same_numbers_key({self.probe_site: self.probe})
        if self.steer:
            apply["steer"] = same_numbers_key(self.steer)
        return json.dumps([when, self.scope, apply], sort_keys=True)

    def looks_at(self, row: int) -> bool:
        """gates.md: "`generated`: rows >= P; `prompt_end`: row P - 1, once; `answer`: both"."""
        at, end = self.when["at"], self.prompt_length - 1
        return (row > end and at in ("generated", "answer")) or (row == end and at in ("prompt_end", "answer"))

    def look(self, row: int, site: Site, x: torch.Tensor) -> None:
        """At the probe's site: score x, "the value *before* any steering at that site", and fire or not."""
        if self.bridged or self.probe is None or site != self.probe_site or not self.looks_at(row):
            return
        score = torch.dot(x, self.probe)
        if self.when["score"] == "cosine":  # "divided by both norms, 0 for a zero row"
            norm = torch.linalg.vector_norm(x)
            score = score / norm / torch.linalg.vector_norm(self.probe) if norm > 0 else torch.zeros(())
        self.scores[row] = score.item()
        if self._sign() * (self.scores[row] - self.when["threshold"]) > 0:
            self.fired.add(row)

    def _sign(self) -> int:
        return {"above": 1, "below": -1}[self.when["fires"]]

    def soft_weight(self, row: int) -> float:
        """g = sigmoid(sharpness (s - threshold)), "sign turned for `below`; the argument saturates, never NaN"."""
        argument = self._sign() * self.when["sharpness"] * (self.scores[row] - self.when["threshold"])
        small = math.exp(-abs(argument))
        return 1 / (1 + small) if argument >= 0 else small / (1 + small)

    def weight(self, row: int, site: Site | None = None) -> float:
        """gates.md, table of scopes: the weight w at one row and site (None: at the row's end)."""
        if row < self.prompt_length - 1:
            return 0.0  # "Gates leave rows before P - 1 alone"
        if self.bridged:
            return 1.0  # "A later turn is bridged at every answer row"
        if self.when["kind"] == "always":
            return 1.0 if self.looks_at(row) else 0.0
        assert self.probe_site is not None
        reached = site is None or site.order >= self.probe_site.order
        match self.scope:
            case "this_token":  # "g at that row, at the probe site and every later site"
                return self.soft_weight(row) if reached and row in self.scores else 0.0
            case "next_step":  # "1 at row r + 1 for every row r at which it fired"
                return 1.0 if row - 1 in self.fired else 0.0
            case _:  # "1 from the first firing on: at that row from the probe site on, at later rows everywhere"
                earlier = any(fired < row for fired in self.fired)
                return 1.0 if earlier or (reached and row in self.fired) else 0.0

    def end_row(self, row: int) -> None:
        """Record an answer row. Its token is accepted here, so a firing at it counts."""
        if row < self.prompt_length - 1:
            return
        always = self.when["kind"] == "always"
        fired = self.looks_at(row) if always else row in self.fired
        first = Site(-1, "pre_attn")  # before every site; for a gate without a probe there is no "before"
        before = self.weight(row) if self.probe_site is None else self.weight(row, first)
        self.trace.rows.append(GateRow(row, self.scores.get(row), fired, self.weight(row), before))
        if self.scope == "rest_of_conversation":
            # "A gate latches when a firing is accepted (`always`: with its first accepted answer row)"
            self.trace.latched = self.trace.latched or fired or always
