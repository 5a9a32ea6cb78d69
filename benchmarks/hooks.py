"""What people use today: a Hugging Face model with forward hooks that add a vector, one vector for the whole batch."""

from __future__ import annotations

from typing import Any

from benchmarks.clock import clock
from benchmarks.engines import Load
from benchmarks.model import LAYERS, WIDTH


class HookSession:
    """Greedy decoding in a bare loop with a KV cache, which is quicker than `generate`; hooks after every block.

    The same interface as the engines'. A hook adds one vector to all rows, so requests that are steered differently
    have to run one by one.
    """

    def __init__(self, model: str, dtype: str, mode: str, cpu_time: bool) -> None:  # noqa: ARG002 - as the engines'
        import torch
        from transformers import AutoModelForCausalLM

        self._torch = torch
        self._now = clock(cpu_time=cpu_time)
        kind = {"float32": torch.float32, "bfloat16": torch.bfloat16}[dtype]
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=kind, attn_implementation="sdpa").eval()
        vectors = torch.randn(LAYERS, WIDTH, generator=torch.Generator().manual_seed(7))
        vectors = (vectors / vectors.norm(dim=1, keepdim=True)).to(kind)
        for block, vector in zip(self._model.model.layers, vectors, strict=True):
            block.register_forward_hook(self._adding(vector))
        self._last: Any = None
        self._cache: Any = None
        self._tokens: list[Any] = []

    @staticmethod
    def _adding(vector: Any) -> Any:
        def hook(module: Any, inputs: Any, output: Any) -> Any:  # noqa: ARG001 - PyTorch's interface
            if isinstance(output, tuple):
                return (output[0] + vector, *output[1:])
            return output + vector

        return hook

    def begin(self, load: Load) -> float:
        """Prefill a load; seconds until every request has its first token."""
        prompts = self._torch.tensor(load.prompts())
        self._cache, self._tokens = None, []
        started = self._now()
        self._forward(prompts)
        return self._now() - started

    def steps(self, count: int) -> list[float]:
        """Seconds of each of some decode steps."""
        times = []
        for _ in range(count):
            started = self._now()
            self._forward(self._last)
            times.append(self._now() - started)
        return times

    def _forward(self, tokens: Any) -> None:
        with self._torch.inference_mode():
            output = self._model(tokens, past_key_values=self._cache, use_cache=True, logits_to_keep=1)
            self._cache = output.past_key_values
            self._last = output.logits[:, -1].argmax(dim=-1, keepdim=True)
        self._tokens.append(self._last)

    def end(self) -> list[list[int]]:
        """End the load; the tokens of each request."""
        tokens: list[list[int]] = self._torch.cat(self._tokens, dim=1).tolist()
        self._last = self._cache = None
        self._tokens = []
        return tokens
