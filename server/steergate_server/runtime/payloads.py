"""Payload numbers on an engine process: read from the spool by digest, verified, kept while a request needs them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from steergate_server.algorithms.registry import get_algorithm
from steergate_server.registry.spool import Spool, StoredPayload
from steergate_server.runtime.plan import PlannedVector, SiteName

ROUTER_DEFAULTS: dict[str, Any] = {
    "expert_ids": [],
    "activate_ids": [],
    "deactivate_ids": [],
    "epsilon": 0.01,
    "lambda": 0.5,
    "topk": 8,
    "seed": 0,
}
"""What a router's settings are where a request's `params` do not say."""


class PayloadCache:
    """Verified payloads by digest, counted by the requests that hold them."""

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._payloads: dict[str, StoredPayload] = {}
        self._holders: dict[str, int] = {}

    def hold(self, digests: Iterable[str]) -> None:
        """Load what is missing and count one holder each. Raises what `Spool.load` raises; nothing is held then."""
        loaded = {digest: self._spool.load(digest) for digest in digests if digest not in self._payloads}
        self._payloads.update(loaded)
        for digest in digests:
            self._holders[digest] = self._holders.get(digest, 0) + 1

    def release(self, digests: Iterable[str]) -> None:
        """Give one hold of each back; a payload goes with its last holder."""
        for digest in digests:
            self._holders[digest] -= 1
            if self._holders[digest] == 0:
                del self._holders[digest], self._payloads[digest]

    @property
    def held(self) -> int:
        """Payloads in memory."""
        return len(self._payloads)

    def row(self, digest: str, site: SiteName) -> torch.Tensor:
        """The float32 row `[width]` of a direction payload at one site. Raises KeyError where it has none."""
        return self._tensor(digest, _path(site))

    def layer(self, vector: PlannedVector, site: SiteName, width: int) -> Any:
        """What a vector's algorithm gets as the unscaled payload of one site: a tensor, or a dict of them.

        width: elements per row at the site; for a router, the number of its experts.
        """
        if vector.digest is None:
            return _router({**ROUTER_DEFAULTS, **vector.params}, site, width)
        payload = self._payloads[vector.digest]
        if payload.kind == "direction":
            row = self.row(vector.digest, site)
            apart = get_algorithm(vector.algorithm).separate_scale
            return {"direction": row, **vector.params} if apart else row
        if payload.kind == "concept_pair":
            return {side: self._tensor(vector.digest, f"{side}/{_path(site)}") for side in ("h1", "h2")}
        if payload.kind == "router":
            return _router(payload.metadata["layers"][str(site[1])], site, width)
        return {name: self._tensor(vector.digest, name) for name in payload.numbers} | vector.params

    def _tensor(self, digest: str, path: str) -> torch.Tensor:
        return torch.from_numpy(self._payloads[digest].numbers[path])


def _path(site: SiteName) -> str:
    hook, layer = site
    return f"{hook}/{layer:08d}"


def _router(settings: dict[str, Any], site: SiteName, experts: int) -> dict[str, Any]:
    return {**settings, "experts": experts, "layer": site[1]}
