"""Random requests over every algorithm, hook and selector that the reference interpreter knows."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np

from reference.models import HEAD_DIM, pack
from reference.wire import Json, inline

from .oracle import Case, prompt

HIDDEN = 64
HEADS_WIDTH = 4 * HEAD_DIM
LAYERS = 4
STREAM_HOOKS = ("pre_attn", "post_attn", "mlp_in", "mlp_out", "post_block")
HOOKS = (*STREAM_HOOKS, "attn_heads")
LOWERABLE = ("direct", "attention_add", "erase", "replace", "concept_replace", "lm_steer", "loreft", "clamp")
NORMALIZABLE = ("direct", "erase", "replace", "concept_replace")


class Requests:
    """A seeded source of requests."""

    def __init__(self, seed: int) -> None:
        self._rng = np.random.default_rng(seed)

    def single(self, algorithm: str) -> Case:
        """One vector of an algorithm."""
        vector = self._vector(algorithm)
        if algorithm in NORMALIZABLE and self._rng.random() < 0.4:
            vector["normalize"] = True
        return self._case([vector])

    def mixed(self, algorithms: tuple[str, ...], count: int = 3) -> Case:
        """Several vectors of different algorithms with different clauses; a clamp only last."""
        chosen = self._rng.permutation([name for name in algorithms if name != "clamp"])[:count].tolist()
        if "clamp" in algorithms and self._rng.random() < 0.3:
            chosen[-1] = "clamp"
        conflict = "priority" if self._rng.random() < 0.3 else "sequential"
        return self._case([self._vector(name) for name in chosen], conflict=conflict)

    def _case(self, vectors: list[Json], **more: Any) -> Case:
        length = int(self._rng.choice([1, 2, 9, 40, 70]))
        return Case(prompt(int(self._rng.integers(1 << 30)), length), {"vectors": vectors, **more}, 10)

    def _vector(self, algorithm: str) -> Json:
        hook = "attn_heads" if algorithm == "attention_add" else str(self._rng.choice(STREAM_HOOKS))
        layers = sorted(self._rng.choice(LAYERS, size=self._rng.integers(1, 4), replace=False).tolist())
        scale = float(self._rng.choice([1.0, 0.5, -0.7, 2.0]))
        vector: Json = {"algorithm": algorithm, "where": self._where(), "scale": scale}
        if algorithm in ("direct", "attention_add", "erase", "replace"):
            return {**vector, "steer": inline(self._packed(hook, layers))}
        if algorithm == "clamp":
            params = [{"min": -0.2, "max": 0.3}, {"value": 0.5}, {"max": 0.1}][int(self._rng.integers(3))]
            return {**vector, "steer": inline(self._packed(hook, layers)), "scale": 0.8, "params": params}
        if algorithm == "concept_replace":
            payload = {"kind": "concept_pair", "h1": self._packed(hook, layers), "h2": self._packed(hook, layers)}
            return {**vector, "steer": {"kind": "payload", "payload": payload}}
        return {**vector, "steer": {"kind": "payload", "payload": self._map(algorithm)}, "layers": layers, "hook": hook}

    def _map(self, algorithm: str) -> Json:
        """A payload that names no site."""
        random = self._rng.normal
        if algorithm == "linear":
            weight = 0.9 * np.eye(HIDDEN) + random(size=(HIDDEN, HIDDEN)) * 0.03
            return {"kind": "linear", "weight": tensor(weight), "bias": tensor(random(size=HIDDEN) * 0.1)}
        if algorithm == "lm_steer":
            first, second = (tensor(random(size=(HIDDEN, 3)) * 0.2) for _ in range(2))
            return {"kind": "lowrank", "projector1": first, "projector2": second}
        return {
            "kind": "reft",
            "rotate_layer": tensor(np.linalg.qr(random(size=(HIDDEN, 3)))[0]),
            "learned_source_weight": tensor(random(size=(3, HIDDEN)) * 0.2),
            "learned_source_bias": tensor(random(size=3)),
        }

    def _packed(self, hook: str, layers: list[int]) -> Json:
        width = HEADS_WIDTH if hook == "attn_heads" else HIDDEN
        rows = self._rng.normal(size=(len(layers), width))
        rows *= 4.0 / np.linalg.norm(rows, axis=1, keepdims=True)
        return pack(hook, dict(zip(layers, rows, strict=True)))

    def _where(self) -> Json:
        """A clause with a generation part or the whole prompt, so that it always selects something."""
        some = self._rng.random(10) < 0.3
        where: Json = {"answer": "all"} if some[0] else {"generation": "all"} if some[1] else {"prompt": "all"}
        if some[2]:
            where["prompt_positions"] = self._rng.integers(-6, 7, size=3).tolist()
        if some[3]:
            where["prompt_window"] = [int(self._rng.integers(-8, 0)), None]
        if some[4]:
            where["generation_window"] = [int(self._rng.integers(0, 4)), 6]
        if some[5]:
            where["generation_tokens"] = self._ids()
        if some[6]:
            where["prompt_tokens"] = self._ids()
        prompts = any(name.startswith("prompt") or name == "answer" for name in where)
        answers = any(name.startswith("generation") or name == "answer" for name in where)
        if some[7] and prompts:
            where["exclude_prompt_positions"] = [int(self._rng.integers(-3, 4))]
        if some[8] and answers:
            where["exclude_generation_tokens"] = self._ids()
        if some[9] and answers:
            where["exclude_generation_positions"] = self._rng.integers(0, 5, size=2).tolist()
        return where

    def _ids(self) -> list[int]:
        return self._rng.choice(256, size=60, replace=False).tolist()


def tensor(values: np.ndarray) -> Json:
    """A PackedTensor."""
    data = np.ascontiguousarray(values, dtype="<f4")
    return {"dtype": "float32", "shape": list(data.shape), "data": base64.b64encode(data.tobytes()).decode()}
