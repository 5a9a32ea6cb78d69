"""The payload spool: one file per digest, written atomically, verified whenever it is read."""

import json
import os
import re
import tempfile
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from ..schema.payloads import Payload
from ..schema.requests import InlineVec
from .numbers import StoredPayload, canonical

__all__ = ["Spool", "SpoolError", "StoredPayload"]

_DIGEST = re.compile(r"[0-9a-f]{64}")


class SpoolError(RuntimeError):
    """A payload that should be in the spool is not there, or is not what its name says."""


class Spool:
    """Content-addressed payload files in one folder, shared by every process of a server.

    Args:
        directory: The folder; made if it is not there, readable by its owner only.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def put(self, payload: Payload | InlineVec | StoredPayload, *, durable: bool = True) -> tuple[str, int]:
        """Store a payload; storing it again changes nothing.

        Args:
            payload: On the wire's terms, or canonical already.
            durable: Whether it must survive a crash of the machine. False for payloads that live no longer than a
                request: other processes see them at once all the same.

        Returns:
            The digest, and the size of the numbers in bytes.

        Raises:
            SteeringError: What `canonical` raises.
        """
        stored = payload if isinstance(payload, StoredPayload) else canonical(payload)
        path = self._path(stored.digest)
        if not (self._is_intact(stored.digest) if durable else path.exists()):
            self._write(stored, path, durable)
        if durable:
            # Also a file that was there: it may have been put for a request only, and never synced.
            _sync(path)
            _sync(self._directory)
        return stored.digest, stored.nbytes

    def load(self, digest: str) -> StoredPayload:
        """Read a payload and check that it is the one its digest names.

        Raises:
            SpoolError: There is no such payload, or its file is damaged.
        """
        path = self._path(digest)
        if not path.exists():
            path = self._pinned(digest)
        try:
            with safe_open(path, framework="numpy") as file:
                numbers = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
                header = file.metadata() or {}
            stored = StoredPayload(header["kind"], numbers, json.loads(header["metadata"]))
        except FileNotFoundError:
            raise SpoolError(f"Payload {digest} is not in the spool. Register it again.") from None
        except (SafetensorError, OSError, KeyError, ValueError):
            raise SpoolError(f"Payload {digest} cannot be read: its file is damaged. Register it again.") from None
        if stored.digest != digest:
            raise SpoolError(f"Payload {digest} is damaged: its numbers have another digest. Register it again.")
        return stored

    def discard(self, digest: str) -> None:
        """Remove a payload, if it is there. Processes that have read it keep what they read."""
        self._path(digest).unlink(missing_ok=True)

    def pin(self, digest: str) -> int:
        """Keep a payload readable whatever `discard` does, until `unpin`; return the size of its file in bytes.

        Pins are the business of one process, which counts them. Raises OSError where it cannot be kept.
        """
        pinned = self._pinned(digest)
        pinned.parent.mkdir(mode=0o700, exist_ok=True)
        if not pinned.exists():
            os.link(self._path(digest), pinned)
        return pinned.stat().st_size

    def unpin(self, digest: str) -> None:
        """Give a pin up."""
        self._pinned(digest).unlink(missing_ok=True)

    def _pinned(self, digest: str) -> Path:
        return self._directory / "pinned" / self._path(digest).name

    def _path(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):
            raise SpoolError("A payload is named by 64 lower-case hexadecimal digits.")
        return self._directory / f"{digest}.safetensors"

    def _is_intact(self, digest: str) -> bool:
        try:
            self.load(digest)
        except SpoolError:
            return False
        return True

    def _write(self, stored: StoredPayload, path: Path, durable: bool) -> None:
        header = {"kind": stored.kind, "metadata": json.dumps(stored.metadata, sort_keys=True, separators=(",", ":"))}
        content = save(stored.numbers, metadata=header)
        # In the same folder, so that the rename stays within one file system and is atomic.
        descriptor, name = tempfile.mkstemp(dir=self._directory, prefix=".", suffix=".partial")
        partial = Path(name)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(content)
                if durable:
                    file.flush()
                    os.fsync(file.fileno())
            partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
