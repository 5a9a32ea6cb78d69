"""Greedy decoding token by token with Hugging Face hooks: plain, steered and gated, and reading of activations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Steer:
    """Adds `scale * vectors[layer]` ([width]) to the output of each block that `vectors` names."""

    vectors: Mapping[int, Tensor]
    scale: float


@dataclass(frozen=True)
class Probe:
    """Fires where the output of block `layer`, before steering there, times `vector` ([width]) exceeds threshold."""

    layer: int
    vector: Tensor
    threshold: float = float("inf")


@dataclass
class Decoded:
    """One greedy answer: its token ids, with the end token if reached, and the probe's score at each generated row."""

    ids: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    smallest_gap: float = float("inf")
    """The least difference between the two highest logits of a step."""
    finished: bool = False

    def first_fired(self, threshold: float) -> int | None:
        """The first generated row (0-based) whose score is above the threshold."""
        return next((row for row, score in enumerate(self.scores) if score > threshold), None)


@contextmanager
def _hooked(model: Any, hook: Any) -> Iterator[None]:
    """Run `hook(layer, hidden [batch, rows, width]) -> hidden` at the output of every block."""

    def forward_hook(layer: int) -> Any:
        return lambda _module, _args, output: hook(layer, output)

    handles = [block.register_forward_hook(forward_hook(i)) for i, block in enumerate(model.model.layers)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Steering:
    """The hook of one decode: a static steer at every answer row, or one that a probe latches on (rest_of_request)."""

    def __init__(self, steer: Steer | None, probe: Probe | None, gated: bool, batch: int) -> None:
        self.steer, self.probe, self.gated = steer, probe, gated
        self.generating = False
        self.latched = torch.zeros(batch, dtype=torch.bool)
        self.scores: list[Tensor] = []

    def __call__(self, layer: int, hidden: Tensor) -> Tensor:
        if self.probe is not None and self.generating and layer == self.probe.layer:
            score = hidden[:, -1] @ self.probe.vector
            self.scores.append(score)
            self.latched |= score > self.probe.threshold
        if self.steer is None or layer not in self.steer.vectors:
            return hidden
        weight = self.latched.float() if self.gated else torch.ones(len(hidden))
        change = self.steer.scale * weight[:, None] * self.steer.vectors[layer]
        return torch.cat([hidden[:, :-1], hidden[:, -1:] + change[:, None]], dim=1)


def _decode_batch(model: Any, prompts: Tensor, hook: _Steering, end: int, limit: int) -> list[Decoded]:
    """Greedy answers to prompts of one length [batch, rows]: at most `limit` tokens each, up to and with the end."""
    answers = [Decoded() for _ in prompts]
    rows, cache = prompts, None
    with torch.inference_mode(), _hooked(model, hook):
        for _ in range(limit):
            output = model(input_ids=rows, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, best = output.past_key_values, output.logits[:, -1].topk(2)
            for i, answer in enumerate(answers):
                if answer.finished:
                    continue
                if hook.generating and hook.scores:
                    answer.scores.append(hook.scores[-1][i].item())
                answer.ids.append(int(best.indices[i, 0]))
                answer.smallest_gap = min(answer.smallest_gap, float(best.values[i, 0] - best.values[i, 1]))
                answer.finished = answer.ids[-1] == end
            if all(answer.finished for answer in answers):
                break
            rows, hook.generating = best.indices[:, :1], True
    return answers


def decode(
    model: Any,
    prompts: Sequence[Sequence[int]],
    end: int,
    *,
    steer: Steer | None = None,
    probe: Probe | None = None,
    gated: bool = False,
    limit: int = 48,
) -> list[Decoded]:
    """Greedy answers, in order of the prompts; those of equal length run together, so nothing is padded.

    The last prompt row and every generated row are steered; if `gated`, those from the probe's first firing on: at that
    row from the probe's site on, at later rows everywhere. The probe looks at generated rows only.
    """
    by_length: dict[int, list[int]] = defaultdict(list)
    for i, prompt in enumerate(prompts):
        by_length[len(prompt)].append(i)
    answers: dict[int, Decoded] = {}
    for members in by_length.values():
        hook = _Steering(steer, probe, gated, len(members))
        batch = torch.tensor([list(prompts[i]) for i in members])
        answers.update(zip(members, _decode_batch(model, batch, hook, end, limit), strict=True))
    return [answers[i] for i in range(len(prompts))]


def activations(model: Any, ids: Sequence[int]) -> Tensor:
    """The output of every block at every row of one sequence: float32 [layers, rows, width]."""
    outputs: list[Tensor] = []

    def keep(_layer: int, hidden: Tensor) -> Tensor:
        outputs.append(hidden[0])
        return hidden

    with torch.inference_mode(), _hooked(model, keep):
        model(input_ids=torch.tensor([list(ids)]), use_cache=False)
    return torch.stack(outputs)
