"""Tiny random models of many architectures, and the places in Hugging Face's models that wire.md's hooks name.

The table is written down from Hugging Face's code, by hand: it is what the server's own search for these places is
held against.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers as hf
from torch import nn
from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

from .models import HEAD_DIM, save_tokenizer

HIDDEN = 64
HEADS = 4
LAYERS = 2
VOCAB = 192

Change = Callable[[torch.Tensor], torch.Tensor]
"""Rows `[.., width]` to changed rows."""


class Places(NamedTuple):
    """Paths within a block. `attention`: what is added to the stream for attention; None where nothing lies between
    attention and the MLP. `mlp`: first and last module of the MLP, None where steering knows none. `share`: of what
    attention returns, the part that is added."""

    heads: str = "self_attn.o_proj"
    attention: str | None = "self_attn"
    mlp: tuple[str, str] | None = ("mlp", "mlp")
    share: float = 1.0


class Architecture(NamedTuple):
    """A tiny model: its configuration, where its blocks are, and where the hooks are in a block."""

    config: Callable[[], hf.PretrainedConfig]
    places: Places = Places()
    blocks: str = "model.layers"
    heads_width: int = HEADS * HEAD_DIM
    experts: int = 0
    in_hf_backend: bool = False
    """vLLM runs Hugging Face's own modules. It changes their classes, so that takes a process of its own."""

    def widths(self) -> dict[str, int]:
        """The hooks that this model has, with the width of their rows."""
        hooks = {"pre_attn": HIDDEN, "attn_heads": self.heads_width}
        if self.places.attention is not None:
            hooks["post_attn"] = HIDDEN
        if self.places.mlp is not None:
            hooks |= {"mlp_in": HIDDEN, "mlp_out": HIDDEN}
        if self.experts:
            hooks["router_logits"] = self.experts
        return {**hooks, "post_block": HIDDEN}


def _common(**more: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 128,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "max_position_embeddings": 512,
        "bos_token_id": VOCAB - 2,
        "eos_token_id": VOCAB - 1,
        "pad_token_id": VOCAB - 1,
        "dtype": "float32",
        **more,
    }


def _grouped(**more: Any) -> dict[str, Any]:
    """With heads of 32 whatever the width, and fewer of them for keys."""
    return _common(num_key_value_heads=2, head_dim=HEAD_DIM, tie_word_embeddings=False, **more)


def _gpt2_sizes() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "n_embd": HIDDEN,
        "n_inner": 128,
        "n_layer": LAYERS,
        "n_head": 2,
        "n_positions": 512,
        "bos_token_id": VOCAB - 2,
        "eos_token_id": VOCAB - 1,
        "dtype": "float32",
    }


def _opt(*, norm_first: bool) -> hf.PretrainedConfig:
    sizes = {name: value for name, value in _common().items() if name != "intermediate_size"}
    sizes |= {"num_attention_heads": 2, "ffn_dim": 128, "word_embed_proj_dim": HIDDEN}
    return hf.OPTConfig(**sizes, do_layer_norm_before=norm_first)


NEOX = Places("attention.dense", None)
OUTPUT_NORMS = Places(attention="post_attention_layernorm")

ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(lambda: hf.LlamaConfig(**_grouped())),
    "qwen2": Architecture(
        lambda: hf.Qwen2Config(**_common(num_key_value_heads=1) | {"num_attention_heads": 2}), heads_width=HIDDEN
    ),
    "qwen3": Architecture(lambda: hf.Qwen3Config(**_grouped())),
    "gemma2": Architecture(
        lambda: hf.Gemma2Config(
            **_grouped(query_pre_attn_scalar=HEAD_DIM, sliding_window=32) | {"tie_word_embeddings": True}
        ),
        OUTPUT_NORMS,
    ),
    "gemma3": Architecture(
        lambda: hf.Gemma3TextConfig(
            **_grouped(query_pre_attn_scalar=HEAD_DIM, sliding_window=32) | {"tie_word_embeddings": True}
        ),
        OUTPUT_NORMS,
    ),
    "phi3": Architecture(
        lambda: hf.Phi3Config(**_common(num_key_value_heads=1, tie_word_embeddings=False) | {"num_attention_heads": 2}),
        heads_width=HIDDEN,
    ),
    "gpt2": Architecture(
        lambda: hf.GPT2Config(**_gpt2_sizes()), Places("attn.c_proj", "attn"), "transformer.h", HIDDEN
    ),
    "gptj": Architecture(
        lambda: hf.GPTJConfig(**_gpt2_sizes(), rotary_dim=16, tie_word_embeddings=False),
        Places("attn.out_proj", None),
        "transformer.h",
        HIDDEN,
    ),
    "gpt_neox": Architecture(
        lambda: hf.GPTNeoXConfig(**_common() | {"num_attention_heads": 2}),
        NEOX,
        "gpt_neox.layers",
        HIDDEN,
        in_hf_backend=True,
    ),
    "opt": Architecture(
        lambda: _opt(norm_first=True),
        Places("self_attn.out_proj", "self_attn", ("fc1", "fc2")),
        "model.decoder.layers",
        HIDDEN,
    ),
    "opt_norm_last": Architecture(
        lambda: _opt(norm_first=False), Places("self_attn.out_proj", None, None), "model.decoder.layers", HIDDEN
    ),
    "olmo2": Architecture(
        lambda: hf.Olmo2Config(**_common(num_key_value_heads=1) | {"num_attention_heads": 2}),
        OUTPUT_NORMS,
        heads_width=HIDDEN,
        in_hf_backend=True,
    ),
    "exaone4": Architecture(
        lambda: hf.Exaone4Config(**_grouped(sliding_window=None, layer_types=["full_attention"] * LAYERS)), OUTPUT_NORMS
    ),
    "cohere": Architecture(
        lambda: hf.CohereConfig(**_common(num_key_value_heads=1) | {"num_attention_heads": 2}),
        Places(attention=None),
        heads_width=HIDDEN,
    ),
    "granite": Architecture(
        lambda: hf.GraniteConfig(
            **_common(num_key_value_heads=1, residual_multiplier=0.5) | {"num_attention_heads": 2}
        ),
        Places(share=0.5),
        heads_width=HIDDEN,
    ),
    "mixtral": Architecture(
        lambda: hf.MixtralConfig(**_grouped(num_local_experts=8, num_experts_per_tok=2)), experts=8
    ),
    "qwen3_moe": Architecture(
        lambda: hf.Qwen3MoeConfig(
            **_grouped(moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True)
        ),
        experts=8,
    ),
}


