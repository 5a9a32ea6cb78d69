"""What the scheduler tells the API server outside of any request: a small file beside the payloads."""

from __future__ import annotations

from pathlib import Path

import msgspec

_NAME = "engine-status.json"


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """As of the engine's last step. `latches`: conversations with a latch. `pool_used`: bytes of the payload pools in
    use, on the fullest worker."""

    latches: int = 0
    pool_used: int = 0


def store_status(folder: Path, status: EngineStatus) -> None:
    """Replace the status. Raises OSError."""
    fresh = folder / f".{_NAME}"
    fresh.write_bytes(msgspec.json.encode(status))
    fresh.replace(folder / _NAME)


def load_status(folder: Path) -> EngineStatus:
    """The status; an empty one before anything was told."""
    try:
        return msgspec.json.decode((folder / _NAME).read_bytes(), type=EngineStatus)
    except FileNotFoundError:
        return EngineStatus()
