"""One tiny model for all tests of the reference."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import LlamaForCausalLM

from .models import load_hf, tiny_llama


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> LlamaForCausalLM:
    return load_hf(tiny_llama(tmp_path_factory.mktemp("reference") / "tiny"))
