"""Tiny random models and packed vectors for the tests that compare SteerGate with the reference interpreter."""

from __future__ import annotations

import base64
import json
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
)

HEAD_DIM = 32
"""Not hidden / heads: the smallest size that vLLM's CPU attention takes, and `attn_heads` gets a width of its own."""

SPECIALS = ("<unk>", "<s>", "</s>")
CHAT_TEMPLATE = "{{ '<s>' }}{% for message in messages %}{{ ' ' + message['content'] + ' </s>' }}{% endfor %}"


def tiny_llama(
    path: str | Path,
    *,
    seed: int = 0,
    layers: int = 4,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 256,
    intermediate: int = 128,
    max_position: int = 2048,
) -> Path:
    """Build a random float32 Llama with a tokenizer under `path`, unless the very same one lies there already.

    Token i is spelled ``t{i}``, but for the last three: ``<unk>``, ``<s>`` and ``</s>`` (the end of an answer). The
    weights are large enough for peaked logits and attention, so that greedy choices are rarely close.

    Returns:
        The path.

    Raises:
        ValueError: `path` holds something else.
    """
    path = Path(path)
    recipe = {name: value for name, value in locals().items() if name != "path"}
    marker = "recipe.json"
    if path.exists():
        if not (path / marker).exists() or json.loads((path / marker).read_text()) != recipe:
            raise ValueError(f"{path} holds something other than {recipe}; give another path")
        return path
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=HEAD_DIM,
        max_position_embeddings=max_position,
        tie_word_embeddings=False,
        bos_token_id=vocab - 2,
        eos_token_id=vocab - 1,
        dtype="float32",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=path.name, dir=path.parent))  # complete or absent, also when raced
    _random_model(config, seed).save_pretrained(work, safe_serialization=True)
    _word_tokenizer(vocab, max_position).save_pretrained(work)
    (work / marker).write_text(json.dumps(recipe))
    work.chmod(0o755)
    try:
        work.rename(path)
    except OSError:
        shutil.rmtree(work)
        return tiny_llama(path, **recipe)
    return path


def load_hf(path: str | Path) -> LlamaForCausalLM:
    """The model at `path` in float32 with plain attention, ready for the interpreter."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def shared_tiny_llama(cache: Any, folder: Callable[[str], Path]) -> Path:
    """The tiny Llama where pytest keeps its cache, if it has one: the path is part of vLLM's compile cache key.

    Args:
        cache: pytest's cache, or None.
        folder: Makes a temporary folder of a name, for a run without a cache.
    """
    home = folder("models") if cache is None else Path(cache.mkdir("steergate-models"))
    return tiny_llama(home / "tiny")


def tiny_moe(path: str | Path, kind: str, *, seed: int = 0, vocab: int = 256) -> Path:
    """Build a random float32 mixture of experts (`mixtral` or `qwen3_moe`) under `path`, unless something lies there.

    Two layers of eight experts, two of them chosen for each token.
    """
    path = Path(path)
    if path.exists():
        return path
    common = {
        "vocab_size": vocab,
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 2048,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    if kind == "mixtral":
        config = MixtralConfig(**common, intermediate_size=128, num_local_experts=8)
    else:
        config = Qwen3MoeConfig(
            **common, intermediate_size=128, moe_intermediate_size=128, num_experts=8, norm_topk_prob=True
        )
    _random_model(config, seed).save_pretrained(path, safe_serialization=True)
    _word_tokenizer(vocab, 2048).save_pretrained(path)
    return path


def _random_model(config: PretrainedConfig, seed: int) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        model = AutoModelForCausalLM.from_config(config).to(torch.float32)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if name.endswith("norm.weight"):
                parameter.normal_(1.0, 0.1, generator=generator)
            else:
                std = {"model.embed_tokens.weight": 1.0, "lm_head.weight": 0.4}.get(name, 0.15)
                parameter.normal_(0.0, std, generator=generator)
    return model


def save_tokenizer(path: str | Path, vocab: int, max_position: int) -> None:
    """Write the tokenizer that these models have: token i is spelled ``t{i}``, but for the last three."""
    _word_tokenizer(vocab, max_position).save_pretrained(path)


def _word_tokenizer(vocab: int, max_position: int) -> PreTrainedTokenizerFast:
    words = [*(f"t{i}" for i in range(vocab - len(SPECIALS))), *SPECIALS]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=SPECIALS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token=SPECIALS[0],
        bos_token=SPECIALS[1],
        eos_token=SPECIALS[2],
        model_max_length=max_position,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def pack(
    hook: str,
    rows: Mapping[int, np.ndarray],
    dtype: str = "float32",
    scales: Sequence[float] | None = None,
) -> dict[str, dict[str, Any]]:
    """Rows by layer as a wire object ``{hook: SteeringHookPacked}``.

    Args:
        hook: The hook of every row.
        rows: One row per layer, in the order they are to be sent.
        dtype: ``float16``, ``bfloat16`` (rounded to nearest even), ``float32`` or ``float64``.
        scales: One per row. They multiply the rows as given; nothing is divided out of these.
    """
    matrix = np.stack([np.asarray(row, dtype=np.float64) for row in rows.values()])
    if dtype == "bfloat16":
        bits = matrix.astype("<f4").view("<u4").astype(np.uint64)
        raw = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()
    else:
        raw = matrix.astype(np.dtype(dtype).newbyteorder("<")).tobytes()
    packed: dict[str, Any] = {
        "dtype": dtype,
        "shape": list(matrix.shape),
        "layer_indices": list(rows),
        "data": base64.b64encode(raw).decode("ascii"),
    }
    if scales is not None:
        packed["scales"] = list(scales)
    return {hook: packed}


def random_direction(
    seed: int, hidden: int, layers: Sequence[int], hook: str = "post_block", norm: float = 1.0
) -> dict[str, dict[str, Any]]:
    """A packed random direction: at each layer another one, of length `norm`."""
    matrix = np.random.default_rng(seed).standard_normal((len(layers), hidden))
    matrix *= norm / np.linalg.norm(matrix, axis=1, keepdims=True)
    return pack(hook, dict(zip(layers, matrix, strict=True)))


def one_hot(
    index: int, hidden: int, layers: Sequence[int], hook: str = "post_block", value: float = 1.0
) -> dict[str, dict[str, Any]]:
    """A packed vector that is `value` at one `index` and zero elsewhere, the same at every layer."""
    row = np.zeros(hidden)
    row[index] = value
    return pack(hook, dict.fromkeys(layers, row))
