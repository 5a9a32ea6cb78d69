"""Arithmetic that several algorithms share."""

from __future__ import annotations

import torch


def unit(vector: torch.Tensor) -> torch.Tensor:
    """A vector `[width]` divided by its norm, in float32.

    The norm is taken in float64, in which no float32 vector's norm overflows or vanishes. Raises ValueError for a
    vector of zeros.
    """
    exact = vector.double()
    norm = exact.norm()
    if not bool(norm > 0):
        raise ValueError("a direction of zeros has no unit vector")
    scaled: torch.Tensor = exact / norm
    return scaled.float()
