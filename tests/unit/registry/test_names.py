"""Names: labels over digests, and payloads that live exactly as long as somebody needs them."""

import datetime
import threading

import pytest

from steergate_server.registry.names import NameIndex
from steergate_server.registry.numbers import canonical, payload_digest
from steergate_server.registry.spool import Spool, SpoolError
from steergate_server.schema.errors import SteeringError
from steergate_server.schema.payloads import ConceptPairPayload, LowRankPayload, RouterLayer, RouterPayload
from unit.registry.payloads import direction, inline, tensor

CALM = direction(post_block={1: [1.0, 2.0], 3: [3.0, 4.0]})
ANGRY = direction(post_block={1: [-1.0, -2.0]})
ROUTER = RouterPayload(layers={"3": RouterLayer(mode="soft", expert_ids=[1])})


@pytest.fixture
def spool(tmp_path):
    return Spool(tmp_path)


@pytest.fixture
def names(spool):
    return NameIndex(spool)


def stored(spool):
    return {path.stem for path in spool._directory.iterdir()}


def refused(action, *args, **kwargs):
    with pytest.raises(SteeringError) as caught:
        action(*args, **kwargs)
    return caught.value.code, caught.value.param, caught.value.status


def test_registering(names, spool):
    answer = names.register("calm", "steer", CALM, metadata={"by": "me"})
    digest = payload_digest(CALM)
    assert (answer.status, answer.name, answer.kind, answer.digest) == ("created", "calm", "steer", digest)
    assert stored(spool) == {digest}
    info = names.get("calm", "steer")
    assert (info.digest, info.hooks, info.layers, info.width, info.bytes) == (digest, ["post_block"], [1, 3], 2, 16)
    assert info.metadata == {"by": "me"}
    assert datetime.datetime.fromisoformat(info.created).utcoffset() == datetime.timedelta(0)
    entry = names.find("calm", "steer")
    assert (entry.digest, entry.payload_kind) == (digest, "direction")
    assert entry.outline.widths == {("post_block", 1): 2, ("post_block", 3): 2}
    assert names.find("calm", "probe") is None


def test_the_same_content_again_is_unchanged(names):
    names.register("calm", "steer", CALM, metadata={"version": 1})
    assert names.register("calm", "steer", inline(post_block={3: [3.0, 4.0], 1: [1.0, 2.0]})).status == "unchanged"
    assert names.get("calm", "steer").metadata == {"version": 1}
    assert names.register("calm", "steer", CALM, metadata={"version": 2}, replace=True).status == "unchanged"
    assert names.get("calm", "steer").metadata == {"version": 2}


def test_other_content_needs_leave_to_replace(names, spool):
    names.register("calm", "steer", CALM)
    assert refused(names.register, "calm", "steer", ANGRY) == ("name_conflict", "name", 409)
    assert stored(spool) == {payload_digest(CALM)}
    assert names.register("calm", "steer", ANGRY, replace=True).status == "replaced"
    assert names.get("calm", "steer").layers == [1]
    assert stored(spool) == {payload_digest(ANGRY)}


def test_probe_and_steer_are_separate_namespaces(names):
    one = direction(post_block={1: [1.0, 2.0]})
    names.register("calm", "steer", CALM)
    assert names.register("calm", "probe", one).status == "created"
    assert [(info.name, info.kind) for info in names.list()] == [("calm", "probe"), ("calm", "steer")]
    names.unregister("calm", "probe")
    with pytest.raises(SteeringError, match="There is a steer vector of that name") as caught:
        names.get("calm", "probe")
    assert (caught.value.code, caught.value.status) == ("unknown_vector", 404)


def test_unregistering(names, spool):
    assert refused(names.unregister, "calm", "steer") == ("unknown_vector", "name", 404)
    names.register("calm", "steer", CALM)
    answer = names.unregister("calm", "steer")
    assert (answer.status, answer.name, answer.kind) == ("unregistered", "calm", "steer")
    assert stored(spool) == set()
    assert refused(names.unregister, "calm", "steer") == ("unknown_vector", "name", 404)