def build(path: Path, name: str) -> Path:
    """A random float32 model of an architecture, with a tokenizer, under `path`."""
    _save(_randomised(hf.AutoModelForCausalLM.from_config(ARCHITECTURES[name].config())), path)
    return path


BLIP2 = ARCHITECTURES["opt"]._replace(blocks="language_model.model.decoder.layers")
"""BLIP-2 writes with an OPT. Its encoder and its Q-Former have more blocks than that."""


def build_blip2(path: Path) -> Path:
    """A model that sees, with a processor that needs no torchvision, under `path`."""
    small = {"intermediate_size": 64, "num_attention_heads": 2}
    config = hf.Blip2Config(
        vision_config={**small, "hidden_size": HIDDEN, "num_hidden_layers": 5, "image_size": 28, "patch_size": 14},
        qformer_config={**small, "hidden_size": 32, "num_hidden_layers": 3, "encoder_hidden_size": HIDDEN},
        text_config=_opt(norm_first=True).to_dict(),
        num_query_tokens=4,
        image_token_index=7,
    )
    _save(_randomised(hf.Blip2ForConditionalGeneration(config)), path)
    pixels = BlipImageProcessorPil(size={"height": 28, "width": 28})
    hf.Blip2Processor(pixels, hf.AutoTokenizer.from_pretrained(path), num_query_tokens=4).save_pretrained(path)
    return path


def build_mamba(path: Path) -> Path:
    """A model without attention."""
    config = hf.MambaConfig(vocab_size=VOCAB, hidden_size=HIDDEN, state_size=8, num_hidden_layers=LAYERS)
    _save(hf.AutoModelForCausalLM.from_config(config), path)
    return path


def _save(model: hf.PreTrainedModel, path: Path) -> None:
    model.save_pretrained(path, safe_serialization=True)
    save_tokenizer(path, VOCAB, 512)


def _randomised(model: hf.PreTrainedModel) -> hf.PreTrainedModel:
    """Weights large enough for peaked logits and for every place to matter."""
    generator = torch.Generator().manual_seed(3)
    model = model.to(torch.float32)
    tied = model.get_input_embeddings().weight is model.get_output_embeddings().weight
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter is model.get_input_embeddings().weight:
                parameter.copy_(noise * (0.1 if tied else 1.0))
            elif parameter.dim() > 1:
                parameter.copy_(noise * 0.15)
            else:  # biases, norms: not where they start
                parameter.add_(noise * 0.1)
    return model


def blocks_of(model: hf.PreTrainedModel, path: str) -> nn.ModuleList:
    """The decoder blocks of a Hugging Face model."""
    stack = model.get_submodule(path)
    assert isinstance(stack, nn.ModuleList)
    return stack


@contextmanager
def changed(block: nn.Module, places: Places, hook: str, change: Change) -> Iterator[None]:
    """Let `change` change what a hook names in a Hugging Face block."""
    handles = []

    def entering(module: nn.Module, act: Change) -> None:
        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
            if args:
                return (act(args[0]), *args[1:]), kwargs
            name = "hidden_states" if "hidden_states" in kwargs else next(iter(kwargs))
            return args, {**kwargs, name: act(kwargs[name])}

        handles.append(module.register_forward_pre_hook(before, with_kwargs=True))

    def leaving(module: nn.Module, act: Change) -> None:
        def after(_: nn.Module, args: Any, output: Any) -> Any:  # noqa: ARG001 - torch's signature
            return (act(output[0]), *output[1:]) if isinstance(output, tuple) else act(output)

        handles.append(module.register_forward_hook(after))

    match hook:
        case "pre_attn":
            entering(block, change)
        case "attn_heads":
            entering(block.get_submodule(places.heads), change)
        case "post_attn":
            # The stream is what entered the block plus what attention adds: whatever it is to become, attention adds.
            assert places.attention is not None
            entered: list[torch.Tensor] = []

            def remember(rows: torch.Tensor) -> torch.Tensor:
                entered[:] = [rows]
                return rows

            entering(block, remember)
            share = places.share
            leaving(
                block.get_submodule(places.attention),
                lambda rows: (change(entered[0] + share * rows) - entered[0]) / share,
            )
        case "mlp_in":
            assert places.mlp is not None
            entering(block.get_submodule(places.mlp[0]), change)
        case "mlp_out":
            assert places.mlp is not None
            leaving(block.get_submodule(places.mlp[1]), change)
        case "post_block":
            leaving(block, change)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
