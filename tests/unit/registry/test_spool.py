"""The spool: atomic, idempotent, and never believing a file."""

import os
import threading

import numpy as np
import pytest

from steergate_server.registry import spool as module
from steergate_server.registry.numbers import canonical, payload_digest
from steergate_server.registry.spool import Spool, SpoolError
from steergate_server.schema.errors import SteeringError
from steergate_server.schema.payloads import ReftPayload, RouterLayer, RouterPayload
from unit.registry.payloads import direction, inline, tensor

PAYLOAD = direction(post_block={1: [1.0, 2.0], 12: [3.0, 4.0]})
REFT = ReftPayload(rotate_layer=tensor((2, 1), [1, 2]), learned_source_weight=tensor((1, 2), [3, 4]), layer=7)


@pytest.fixture
def spool(tmp_path):
    return Spool(tmp_path / "deep" / "spool")


def files(spool):
    return sorted(path.name for path in spool._directory.iterdir())


@pytest.mark.parametrize("durable", [True, False])
def test_what_is_put_is_loaded(spool, durable):
    digest, size = spool.put(PAYLOAD, durable=durable)
    assert (digest, size) == (payload_digest(PAYLOAD), 16)
    assert files(spool) == [f"{digest}.safetensors"]
    stored = spool.load(digest)
    assert (stored.kind, stored.metadata, stored.digest) == ("direction", {}, digest)
    assert {path: row.tolist() for path, row in stored.numbers.items()} == {
        "post_block/00000001": [1.0, 2.0],
        "post_block/00000012": [3.0, 4.0],
    }
    assert all(row.dtype == np.float32 and row.flags.writeable for row in stored.numbers.values())


@pytest.mark.parametrize("payload", [REFT, RouterPayload(layers={"3": RouterLayer(mode="soft", expert_ids=[1])})])
def test_metadata_and_shapes_come_back(spool, payload):
    digest, _ = spool.put(payload)
    stored, expected = spool.load(digest), canonical(payload)
    assert (stored.kind, stored.metadata) == (expected.kind, expected.metadata)
    assert {path: value.tolist() for path, value in stored.numbers.items()} == {
        path: value.tolist() for path, value in expected.numbers.items()
    }


def test_the_folder_is_private(spool):
    assert spool._directory.stat().st_mode & 0o777 == 0o700


def test_putting_again_changes_nothing(spool):
    digest, _ = spool.put(PAYLOAD)
    before = spool._path(digest).stat()
    for again in (PAYLOAD, inline(post_block={12: [3.0, 4.0], 1: [1.0, 2.0]}), canonical(PAYLOAD)):
        for durable in (True, False):
            assert spool.put(again, durable=durable)[0] == digest
    after = spool._path(digest).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


def test_a_payload_that_is_refused_leaves_nothing(spool):
    with pytest.raises(SteeringError):
        spool.put(direction(post_block={1: [float("nan")]}))
    assert files(spool) == []


def test_a_missing_payload(spool):
    with pytest.raises(SpoolError, match="not in the spool"):
        spool.load("0" * 64)


@pytest.mark.parametrize("digest", ["", "../../etc/passwd", "0" * 63, "A" * 64, "0" * 64 + "\n"])
def test_only_digests_name_files(spool, digest):
    for use in (spool.load, spool.discard):
        with pytest.raises(SpoolError, match="64 lower-case"):
            use(digest)


def damage_number(content):
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize(
    "damage",
    [
        damage_number,
        lambda content: content[:-4],
        lambda content: content[:0],
        lambda content: b"\0" * len(content),
        lambda content: content.replace(b"direction", b"directiom"),
        lambda content: content.replace(b'"kind"', b'"kinD"'),
    ],
)
def test_damage_is_found_and_mended(spool, damage):
    digest, _ = spool.put(PAYLOAD)
    path = spool._path(digest)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(SpoolError, match="damaged") as caught:
        spool.load(digest)
    assert str(spool._directory) not in str(caught.value)
    spool.put(PAYLOAD)
    assert spool.load(digest).digest == digest


def test_another_payloads_file_is_not_believed(spool):
    digest, _ = spool.put(PAYLOAD)
    other, _ = spool.put(REFT)
    spool._path(other).replace(spool._path(digest))
    with pytest.raises(SpoolError, match="another digest"):
        spool.load(digest)


def test_a_write_that_fails_leaves_nothing(spool, monkeypatch):
    def fail(_):
        raise OSError("no space")

    monkeypatch.setattr(module.os, "fsync", fail)
    with pytest.raises(OSError, match="no space"):
        spool.put(PAYLOAD)
    assert files(spool) == []


def test_a_payload_is_synced_before_its_name_appears(spool, monkeypatch):
    events = []
    real_sync, real_replace = os.fsync, module.Path.replace
    monkeypatch.setattr(module.os, "fsync", lambda fd: (events.append("sync"), real_sync(fd))[1])
    monkeypatch.setattr(module.Path, "replace", lambda a, b: (events.append("rename"), real_replace(a, b))[1])
    spool.put(PAYLOAD)
    assert events[:2] == ["sync", "rename"]
    assert events.count("sync") == 3  # the content, the file under its name, the folder
    events.clear()
    spool.put(PAYLOAD, durable=False)
    spool.put(REFT, durable=False)
    assert events == ["rename"]
    events.clear()
    spool.put(REFT)
    assert events == ["sync", "sync"]  # there already, but never synced


def test_discarding(spool):
    digest, _ = spool.put(PAYLOAD)
    stored = spool.load(digest)
    spool.discard(digest)
    spool.discard(digest)
    assert files(spool) == []
    assert stored.numbers["post_block/00000001"].tolist() == [1.0, 2.0]


def test_readers_never_see_half_a_file(spool):
    digest = payload_digest(PAYLOAD)
    stop, seen = threading.Event(), []

    def read():
        while not stop.is_set():
            try:
                seen.append(spool.load(digest).digest)
            except SpoolError as error:
                if "not in the spool" not in str(error):
                    seen.append(str(error))

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(150):
        spool.put(PAYLOAD, durable=False)
        spool.discard(digest)
    stop.set()
    reader.join()
    assert set(seen) <= {digest}