def test_listing(names):
    for name in ("b", "a"):
        names.register(name, "steer", CALM)
    names.register("a", "probe", ANGRY)
    told = lambda **filters: [(info.name, info.kind) for info in names.list(**filters)]  # noqa: E731
    assert told() == [("a", "probe"), ("a", "steer"), ("b", "steer")]
    assert told(kind="steer") == [("a", "steer"), ("b", "steer")]
    assert told(name="a") == [("a", "probe"), ("a", "steer")]
    assert told(kind="probe", name="b") == []
    assert refused(names.list, kind="x") == ("unknown_kind", "kind", 400)


PAIR = ConceptPairPayload(h1=ANGRY.packed, h2=ANGRY.packed)


@pytest.mark.parametrize(
    ("payload", "prefix", "code", "param"),
    [
        (CALM, "", "probe_not_single_site", "packed"),
        (direction(post_block={1: [1.0]}, mlp_in={1: [1.0]}), "payload", "probe_not_single_site", "payload.packed"),
        (direction(post_block={1: [0.0, -0.0]}), "", "zero_vector", "packed.post_block.data"),
        (direction(mlp_in={1: [0.0]}), "payload", "zero_vector", "payload.packed.mlp_in.data"),
        (PAIR, "payload", "payload_kind", "payload.kind"),
        (ROUTER, "payload", "payload_kind", "payload.kind"),
        (direction(post_block={1: [float("inf")]}), "", "not_finite", "packed.post_block.data"),
    ],
)
def test_probes_are_one_direction_that_is_not_zero(names, spool, payload, prefix, code, param):
    assert refused(names.register, "p", "probe", payload, prefix=prefix) == (code, param, 400)
    assert stored(spool) == set()
    assert names.list() == []


def test_any_payload_can_steer(names):
    low = LowRankPayload(projector1=tensor((3, 1), [1, 2, 3]), projector2=tensor((3, 1), [4, 5, 6]))
    told = {}
    for name, payload in (("low", low), ("router", ROUTER), ("pair", PAIR)):
        names.register(name, "steer", payload)
        info = names.get(name, "steer")
        told[name] = (info.hooks, info.layers, info.width, info.bytes)
    assert told == {
        "low": ([], [], 3, 24),
        "router": (["router_logits"], [3], None, 0),
        "pair": (["post_block"], [1], 2, 16),
    }
    names.register("two", "steer", direction(post_block={1: [1.0]}, attn_heads={1: [1.0, 2.0]}))
    assert names.get("two", "steer").width is None
    assert names.get("two", "steer").hooks == ["attn_heads", "post_block"]


@pytest.mark.parametrize("name", ["", "-a", "a b", "a\n", "é", "x" * 129, "a/b"])
def test_bad_names(names, name):
    assert refused(names.register, name, "steer", CALM) == ("invalid_name", "name", 400)


@pytest.mark.parametrize("metadata", [{"x": object()}, {"x": "y" * 20_000}, {"x": {1, 2}}, {"\ud800": 1}])
def test_bad_metadata(names, metadata):
    if metadata == {"x": {1, 2}}:
        names.register("a", "steer", CALM, metadata=metadata)  # a set is a JSON list
        assert names.get("a", "steer").metadata == {"x": [1, 2]}
        return
    assert refused(names.register, "a", "steer", CALM, metadata=metadata) == ("invalid_metadata", "metadata", 400)


def test_metadata_is_a_copy(names):
    notes = {"tags": ["a"]}
    names.register("a", "steer", CALM, metadata=notes)
    notes["tags"].append("b")
    assert names.get("a", "steer").metadata == {"tags": ["a"]}


def test_a_full_registry(spool):
    few = NameIndex(spool, max_names=1)
    few.register("a", "steer", CALM)
    assert refused(few.register, "b", "steer", CALM) == ("registry_full", None, 409)
    assert few.register("a", "steer", ANGRY, replace=True).status == "replaced"
    assert stored(spool) == {payload_digest(ANGRY)}


