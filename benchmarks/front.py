"""What a steered request costs before it reaches the engine: admission on the server, building in the SDK."""

from __future__ import annotations

import base64
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.calls import Timing, timed
from benchmarks.clock import Now
from benchmarks.scenarios import packed

LAYERS, WIDTH = 32, 8192
"""A large model, of which admission knows the shape alone; a vector of all layers in float32 is 1 MiB."""

GATES = 8
NAMED_AIM = 200e-6
SDK_AIM = 30e-6


def admission(now: Now, rounds: int) -> list[Timing]:
    """Cost of a request in the front: of each stage, and of the whole way from the body to the engine's plan."""
    from steergate_server.runtime.plan import encode_plan
    from steergate_server.schema.decode import decode_steering
    from steergate_server.vllm_plugin.envelope import open_envelope

    random = np.random.default_rng(3)
    prompt = random.integers(0, 32_000, 200).tolist()
    with tempfile.TemporaryDirectory(prefix="steergate-bench-") as folder:
        admit = _admission(Path(folder), random)

        def whole(body: bytes) -> Callable[[], object]:
            def way() -> bytes:
                envelope = open_envelope(body)
                assert envelope is not None
                assert envelope.steering is not None
                request = decode_steering(envelope.steering)
                assert request
                admitted = admit.admit(request)
                admit.admit_prompt(admitted, prompt, 4096)
                plan = encode_plan(admitted.plan)
                admit.release(admitted.digests)
                return plan

            return way

        def admit_only(body: bytes) -> Callable[[], object]:
            request = decode_steering(msgspec.json.encode(json.loads(body)["steering"]))
            assert request

            def way() -> None:
                admit.release(admit.admit(request).digests)

            return way

        inline = packed(random, range(LAYERS), WIDTH)
        data = inline["post_block"]["data"]
        bodies = {name: _body(steering) for name, steering in _requests(inline).items()}
        small = [name for name in bodies if "MiB" not in name]
        cases: dict[str, Callable[[], object]] = {
            f"{name}: Admission.admit": admit_only(bodies[name]) for name in small
        }
        cases |= {f"{name}: from body to plan": whole(body) for name, body in bodies.items()}
        cases["base64 alone, 1 MiB"] = lambda: base64.b64decode(data, validate=True)
        aims = {name: NAMED_AIM for name in cases if name.startswith(("named vector", "1 named gate"))}
        return timed(cases, aims, now, rounds=rounds)


def _admission(folder: Path, random: np.random.Generator) -> Any:
    from steergate_server.registry.names import NameIndex
    from steergate_server.registry.spool import Spool
    from steergate_server.runtime.admission import Admission
    from steergate_server.runtime.capacity import Capacity
    from steergate_server.runtime.config import EngineConfig
    from steergate_server.runtime.sites import Site
    from steergate_server.runtime.sources import ModelFacts
    from steergate_server.schema.payloads import DirectionPayload
    from steergate_server.schema.words import VectorKind

    names = NameIndex(Spool(folder))
    for number in range(GATES):
        vectors: dict[VectorKind, dict[str, Any]] = {
            "steer": packed(random, range(LAYERS), WIDTH),
            "probe": packed(random, [number], WIDTH),
        }
        for kind, rows in vectors.items():
            payload = msgspec.convert({"kind": "direction", "packed": rows}, DirectionPayload)
            names.register(f"{kind}-{number}", kind, payload)
    sites = tuple(Site(layer, "post_block", WIDTH) for layer in range(LAYERS))
    facts = ModelFacts("large", LAYERS, WIDTH, sites, Capacity(1024, {"hidden_states": 1 << 20}))
    return Admission(EngineConfig(max_gates=GATES), facts, names)


def _requests(inline: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Steering requests by what they are."""
    where = {"answer": "all"}
    gates = [
        {
            "when": {"kind": "probe", "probe": {"kind": "name", "name": f"probe-{number}"}, "threshold": 1.5},
            "scope": "next_step",
            "apply": {"kind": "add", "steer": {"kind": "name", "name": f"steer-{number}"}},
        }
        for number in range(GATES)
    ]
    return {
        "named vector": {"vectors": [{"steer": {"kind": "name", "name": "steer-0"}, "where": where}]},
        "1 named gate": {"gates": gates[:1]},
        f"{GATES} named gates": {"gates": gates},
        "1 MiB inline": {"vectors": [{"steer": {"kind": "inline", "packed": inline}, "where": where}]},
    }


def _body(steering: dict[str, Any]) -> bytes:
    """A chat request that carries it."""
    message = {"role": "user", "content": "Tell me about the restaurant Red Willow. " * 20}
    return json.dumps({"model": "large", "messages": [message], "max_tokens": 64, "steering": steering}).encode()


def sdk(now: Now, rounds: int) -> list[Timing]:
    """Cost of building, checking and encoding one gate in the SDK."""
    from steergate import Steering, When
    from steergate.body import prepare, steering_body

    def gate() -> Any:
        return When.probe("refusal", layer=14, threshold=3.1).scope("this_token").add("calm", 2.0)

    cases: dict[str, Callable[[], object]] = {
        "SDK, one gate: build": gate,
        "SDK, one gate: build, validate, encode": lambda: prepare(gate()),
        "SDK, plan of one gate: build, validate, encode": lambda: prepare(Steering().gate(gate())),
        "SDK, one gate: build, steering_body": lambda: steering_body(gate()),
    }
    return timed(cases, {"SDK, one gate: build, validate, encode": SDK_AIM}, now, rounds=rounds)
