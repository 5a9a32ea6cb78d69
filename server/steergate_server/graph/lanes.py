"""The persistent tensors that say, for each row of a step, what steering it gets.

Row t of a step is one token's forward pass. Lane 0 is its static slot; lane k + 1 is gate k of its request; behind the
gates comes the bridge: what earlier turns of the conversation latched. The slot of a locked server default stands apart
because it applies after all lanes. All tensors are allocated once, before warm-up, and never re-assigned.
"""

from __future__ import annotations

import torch

SOFT, LASTING, BELOW, COSINE = 1, 2, 4, 8
"""Bits of `GateTable.mode`: weight is the sigmoid at the row; a firing sets the row's weight to 1 from the probe site
on; fires below the threshold; the score is a cosine."""


class Lanes:
    """Per-row state of the step at hand, for at most `rows` rows and `gates` gate lanes of a request.

    `slot` [rows, 1 + gates] int32, `weight` [rows, 1 + gates] float32: what to add and how much of it. `locked` [rows]
    int32: the slot that applies last. `request`
    [rows] int32: our own number of the row's request, 0 for none. `position` [rows] int64: absolute. `look` [rows,
    gates] bool: the gate looks at the row. `score` [rows, gates] float32, NaN where not looked; `fired` [rows, gates]
    bool. `forced` [rows, gates] bool: the gate fired here before the request was preempted, so it fires whatever its
    score is now.
    """

    def __init__(self, rows: int, gates: int, device: torch.device) -> None:
        self.slot = torch.zeros((rows, 1 + gates), dtype=torch.int32, device=device)
        self.locked = torch.zeros(rows, dtype=torch.int32, device=device)
        self.weight = torch.zeros((rows, 1 + gates), dtype=torch.float32, device=device)
        self.request = torch.zeros(rows, dtype=torch.int32, device=device)
        self.position = torch.zeros(rows, dtype=torch.int64, device=device)
        self.look = torch.zeros((rows, gates), dtype=torch.bool, device=device)
        self.score = torch.full((rows, gates), float("nan"), dtype=torch.float32, device=device)
        self.fired = torch.zeros((rows, gates), dtype=torch.bool, device=device)
        self.forced = torch.zeros((rows, gates), dtype=torch.bool, device=device)
        # The same memory, for who writes single cells of it.
        self.flat_weight, self.flat_score, self.flat_fired, self.flat_forced = (
            tensor.view(-1) for tensor in (self.weight, self.score, self.fired, self.forced)
        )

    def clear(self, start: int, stop: int) -> None:
        """Zero rows `start` to `stop`: no request, no slot, no weight, nothing looked at."""
        if start >= stop:
            return
        for tensor in (self.slot, self.locked, self.weight, self.request, self.look, self.fired, self.forced):
            tensor[start:stop] = 0
        self.score[start:stop] = float("nan")


class GateTable:
    """What the gates of live requests are: `[requests, gates]` each, row 0 for "no request".

    `site` int32: number of the probe's site, -1 for none. `probe` int32: entry of the probe pool. `threshold` float64,
    `sharpness` float32, `mode` int32 (bits above), `damp` float32: 1 - keep of an attenuation, else 0.
    """

    def __init__(self, requests: int, gates: int, device: torch.device) -> None:
        shape = (requests, gates)
        self.site = torch.full(shape, -1, dtype=torch.int32, device=device)
        self.probe = torch.zeros(shape, dtype=torch.int32, device=device)
        self.threshold = torch.zeros(shape, dtype=torch.float64, device=device)
        self.sharpness = torch.zeros(shape, dtype=torch.float32, device=device)
        self.mode = torch.zeros(shape, dtype=torch.int32, device=device)
        self.damp = torch.zeros(shape, dtype=torch.float32, device=device)

    def clear(self, request: int) -> None:
        """Forget the gates of one request number."""
        self.site[request] = -1
        for tensor in (self.probe, self.threshold, self.sharpness, self.mode, self.damp):
            tensor[request] = 0
