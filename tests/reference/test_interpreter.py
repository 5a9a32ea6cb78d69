"""The oracle under test: whatever can be worked out by hand or by Hugging Face must agree with it."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from .checks import (
    HEADS_WIDTH,
    HIDDEN,
    LAST,
    LAYERS,
    PROMPT,
    N,
    P,
    assert_differ,
    assert_same,
    logprobs_along,
    run,
)
from .interpreter import generate, hooked
from .models import pack, random_direction, tiny_llama
from .sources import NotAdmissibleError, Site, decode_packed
from .wire import EVERYWHERE, static


def test_unsteered_is_hugging_face(model: LlamaForCausalLM) -> None:
    result = run(model)
    expected = model.generate(
        torch.tensor([PROMPT]), max_new_tokens=N, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert result.tokens == expected[0, P:].tolist()
    np.testing.assert_allclose(result.logprobs, logprobs_along(model, result.tokens), atol=1e-4)
    for token, logprob, top in zip(result.tokens, result.logprobs, result.top_logprobs, strict=True):
        assert len(top) == 5
        assert next(iter(top)) == token
        assert top[token] == logprob == max(top.values())


def test_empty_requests_are_unsteered(model: LlamaForCausalLM) -> None:
    plain = run(model)
    requests: list[Any] = [[], {}, False]
    for request in requests:
        assert run(model, request).logprobs == plain.logprobs


def test_eos_ends_the_answer_and_is_part_of_it(model: LlamaForCausalLM) -> None:
    plain = run(model)
    eos = plain.tokens[4]
    assert run(model, eos_id=eos).tokens == plain.tokens[: plain.tokens.index(eos) + 1]


def test_forced_tokens_are_followed(model: LlamaForCausalLM) -> None:
    answer = [5, 6, 7, 8]
    result = run(model, forced=answer, max_tokens=4)
    assert result.tokens == answer
    np.testing.assert_allclose(result.logprobs, logprobs_along(model, answer), atol=1e-4)


def test_sites_come_in_execution_order(model: LlamaForCausalLM) -> None:
    seen: list[str] = []

    def change(site: Site, x: torch.Tensor) -> torch.Tensor:
        seen.append(str(site))
        assert x.shape == (HEADS_WIDTH if site.hook == "attn_heads" else HIDDEN,)
        return x

    with hooked(model, change), torch.no_grad():
        model(torch.tensor([[1]]))
    hooks = ("pre_attn", "attn_heads", "post_attn", "mlp_in", "mlp_out", "post_block")
    assert seen == [f"{layer}:{hook}" for layer in range(LAYERS) for hook in hooks]
    seen.clear()
    model(torch.tensor([[1]]))
    assert seen == []


def test_last_post_block_add_by_hand(model: LlamaForCausalLM) -> None:
    packed = random_direction(1, HIDDEN, [LAST], norm=20.0)
    result = run(model, {"vectors": [static(packed, scale=0.5)]})
    v = decode_packed(packed)[Site(LAST, "post_block")]
    np.testing.assert_allclose(result.logprobs, logprobs_along(model, result.tokens, lambda h: h + 0.5 * v), atol=1e-4)
    assert_differ(result, run(model))


def _bias(linear: torch.nn.Linear, bias: torch.Tensor) -> None:
    linear.bias = torch.nn.Parameter(bias)


@pytest.mark.parametrize("hook", ["pre_attn", "attn_heads", "post_attn", "mlp_in", "mlp_out", "post_block"])
def test_a_static_add_is_a_bias_somewhere(model: LlamaForCausalLM, hook: str) -> None:
    """Adding v at each hook of a block equals a bias of some linear map: other machinery, same sum."""
    layer = 1
    width = HEADS_WIDTH if hook == "attn_heads" else HIDDEN
    packed = random_direction(2, width, [layer], hook, norm=15.0)
    v = decode_packed(packed)[Site(layer, hook)]
    changed = copy.deepcopy(model)
    block = changed.model.layers[layer]
    with torch.no_grad():
        match hook:
            case "pre_attn":
                _bias(changed.model.layers[layer - 1].mlp.down_proj, v)
            case "attn_heads":
                _bias(block.self_attn.o_proj, block.self_attn.o_proj.weight @ v)
            case "post_attn":
                _bias(block.self_attn.o_proj, v)
            case "mlp_in":
                _bias(block.mlp.gate_proj, block.mlp.gate_proj.weight @ v)
                _bias(block.mlp.up_proj, block.mlp.up_proj.weight @ v)
            case _:
                _bias(block.mlp.down_proj, v)
    algorithm = "attention_add" if hook == "attn_heads" else "direct"
    steered = run(model, {"vectors": [static(packed, algorithm=algorithm)]})
    assert_same(steered, run(changed))
    assert_differ(steered, run(model))


def test_scale_zero_drops_the_vector(model: LlamaForCausalLM) -> None:
    packed = random_direction(3, HIDDEN, [1])
    other = random_direction(4, HIDDEN, [1], norm=10.0)
    for algorithm in ("direct", "replace"):
        assert run(model, {"vectors": [static(packed, scale=0, algorithm=algorithm)]}).logprobs == run(model).logprobs
    owner_dropped = {"vectors": [static(packed, scale=0), static(other)], "conflict": "priority"}
    assert run(model, owner_dropped).logprobs == run(model, {"vectors": [static(other)]}).logprobs


@pytest.mark.parametrize("position", [0, P - 1, P + 3])
def test_one_position_steers_that_row_alone(model: LlamaForCausalLM, position: int) -> None:
    where = {"prompt_positions": [position]} if position < P else {"generation_positions": [position - P]}
    packed = random_direction(5, HIDDEN, [LAST], norm=30.0)
    result = run(model, {"vectors": [static(packed, where)]})
    v = decode_packed(packed)[Site(LAST, "post_block")]
    by_hand = logprobs_along(model, result.tokens, lambda h: h + v * (torch.arange(len(h)) == position).unsqueeze(1))
    np.testing.assert_allclose(result.logprobs, by_hand, atol=1e-4)
    assert result.vectors[0].selected == [position]


def test_generated_token_ids_select_the_rows_they_enter(model: LlamaForCausalLM) -> None:
    plain = run(model)
    token = plain.tokens[3]
    packed = random_direction(6, HIDDEN, [LAST], norm=1e-6)  # too small to change the answer
    result = run(model, {"vectors": [static(packed, {"generation_tokens": [token]})]})
    assert result.tokens == plain.tokens
    assert result.vectors[0].selected == [P + j for j, t in enumerate(plain.tokens[:-1]) if t == token]
    prompt_side = run(model, {"vectors": [static(packed, {"prompt_tokens": [7]})]})
    assert prompt_side.vectors[0].selected == [0, 2]


def test_sequential_order_matters_and_priority_owns(model: LlamaForCausalLM) -> None:
    first = random_direction(7, HIDDEN, [1, 2], "mlp_out", norm=10.0)
    second = random_direction(8, HIDDEN, [2, LAST], "mlp_out", norm=10.0)
    a, b = decode_packed(first), decode_packed(second)
    spec_a, spec_b = static(first, {"answer": "all"}), static(second, algorithm="replace")
    one = {"vectors": [spec_a, spec_b]}
    other = {"vectors": [spec_b, spec_a]}
    at2 = Site(2, "mlp_out")
    assert_differ(run(model, one), run(model, other))
    sum_of_both = pack("mlp_out", {2: (a[at2] + b[at2]).numpy()})
    keep = [static(first, {"answer": "all"}, layers=[1]), static(second, layers=[LAST], algorithm="replace")]
    summed = {"vectors": [*keep, static(sum_of_both, {"answer": "all"}, algorithm="replace")]}
    prompt_rest = static(second, {"prompt_window": [0, -1]}, layers=[2], algorithm="replace")
    assert_same(run(model, other), run(model, {"vectors": [*summed["vectors"], prompt_rest]}))

    owned = run(model, {**one, "conflict": "priority"})
    assert owned.vectors[1].selected == list(range(P + N - 1))
    assert owned.vectors[1].applied == {at2: list(range(P - 1)), Site(LAST, "mlp_out"): list(range(P + N - 1))}
    assert owned.vectors[0].applied[at2] == list(range(P - 1, P + N - 1))
    equal = {"vectors": [spec_a, static(second, layers=[LAST], algorithm="replace"), prompt_rest]}
    assert_same(owned, run(model, equal))
    with pytest.raises(NotAdmissibleError, match="vector_conflict"):
        run(model, {**one, "conflict": "error"})


def test_named_vectors_and_their_layers(model: LlamaForCausalLM) -> None:
    packed = {
        **random_direction(9, HIDDEN, [0, 1, 2], norm=8.0),
        **random_direction(10, HIDDEN, [1, 2], "mlp_out", norm=8.0),
    }
    vectors = {"steer": {"joy": {"packed": packed}}, "probe": {}}
    named = {"kind": "name", "name": "joy", "layers": [1, 2], "hook": "mlp_out"}
    result = run(model, {"vectors": [{"steer": named, "layers": [2], "where": EVERYWHERE}]}, vectors=vectors)
    only = pack("mlp_out", {2: decode_packed(packed)[Site(2, "mlp_out")].numpy()})
    assert result.logprobs == run(model, {"vectors": [static(only)]}).logprobs
    for bad, code in (
        ({"steer": {**named, "layers": [0]}, "where": EVERYWHERE}, "layer_not_in_payload"),
        ({"steer": named, "layers": [0], "where": EVERYWHERE}, "layer_not_in_payload"),
        ({"steer": {**named, "name": "grief"}, "where": EVERYWHERE}, "unknown_vector"),
        ({"steer": {**named, "layer": [0]}, "where": EVERYWHERE}, "unknown_field"),
        ({"steer": named, "where": {"prompt_tokens": [9]}}, "selects_nothing"),
        ({"steer": named, "where": EVERYWHERE, "algorithm": "linear"}, "payload_kind"),
    ):
        with pytest.raises(NotAdmissibleError, match=code):
            run(model, {"vectors": [bad]}, vectors=vectors)


def test_tiny_llama_is_reproducible_and_guards_its_path(tmp_path: Any) -> None:
    path = tiny_llama(tmp_path / "a", layers=2, vocab=64)
    written = (path / "model.safetensors").stat().st_mtime_ns
    assert tiny_llama(path, layers=2, vocab=64) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == written
    with pytest.raises(ValueError, match="another path"):
        tiny_llama(path, layers=3, vocab=64)
    twin = tiny_llama(tmp_path / "b", layers=2, vocab=64)
    assert (twin / "model.safetensors").read_bytes() == (path / "model.safetensors").read_bytes()


def test_greedy_choices_are_rarely_close(model: LlamaForCausalLM) -> None:
    rng = np.random.default_rng(3)
    gaps = []
    for _ in range(8):
        result = generate(model, rng.integers(0, 250, 5).tolist(), None, vectors=None, max_tokens=16)
        gaps += [first - second for first, second, *_ in (list(top.values()) for top in result.top_logprobs)]
    assert np.quantile(gaps, 0.02) > 1e-3