def test_bytes_count_once_per_payload(spool):
    small = NameIndex(spool, max_bytes=20)
    small.register("a", "steer", CALM)  # 16 bytes
    small.register("b", "steer", CALM)
    assert refused(small.register, "c", "steer", ANGRY) == ("registry_full", None, 409)
    assert refused(small.register, "a", "steer", ANGRY, replace=True) == ("registry_full", None, 409)
    small.unregister("b", "steer")
    assert small.register("a", "steer", ANGRY, replace=True).status == "replaced"
    assert stored(spool) == {payload_digest(ANGRY)}


# Lifetime


def test_a_payload_lives_as_long_as_any_name(names, spool):
    names.register("a", "steer", CALM)
    names.register("b", "steer", CALM)
    names.unregister("a", "steer")
    assert stored(spool) == {payload_digest(CALM)}
    names.unregister("b", "steer")
    assert stored(spool) == set()


def test_a_payload_lives_as_long_as_any_request(names, spool):
    names.register("a", "steer", CALM)
    digest = names.find("a", "steer").digest
    names.hold(digest)
    names.hold(digest)
    names.register("a", "steer", ANGRY, replace=True)
    names.release(digest)
    assert stored(spool) == {digest, payload_digest(ANGRY)}
    assert spool.load(digest).digest == digest
    names.release(digest)
    assert stored(spool) == {payload_digest(ANGRY)}


def test_a_requests_own_payload(names, spool):
    digest = names.hold_payload(canonical(CALM))
    assert (
        names.hold_payload(canonical(inline(post_block={3: [3.0, 4.0], 1: [1.0, 2.0]})))
        == digest
        == payload_digest(CALM)
    )
    names.register("a", "steer", CALM)
    names.unregister("a", "steer")
    names.release(digest)
    assert stored(spool) == {digest}
    names.release(digest)
    assert stored(spool) == set()
    assert names.list() == []


def test_a_payload_that_is_gone_cannot_be_held(names):
    names.register("a", "steer", CALM)
    digest = names.find("a", "steer").digest
    names.unregister("a", "steer")
    assert refused(names.hold, digest)[0] == "unknown_vector"


def test_releasing_too_often_is_a_bug(names):
    digest = names.hold_payload(canonical(CALM))
    names.release(digest)
    with pytest.raises(ValueError, match="more often"):
        names.release(digest)


def test_a_disk_that_fails_changes_nothing(names, spool, monkeypatch):
    names.register("a", "steer", CALM)

    def fail(*_, **__):
        raise OSError("no space")

    with monkeypatch.context() as patched:
        patched.setattr(spool, "put", fail)
        for action in (
            lambda: names.register("a", "steer", ANGRY, replace=True),
            lambda: names.register("b", "steer", ANGRY),
            lambda: names.hold_payload(canonical(ANGRY)),
        ):
            with pytest.raises(OSError, match="no space"):
                action()
    assert names.get("a", "steer").digest == payload_digest(CALM)
    assert [info.name for info in names.list()] == ["a"]
    assert stored(spool) == {payload_digest(CALM)}
    assert refused(names.hold, payload_digest(ANGRY))[0] == "unknown_vector"


def test_threads_never_lose_a_payload(names, spool):
    payloads = [direction(post_block={1: [float(number + 1)]}) for number in range(3)]
    failures = []

    def work(seed):
        try:
            for turn in range(60):
                payload = payloads[(seed + turn) % 3]
                digest = names.hold_payload(canonical(payload))
                assert spool.load(digest).digest == digest
                names.register("shared", "steer", payload, replace=True)
                assert spool.load(digest).digest == digest
                names.release(digest)
        except (AssertionError, SpoolError, SteeringError, ValueError) as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert stored(spool) == {names.get("shared", "steer").digest}
    names.unregister("shared", "steer")
    assert stored(spool) == set()
