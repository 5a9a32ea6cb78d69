"""What every algorithm means, in float64 numpy, written from docs of the wire and of the algorithms alone.

Nothing here imports the server: an error in one of the two shows as a disagreement.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray


def float64(values: Any) -> Array:
    """Numbers as float64."""
    return np.asarray(values, dtype=np.float64)


def unit(v: Array) -> Array:
    """v / norm(v), for every v whose elements are finite and not all zero."""
    scaled = v / np.abs(v).max()
    return scaled / np.sqrt((scaled * scaled).sum())


def norms(rows: Array) -> Array:
    """Euclidean norm of each row."""
    return np.sqrt((rows * rows).sum(axis=1))


def renormalized(before: Array, after: Array) -> Array:
    """Rows of `after` at the norms of those of `before`; a row of zeros has no direction to be rescaled in."""
    out = after.copy()
    for row, (x, y) in enumerate(zip(before, after, strict=True)):
        if y.any():
            out[row] = unit(y) * norms(x[None])[0]
    return out


# T(x), one function per algorithm; `rows` are [n, width], `s` is the scale


def direct(rows: Array, s: float, v: Array) -> Array:
    """x + s v."""
    return rows + s * v


def erase(rows: Array, s: float, v: Array) -> Array:
    """x - s (x.u) u."""
    u = unit(v)
    return rows - s * np.outer(rows @ u, u)


def replace(rows: Array, s: float, v: Array) -> Array:
    """s v."""
    return np.broadcast_to(s * v, rows.shape).copy()


def concept_replace(rows: Array, s: float, h1: Array, h2: Array) -> Array:
    """x + s c (h2 - h1), with c = (x.h1) / (h1.h1)."""
    largest = np.abs(h1).max()
    scaled = h1 / largest
    c = (rows @ scaled) / (scaled @ scaled) / largest
    return rows + s * np.outer(c, h2 - h1)


def linear(rows: Array, s: float, weight: Array, bias: Array | None = None) -> Array:
    """s (W x + b)."""
    return s * (rows @ weight.T + (0 if bias is None else bias))


def lm_steer(rows: Array, s: float, projector1: Array, projector2: Array) -> Array:
    """x + s (x P1) P2^T."""
    return rows + s * (rows @ projector1) @ projector2.T


def loreft(rows: Array, s: float, rotate: Array, weight: Array, bias: Array | None = None) -> Array:
    """x + s (W x + b - R^T x) R^T."""
    inner = rows @ weight.T + (0 if bias is None else bias) - rows @ rotate
    return rows + s * inner @ rotate.T


def clamp(
    rows: Array, s: float, v: Array, low: float | None = None, high: float | None = None, value: float | None = None
) -> Array:
    """x + s (clip(x.u, min, max) - x.u) u."""
    if value is not None:
        low = high = value
    u = unit(v)
    p = rows @ u
    wanted = np.clip(p, -np.inf if low is None else low, np.inf if high is None else high)
    return rows + s * np.outer(wanted - p, u)


# Routers


def log_softmax(rows: Array) -> Array:
    """Of each row."""
    shifted = rows - rows.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def toggled(rows: Array, up: Sequence[int], down: Sequence[int], epsilon: float = 0.01) -> Array:
    """log_softmax; `up` at the row's max + epsilon, then `down` at its min - epsilon."""
    out = log_softmax(rows)
    highest, lowest = out.max(axis=1), out.min(axis=1)
    for expert in up:
        out[:, expert] = highest + epsilon
    for expert in down:
        out[:, expert] = lowest - epsilon
    return out


def deviations(rows: Array) -> Array:
    """Unbiased standard deviation of each row; a row of one expert has none."""
    if rows.shape[1] < 2:
        return np.zeros(rows.shape[0])
    return np.sqrt(((rows - rows.mean(axis=1, keepdims=True)) ** 2).sum(axis=1) / (rows.shape[1] - 1))


def soft(rows: Array, experts: Sequence[int], lam: float = 0.5) -> Array:
    """z_k + lambda std(z) at the listed experts."""
    out = rows.copy()
    for expert in sorted(set(experts)):
        out[:, expert] += lam * deviations(rows)
    return out


def ranks(row: Array) -> list[int]:
    """The experts of one row from the largest logit down, the lower index first among equals."""
    return sorted(range(len(row)), key=lambda expert: (-row[expert], expert))


def soft_topk(rows: Array, experts: Sequence[int], lam: float = 0.5, topk: int = 8) -> Array:
    """As soft, only for the listed experts that are outside of the row's top-k."""
    out = rows.copy()
    spread = deviations(rows)
    for index, row in enumerate(rows):
        inside = set(ranks(row)[:topk])
        for expert in set(experts) - inside:
            out[index, expert] += lam * spread[index]
    return out
