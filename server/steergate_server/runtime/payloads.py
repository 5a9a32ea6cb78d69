"""Payload numbers on an engine process: read from the spool by digest, verified, kept while a request needs them."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from steergate_server.registry.spool import Spool, StoredPayload
from steergate_server.runtime.plan import SiteName


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

    def row(self, digest: str, site: SiteName) -> torch.Tensor:
        """The float32 row `[width]` of a direction payload at one site. Raises KeyError where it has none."""
        hook, layer = site
        return torch.from_numpy(self._payloads[digest].numbers[f"{hook}/{layer:08d}"])

    @property
    def held(self) -> int:
        """Payloads in memory."""
        return len(self._payloads)
