"""Names of registered vectors: labels that point to digests, and the counting that keeps payloads alive."""

import datetime
import re
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from ..schema.errors import SteeringError
from ..schema.hooks import HOOKS
from ..schema.payloads import Payload
from ..schema.registry import RegisterAnswer, UnregisterAnswer, VectorInfo
from ..schema.requests import InlineVec
from ..schema.words import VectorKind
from .numbers import StoredPayload, canonical, sites_of
from .outline import Outline, outline
from .spool import Spool

__all__ = ["NameEntry", "NameIndex"]

MAX_METADATA_BYTES = 16_384

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_KINDS: tuple[VectorKind, ...] = ("probe", "steer")


@dataclass(frozen=True)
class NameEntry:
    """One registered name.

    Attributes:
        name, kind: The label and its namespace.
        digest: The payload that it points to.
        payload_kind: That payload's kind, such as `direction`.
        outline: What admission needs to know of the payload.
        info: What the list routes tell.
    """

    name: str
    kind: VectorKind
    digest: str
    payload_kind: str
    outline: Outline
    info: VectorInfo


class NameIndex:
    """The registered names, in memory, over a spool. Safe to use from several threads.

    A payload stays in the spool as long as a name points to it or somebody holds its digest.

    Args:
        spool: Where payloads are.
        max_names: The most names.
        max_bytes: The most bytes of numbers that names may point to, each payload counted once.
    """

    def __init__(self, spool: Spool, *, max_names: int = 100_000, max_bytes: int = 64 * 2**30) -> None:
        self._spool = spool
        self._max_names = max_names
        self._max_bytes = max_bytes
        self._lock = threading.RLock()
        self._entries: dict[tuple[VectorKind, str], NameEntry] = {}
        self._holders: Counter[str] = Counter()

    def register(
        self,
        name: str,
        kind: VectorKind,
        payload: Payload | InlineVec,
        metadata: Mapping[str, Any] | None = None,
        replace: bool = False,
        prefix: str = "",
    ) -> RegisterAnswer:
        """Point a name at a payload. When this returns, the payload is durable in the spool.

        The same content again is `unchanged`; its metadata is updated if `replace` is true.

        Args:
            name: The name.
            kind: The namespace. A probe is a direction that is not zero at a single site.
            payload: The numbers.
            metadata: The registrant's notes: JSON, at most 16 KiB.
            replace: Whether a name with other content may move.
            prefix: Path of the payload in the body: `payload`; empty for `packed`, which is a member of its own.

        Raises:
            SteeringError: `name_conflict`, `registry_full`, `invalid_name`, `invalid_metadata`, what `canonical`
                raises, and for a probe `payload_kind`, `probe_not_single_site` and `zero_vector`.
        """
        _check_label(name, kind)
        notes = _checked_metadata(metadata or {})
        stored = canonical(payload, prefix)
        if kind == "probe":
            _check_probe(stored, prefix)
        entry = _entry(name, kind, payload, stored, notes)
        with self._lock:
            self._check_room(entry, replace)
            self._holders[entry.digest] += 1
        try:
            # Outside of the lock: requests are admitted while the disk is at work.
            self._spool.put(stored)
            with self._lock:
                self._check_room(entry, replace)
                return self._point(entry, replace)
        finally:
            self.release(entry.digest)

    def unregister(self, name: str, kind: VectorKind) -> UnregisterAnswer:
        """Forget a name. Requests that hold its payload keep it.

        Raises:
            SteeringError: `unknown_vector` (404).
        """
        with self._lock:
            entry = self._find(name, kind)
            del self._entries[kind, name]
            self.release(entry.digest)
        return UnregisterAnswer(status="unregistered", name=name, kind=kind)

    def find(self, name: str, kind: VectorKind) -> NameEntry | None:
        """Return a name's entry, or None."""
        with self._lock:
            return self._entries.get((kind, name))

    def get(self, name: str, kind: VectorKind) -> VectorInfo:
        """Describe one name. Raises SteeringError `unknown_vector` (404)."""
        with self._lock:
            return self._find(name, kind).info

    def list(self, kind: str | None = None, name: str | None = None) -> list[VectorInfo]:
        """Describe the names, sorted by name and kind; only those of a namespace or a name, if one is given.

        Raises:
            SteeringError: `unknown_kind` for a namespace that does not exist.
        """
        if kind is not None and kind not in _KINDS:
            raise SteeringError("unknown_kind", f"{kind!r} is no kind of vector. It is `probe` or `steer`.", "kind")
        with self._lock:
            entries = sorted(self._entries.values(), key=lambda entry: (entry.name, entry.kind))
        return [entry.info for entry in entries if kind in (None, entry.kind) and name in (None, entry.name)]

    def hold(self, digest: str) -> None:
        """Keep a payload in the spool until `release`.

        Raises:
            SteeringError: `unknown_vector`: nobody holds it any more, so it may be gone.
        """
        with self._lock:
            if not self._holders[digest]:
                raise SteeringError("unknown_vector", "The vector was unregistered just now. Send the request again.")
            self._holders[digest] += 1

    def hold_digest(self, digest: str) -> Outline:
        """Keep a payload that is held already until `release`, and return its outline.

        Raises:
            SteeringError: `unknown_vector`: nobody holds it.
        """
        with self._lock:
            if not self._holders[digest]:
                message = f"The server holds no payload with digest {digest}. Send its numbers, or register them."
                raise SteeringError("unknown_vector", message)
            self._holders[digest] += 1
        try:
            return outline(self._spool.load(digest))
        except BaseException:
            self.release(digest)
            raise

    def hold_payload(self, stored: StoredPayload) -> str:
        """Put a request's own payload, in canonical form, into the spool and hold it; return its digest."""
        with self._lock:
            self._holders[stored.digest] += 1
        try:
            self._spool.put(stored, durable=False)
        except BaseException:
            self.release(stored.digest)
            raise
        return stored.digest

    def release(self, digest: str) -> None:
        """Give one hold back; the payload is dropped with its last one.

        Raises:
            ValueError: It is not held.
        """
        with self._lock:
            if self._holders[digest] <= 0:
                raise ValueError(f"payload {digest} is released more often than it was held")
            self._holders[digest] -= 1
            if not self._holders[digest]:
                del self._holders[digest]
                # Within the lock, or a payload that is being put again right now would be dropped.
                self._spool.discard(digest)

    def _find(self, name: str, kind: VectorKind) -> NameEntry:
        entry = self._entries.get((kind, name))
        if entry is not None:
            return entry
        others = [other for other in _KINDS if other != kind and (other, name) in self._entries]
        hint = f" There is a {others[0]} vector of that name." if others else " List the vectors to see what there is."
        raise SteeringError("unknown_vector", f"No {kind} vector is named {name!r}.{hint}", "name", status=404)

    def _check_room(self, entry: NameEntry, replace: bool) -> None:
        existing = self._entries.get((entry.kind, entry.name))
        if existing is not None and existing.digest != entry.digest and not replace:
            message = (
                f"A {entry.kind} vector named {entry.name!r} exists with other content (digest {existing.digest}). "
                "Send `replace: true`, or choose another name."
            )
            raise SteeringError("name_conflict", message, "name")
        if existing is None and len(self._entries) >= self._max_names:
            raise SteeringError("registry_full", f"The registry is full: {self._max_names} names. Unregister some.")
        sizes = {other.digest: other.info.bytes for other in self._entries.values() if other is not existing}
        if entry.digest not in sizes and sum(sizes.values()) + entry.info.bytes > self._max_bytes:
            message = f"The registry is full: {self._max_bytes} bytes of numbers. Unregister some vectors."
            raise SteeringError("registry_full", message)

    def _point(self, entry: NameEntry, replace_metadata: bool) -> RegisterAnswer:
        key = entry.kind, entry.name
        existing = self._entries.get(key)
        if existing is not None and existing.digest == entry.digest:
            if replace_metadata:
                info = msgspec.structs.replace(existing.info, metadata=entry.info.metadata)
                self._entries[key] = replace(existing, info=info)
            return RegisterAnswer(status="unchanged", name=entry.name, kind=entry.kind, digest=entry.digest)
        self._entries[key] = entry
        self._holders[entry.digest] += 1
        if existing is None:
            return RegisterAnswer(status="created", name=entry.name, kind=entry.kind, digest=entry.digest)
        self.release(existing.digest)
        return RegisterAnswer(status="replaced", name=entry.name, kind=entry.kind, digest=entry.digest)


