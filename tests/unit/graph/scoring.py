"""Scoring one site of a step, for tests that have no controller."""

from __future__ import annotations

import torch

from steergate_server.graph import kernels
from steergate_server.graph.lanes import GateTable, Lanes


def score_gates(
    hidden: torch.Tensor,
    residual: torch.Tensor | None,
    site: int,
    rows: int,
    lanes: Lanes,
    gates: GateTable,
    probes: torch.Tensor,
) -> None:
    """Score whoever looks at a site in a step of so many rows."""
    looks = kernels.looks_by_site(rows, lanes, gates).get(site)
    if looks is not None:
        kernels.score_gates(hidden, residual, looks, lanes, probes.index_select(0, looks.probe))
