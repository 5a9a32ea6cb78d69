"""The model of the benchmarks: a random Llama, 12 layers of width 1024, 158 million parameters."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "build" / "benchmarks"
"""Where it lies: always at one place, which is part of the key of vLLM's compile cache."""

LAYERS, WIDTH, VOCABULARY = 12, 1024, 8192

SETTINGS = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "intermediate_size": 2816,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "dtype": "float32",
}


def build(folder: Path = FOLDER) -> Path:
    """Write the model under `folder`, unless the very same one lies there; returns its path."""
    path, marker = folder / "llama-12x1024", "recipe.json"
    if (path / marker).exists() and json.loads((path / marker).read_text()) == SETTINGS:
        return path
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SETTINGS))
    work = Path(tempfile.mkdtemp(dir=folder))  # complete or absent
    model.save_pretrained(work, safe_serialization=True)
    (work / marker).write_text(json.dumps(SETTINGS))
    shutil.rmtree(path, ignore_errors=True)
    work.rename(path)
    return path
