"""The capability table that came with this SDK: what each algorithm takes. A server's own table wins over it."""

from __future__ import annotations

from functools import cache
from pkgutil import get_data

import msgspec

__all__ = ["Algorithm", "Packaged", "packaged"]


class Algorithm(msgspec.Struct, frozen=True):
    """What one algorithm takes."""

    payload_kind: str | None
    normalize: bool
    params: tuple[str, ...]
    target_component: str


class _Limits(msgspec.Struct, frozen=True):
    vectors: int


class Packaged(msgspec.Struct, frozen=True):
    """The packaged table, as far as the SDK uses it."""

    algorithms: dict[str, Algorithm]
    limits: _Limits


@cache
def packaged() -> Packaged:
    """Return the packaged table; it is read once."""
    raw = get_data(f"{__package__}._generated", "capabilities.json")
    assert raw is not None, "the package is installed without its table of algorithms"
    return msgspec.json.decode(raw, type=Packaged)
