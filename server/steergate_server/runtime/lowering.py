"""Whether the static vectors that meet at a site lower into the graph: decided from the plan alone."""

from __future__ import annotations

from collections.abc import Sequence

from steergate_server.algorithms.registry import get_algorithm
from steergate_server.runtime.plan import PlannedVector


def lowering_problem(vectors: Sequence[PlannedVector], max_rank: int) -> str | None:
    """Why some vectors in order have no closed form in the graph at one site, or None if they have.

    It follows `graph.affine.compose`, which does the work, from the payloads' kinds and ranks.
    """
    rank, constant = 0, False
    for place, vector in enumerate(vectors):
        algorithm = get_algorithm(vector.algorithm)
        family = algorithm.graph_family
        last = place == len(vectors) - 1
        if family is None:
            return algorithm.graph_payload_problem() or f"algorithm {vector.algorithm!r} does not lower into the graph"
        problem = algorithm.graph_payload_problem(vector)
        if problem is not None:
            return problem
        if family in ("clamp", "moe_gate") and not last:
            return f"{vector.algorithm!r} before another vector at the same site has no closed form"
        if family == "moe_gate" and place > 0:
            return "two router vectors at the same site have no closed form"
        if vector.normalize and len(vectors) > 1:
            return "'normalize' beside another vector at the same site has no closed form"
        if family == "replace":
            # What follows maps one and the same row, and takes no rank.
            rank, constant = 0, True
        elif not constant:
            rank += {"projection": 1, "lowrank": vector.rank}.get(family, 0)
    if rank > max_rank:
        return f"the low-rank maps at one site have rank {rank} together, the limit is {max_rank}"
    return None


def auto_mode(algorithms: Sequence[str]) -> tuple[str, str | None]:
    """The graph mode that `auto` stands for with these algorithms declared, and the reason where it is not in_graph."""
    for name in algorithms:
        algorithm = get_algorithm(name)
        if algorithm.graph_family is None:
            reason = algorithm.graph_payload_problem() or "it has no table family"
            return "split", f"algorithm {name!r} is declared and cannot run in graph: {reason}"
    return "in_graph", None
