"""What the tests of the reference share: one prompt, one short run, and comparisons of results."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import LlamaForCausalLM

from .interpreter import Result, generate

LAYERS, HIDDEN, HEADS_WIDTH = 4, 64, 128
LAST = LAYERS - 1
PROMPT = [7, 31, 7, 102, 55, 200]
P = len(PROMPT)
N = 12
SCOPES = ("this_token", "next_step", "rest_of_request", "rest_of_conversation")


def run(model: LlamaForCausalLM, request: Any = None, **more: Any) -> Result:
    return generate(model, PROMPT, request, **{"vectors": None, "max_tokens": N, **more})


def assert_same(left: Result, right: Result, tolerance: float = 1e-4) -> None:
    assert left.tokens == right.tokens
    np.testing.assert_allclose(left.logprobs, right.logprobs, atol=tolerance)


def assert_differ(left: Result, right: Result) -> None:
    n = min(len(left.logprobs), len(right.logprobs))
    assert np.abs(np.subtract(left.logprobs[:n], right.logprobs[:n])).max() > 1e-2


def logprobs_along(model: LlamaForCausalLM, tokens: list[int], edit: Any = None) -> list[float]:
    """Log-probabilities of an answer from one forward of the whole text; `edit` gets the last block's output."""
    hidden: list[torch.Tensor] = []
    handle = model.model.layers[LAST].register_forward_hook(lambda _, __, output: hidden.append(output[0]))
    with torch.no_grad():
        model(torch.tensor([PROMPT + tokens[:-1]]))
        handle.remove()
        last = hidden[0] if edit is None else edit(hidden[0])
        logits = model.lm_head(model.model.norm(last))[P - 1 :]
    logprobs = torch.log_softmax(logits.double(), -1)
    return [float(row[token]) for row, token in zip(logprobs, tokens, strict=True)]
