"""moe_router on real mixtures of experts, against Hugging Face with its routers' logits changed by float64 formulas."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import linear, softmax
from transformers import AutoModelForCausalLM

from reference.models import tiny_moe
from steergate_server.runtime.config import EngineConfig
from support.engines import Answer, SteeredEngine
from unit.algorithms.oracle import soft, soft_topk, toggled

from .conftest import SETTINGS
from .oracle import TOLERANCE, differ, prompt

TOKENS = 8


class Moe:
    """A steering engine over a mixture of experts, and the same model in Hugging Face."""

    def __init__(self, path: Path, graph_mode: str) -> None:
        config = EngineConfig(
            hooks=("router_logits", "post_block"),
            algorithms=("moe_router", "direct"),
            graph_mode=graph_mode,
            memory_mib=8,
        )
        self.engine = SteeredEngine(path, config=config, enforce_eager=True, **SETTINGS)
        self._model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def answer(self, prompts: list[list[int]], requests: list[Any]) -> list[Answer]:
        self.engine.llm.reset_prefix_cache()
        return self.engine.steer(prompts, requests, TOKENS)

    def logprobs(self, prompt_ids: list[int], tokens: list[int], change: Change, rows: slice) -> list[float]:
        """Log-probabilities of an answer under routers whose logits are changed at some rows."""
        routers = [layer.mlp.gate for layer in self._model.model.layers]
        originals = [router.forward for router in routers]
        for router in routers:
            router.forward = MethodType(_changed(change, rows), router)
        try:
            with torch.no_grad():
                ids = torch.tensor([[*prompt_ids, *tokens[:-1]]])
                logits = self._model(ids).logits[0, len(prompt_ids) - 1 :]
        finally:
            for router, original in zip(routers, originals, strict=True):
                router.forward = original
        return logits.double().log_softmax(-1)[torch.arange(len(tokens)), tokens].tolist()


Change = Callable[[np.ndarray], np.ndarray]


def _changed(change: Change, rows: slice) -> Callable[..., Any]:
    """A router's forward, as Hugging Face's Mixtral and Qwen3-MoE have it, with changed logits."""

    def forward(router: Any, hidden: torch.Tensor) -> Any:
        logits = linear(hidden.reshape(-1, router.hidden_dim), router.weight)
        logits[rows] = torch.from_numpy(change(logits[rows].double().numpy())).float()
        top, chosen = torch.topk(softmax(logits, dim=-1), router.top_k, dim=-1)
        return logits, top / top.sum(dim=-1, keepdim=True), chosen

    return forward


@pytest.fixture(
    scope="module", params=[("mixtral", "in_graph"), ("qwen3_moe", "split")], ids=lambda pair: "-".join(pair)
)
def moe(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Moe]:
    kind, graph_mode = request.param
    moe = Moe(tiny_moe(tmp_path_factory.mktemp("moe") / kind, kind), graph_mode)
    yield moe
    moe.engine.close()


CASES: dict[str, tuple[dict[str, Any], Change]] = {
    "activate": ({"mode": "activate", "expert_ids": [1, 6]}, lambda z: toggled(z, [1, 6], [])),
    "deactivate": (
        {"mode": "deactivate", "expert_ids": [0], "activate_ids": [3], "epsilon": 0.5},
        lambda z: toggled(z, [3], [0], 0.5),
    ),
    "soft": ({"mode": "soft", "expert_ids": [2, 5], "lambda": -1.5}, lambda z: soft(z, [2, 5], -1.5)),
    "soft_topk": (
        {"mode": "soft_topk", "expert_ids": [0, 4, 7], "lambda": 2.0, "topk": 3},
        lambda z: soft_topk(z, [0, 4, 7], 2.0, 3),
    ),
}


def _request(params: dict[str, Any], where: dict[str, Any]) -> dict[str, Any]:
    return {"vectors": [{"algorithm": "moe_router", "params": params, "layers": [0, 1], "where": where}]}


@pytest.mark.parametrize("name", CASES)
def test_modes_equal_hugging_face(moe: Moe, name: str) -> None:
    params, change = CASES[name]
    prompts = [prompt(seed, length) for seed, length in ((1, 5), (2, 40), (3, 70))]
    everywhere, answered = {"prompt": "all", "generation": "all"}, {"answer": "all"}
    requests = [_request(params, everywhere), _request(params, answered), _request(params, everywhere)]
    rows = [slice(None), slice(len(prompts[1]) - 1, None), slice(None)]
    steered = moe.answer(prompts, requests)
    plain = moe.answer(prompts, [None] * len(prompts))
    for ids, answer, selected, other in zip(prompts, steered, rows, plain, strict=True):
        expected = moe.logprobs(ids, answer.tokens, change, selected)
        np.testing.assert_allclose(answer.logprobs, expected, rtol=0, atol=TOLERANCE)
        assert differ(answer, other)


def test_router_payload_says_the_same_as_params(moe: Moe) -> None:
    settings = {"mode": "soft", "expert_ids": [2, 5], "lambda": -1.5}
    payload = {"kind": "router", "layers": {"0": settings, "1": settings}}
    where = {"answer": "all"}
    by_payload = {
        "vectors": [{"algorithm": "moe_router", "steer": {"kind": "payload", "payload": payload}, "where": where}]
    }
    ids = prompt(4, 20)
    (first,), (second,) = moe.answer([ids], [by_payload]), moe.answer([ids], [_request(settings, where)])
    assert first == second


def test_random_experts_depend_on_the_position_alone(moe: Moe) -> None:
    request = _request({"mode": "soft_random", "expert_ids": [0, 1], "lambda": 3.0, "seed": 5}, {"prompt": "all"})
    other = _request({"mode": "soft_random", "expert_ids": [0, 1], "lambda": 3.0, "seed": 6}, {"prompt": "all"})
    ids = prompt(5, 70)
    (alone,) = moe.answer([ids], [request])
    together = moe.answer([ids, prompt(6, 30), ids], [request, request, other])
    np.testing.assert_allclose(together[0].logprobs, alone.logprobs, rtol=0, atol=TOLERANCE)
    assert differ(together[2], alone)
