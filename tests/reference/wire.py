"""Short spellings of wire objects, for tests."""

from __future__ import annotations

from typing import Any

Json = dict[str, Any]
EVERYWHERE = {"prompt": "all", "generation": "all"}
ALWAYS = {"kind": "always"}
ALWAYS_IN_ANSWER = {"kind": "always", "at": "answer"}
OBSERVE = {"kind": "observe"}


def inline(packed: Json) -> Json:
    return {"kind": "inline", "packed": packed}


def static(packed: Json, where: Json | None = None, **more: Any) -> Json:
    return {"steer": inline(packed), "where": EVERYWHERE if where is None else where, **more}


def gate(when: Json, scope: str, apply: Json) -> Json:
    return {"when": when, "scope": scope, "apply": apply}


def probe(packed: Json, threshold: float, **more: Any) -> Json:
    return {"kind": "probe", "probe": inline(packed), "threshold": threshold, **more}


def add(packed: Json, strength: float = 1.0) -> Json:
    return {"kind": "add", "steer": inline(packed), "strength": strength}