def _check_label(name: str, kind: str) -> None:
    if not _NAME.fullmatch(name):
        message = f"{name[:60]!r} is no name. Use up to 128 of A-Z a-z 0-9 . _ -, starting with a letter or a digit."
        raise SteeringError("invalid_name", message, "name")
    if kind not in _KINDS:
        raise SteeringError("unknown_kind", f"{kind!r} is no kind of vector. It is `probe` or `steer`.", "kind")


def _checked_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return a private copy of the notes, as JSON would give them back."""
    try:
        encoded = msgspec.json.encode(metadata)
    except (TypeError, ValueError, RecursionError):
        raise SteeringError("invalid_metadata", "The metadata is not JSON. Send plain values.", "metadata") from None
    if len(encoded) > MAX_METADATA_BYTES:
        message = f"The metadata takes {len(encoded)} bytes as JSON; at most {MAX_METADATA_BYTES} are kept."
        raise SteeringError("invalid_metadata", message, "metadata")
    copy = msgspec.json.decode(encoded)
    if not isinstance(copy, dict):
        raise SteeringError("invalid_metadata", "The metadata is not a JSON object.", "metadata")
    return copy


def _check_probe(stored: StoredPayload, prefix: str) -> None:
    parent = f"{prefix}." if prefix else ""
    if stored.kind != "direction":
        message = f"A probe is a direction; a {stored.kind} payload was given. Register it as `steer`."
        raise SteeringError("payload_kind", message, f"{parent}kind")
    if len(stored.numbers) != 1:
        message = f"A probe looks at a single site; {len(stored.numbers)} were given. Register one row."
        raise SteeringError("probe_not_single_site", message, f"{parent}packed")
    ((path, row),) = stored.numbers.items()
    if not row.any():
        message = "A probe of zeros never tells rows apart. Register a vector that is not zero."
        raise SteeringError("zero_vector", message, f"{parent}packed.{path.partition('/')[0]}.data")


def _entry(
    name: str, kind: VectorKind, payload: Payload | InlineVec, stored: StoredPayload, notes: dict[str, Any]
) -> NameEntry:
    sites = tuple(sites_of(payload))
    layers = {layer for _, layer, _ in sites} or {stored.metadata[key] for key in ("layer",) if key in stored.metadata}
    # Without sites, the width is the row count of the last tensor: `weight`, `projector2` or `rotate_layer`.
    widths = {width for _, _, width in sites} or {tensor.shape[0] for tensor in list(stored.numbers.values())[-1:]}
    info = VectorInfo(
        name=name,
        kind=kind,
        digest=stored.digest,
        hooks=[hook for hook in HOOKS if any(site[0] == hook for site in sites)],
        layers=sorted(layers),
        width=(widths.pop() or None) if len(widths) == 1 else None,
        bytes=stored.nbytes,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        metadata=notes,
    )
    return NameEntry(name, kind, stored.digest, stored.kind, outline(stored), info)
