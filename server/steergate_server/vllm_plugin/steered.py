"""What the scheduler keeps of a steered request, and how the request's blocks are keyed."""

from __future__ import annotations

from typing import Any

from vllm.v1.request import Request

from steergate_server.runtime.books import RequestBook
from steergate_server.runtime.capacity import Demand
from steergate_server.runtime.conversations import Turn
from steergate_server.runtime.identity import tagged_extension


class Steered:
    """What the scheduler keeps of one steered request."""

    __slots__ = (
        "book",
        "bridge",
        "client_index",
        "demand",
        "first_block",
        "identity",
        "latching",
        "looked_up",
        "plain",
        "plan",
        "ran",
        "reports",
        "request",
        "started",
    )

    def __init__(self, request: Request, turn: Turn, demand: Demand, first_block: int | None) -> None:
        self.request = request
        self.plan = turn.plan
        self.ran = turn.ran
        self.bridge = turn.plan.bridge
        self.latching = turn.latching
        self.demand = demand
        self.first_block = first_block
        self.plain = request._block_hasher
        self.identity = b""
        self.started: int | None = None
        # The step in which it last looked for cached blocks: when it started, or when it resumed.
        self.looked_up = 0
        self.client_index = request.client_index
        self.reports = turn.plan.report != "none"
        self.book = RequestBook(turn.plan) if turn.plan.gates or self.reports else None


def mix_identity(request: Request, plain: Any, first_block: int, identity: bytes) -> None:
    """Key a request's blocks from `first_block` on by an identity: those hashed already, and those to come.

    plain: vLLM's own hasher, which keys the blocks before.
    """
    if plain is None:  # prefix caching is off
        return

    def hasher(request: Request) -> list[Any]:
        return tagged_extension(lambda: plain(request), request.block_hashes, first_block, identity)

    del request.block_hashes[first_block:]
    request._block_hasher = hasher
    request.update_block_hashes()
