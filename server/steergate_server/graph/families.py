"""Table families: what a slot can hold at a site, and where it is kept.

A site's change is x -> a x + (x P) Q^T + b, then at most one clamp, then perhaps a rescaling to the row's old norm.
Each part is a family. Rows of every family lie in one pool, `[entries, width]`; a family's own table says, for each
site and slot, which rows are meant. Zero means "no effect" in every table.
"""

from __future__ import annotations

from typing import NamedTuple


class Table(NamedTuple):
    """One key that `graph_lower` may return. `shape`: of one lowered payload, `width` and `rank` spelled out."""

    shape: tuple[str, ...]
    meaning: str


FAMILIES: dict[str, dict[str, Table]] = {
    "additive": {"additive": Table(("width",), "b: added to the row")},
    "replace": {"replace": Table(("width",), "b, with a = 0: takes the row's place")},
    "projection": {
        "projection_in": Table(("width",), "p of x + (x.p) q"),
        "projection_out": Table(("width",), "q of x + (x.p) q"),
    },
    "lowrank": {
        "lowrank_in": Table(("rank", "width"), "P^T of x + (x P) Q^T"),
        "lowrank_out": Table(("rank", "width"), "Q^T of x + (x P) Q^T"),
        "lowrank_bias": Table(("width",), "b: added to the row"),
    },
    "clamp": {
        "clamp_direction": Table(("width",), "u, of norm 1"),
        "clamp_bounds": Table(("3",), "(low, high, strength)"),
    },
    "moe_gate": {
        "moe_plan": Table(("4",), "(code of the mode, lambda, top-k, epsilon)"),
        "moe_raise": Table(("width",), "1 at experts that the mode is about, or that are activated"),
        "moe_lower": Table(("width",), "1 at experts that are deactivated"),
        "moe_draw": Table(("2",), "(seed, layer) of the random mode"),
    },
}
"""By family, the keys of its tables."""
