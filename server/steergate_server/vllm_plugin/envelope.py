"""What of a request's body is ours: found, taken out, and everything that looks like it refused.

vLLM ignores body members that it does not know. A misspelt `steering` would therefore run unsteered, so whatever comes
close to our two members is refused, and so is our reserved key wherever clients can reach vLLM's own carriers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from difflib import SequenceMatcher
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from steergate_server.schema.errors import PathPart, SteeringError, format_path
from steergate_server.vllm_plugin.carrier import PLAN_KEY

MEMBERS = ("steering", "conversation_id")

_CARRIERS = ("vllm_xargs", "extra_args", "kv_transfer_params", "sampling_params", "ec_transfer_params")
"""vLLM's members through which a client could reach the engine's arguments."""

_MISPLACED = ("gate", "gates", "vectors", "inherit_default")
"""Members of a steering request that vLLM does not have: at the top level they would be ignored."""

_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Envelope(NamedTuple):
    """A body, split: our two members as raw JSON (None if absent), the other members, and the body without ours."""

    steering: bytes | None
    conversation_id: bytes | None
    rest: dict[str, msgspec.Raw]
    body: bytes


def open_envelope(body: bytes) -> Envelope | None:
    """Split a body. None where it is no JSON object: vLLM's own answer is best then.

    Raises SteeringError for look-alikes, for members given twice, and for our reserved key.
    """
    members = _read(body)
    if members is None:
        return None
    _refuse_look_alikes(members)
    _refuse_reserved(members)
    steering, conversation = members.pop("steering", None), members.pop("conversation_id", None)
    if steering is None and conversation is None:
        return Envelope(None, None, members, body)
    return Envelope(
        None if steering is None else bytes(steering),
        None if conversation is None else bytes(conversation),
        members,
        msgspec.json.encode(members),
    )


def _read(body: bytes) -> dict[str, msgspec.Raw] | None:
    """The members of a body as vLLM will see them: it reads with Python's lenient reader."""
    try:
        members = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return _read_leniently(body)
    names = [f'"{member}"'.encode() for member in MEMBERS]
    if any(body.count(name) > 1 for name in names) or b"\\u" in body:
        _refuse_twice(body)
    return members


def _read_leniently(body: bytes) -> dict[str, msgspec.Raw] | None:
    """NaN, lone surrogates, UTF-16: no strict JSON, but Python reads it and so does vLLM."""
    try:
        pairs = json.loads(body, object_pairs_hook=_Pairs)
        if not isinstance(pairs, _Pairs):
            return None
        _refuse_twice(body)
        return {name: msgspec.Raw(json.dumps(_plain(value)).encode()) for name, value in pairs}
    except (ValueError, RecursionError):
        if any(member.encode() in body for member in MEMBERS):
            raise SteeringError("invalid_json", "The body is not valid JSON.") from None
        return None


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as its pairs, so that members given twice can be seen."""


def _plain(value: Any) -> Any:
    if isinstance(value, _Pairs):
        return {name: _plain(inner) for name, inner in value}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _refuse_twice(body: bytes) -> None:
    names = [name for name, _ in json.loads(body, object_pairs_hook=_Pairs)]
    for member in MEMBERS:
        if names.count(member) > 1:
            raise SteeringError("invalid_json", f"`{member}` is given twice. Send it once.", member)


def _refuse_look_alikes(members: dict[str, msgspec.Raw]) -> None:
    for name, raw in members.items():
        if name == "extra_body" and b"steering" in bytes(raw):
            raise SteeringError(
                "unknown_field",
                "`extra_body` is an argument of the Python client. In raw JSON its content stands at the top level.",
                name,
            )
        nearest = _nearest_member(name)
        if nearest is not None:
            raise SteeringError("unknown_field", f"There is no member `{name}`. {nearest}", name)


@lru_cache(maxsize=1024)
def _nearest_member(name: str) -> str | None:
    """Advice for a member that looks like one of ours but is not, or None."""
    if name in MEMBERS or name == "conversation":
        return None
    if name in _MISPLACED:
        return "It belongs inside of `steering`."
    plain = "".join(letter for letter in name.lower() if letter.isalnum())
    if "report" in plain and "steer" in plain:
        return "Ask for a report with `report` inside of `steering`."
    if "vector" in plain and "steer" in plain:
        return "Static vectors are `vectors` inside of `steering`."
    for member in MEMBERS:
        close = SequenceMatcher(None, plain, member.replace("_", "")).ratio() >= 0.85
        if close or (member == "steering" and "steer" in plain):
            return f"Did you mean `{member}`?"
    return None


def _refuse_reserved(members: dict[str, msgspec.Raw]) -> None:
    for carrier in _CARRIERS:
        raw = bytes(members.get(carrier, b"null"))
        if raw.startswith(b"{") and any(member in json.loads(raw) for member in MEMBERS):
            raise SteeringError(
                "unknown_field",
                f"`steering` and `conversation_id` are members of the body, not of `{carrier}`.",
                carrier,
            )
        if PLAN_KEY.encode() not in raw and b"\\u" not in raw:
            continue  # a look at the bytes spares the parse
        for path in _paths_of_key(json.loads(raw)):
            raise SteeringError(
                "reserved_field",
                f"The key `{PLAN_KEY}` is the server's own. Send steering in the member `steering`.",
                format_path(path, carrier),
            )


def _paths_of_key(tree: Any) -> Iterator[tuple[PathPart, ...]]:
    """Where our key stands in a value; not recursive, since the depth is the client's."""
    pending: list[tuple[tuple[PathPart, ...], Any]] = [((), tree)]
    while pending:
        path, value = pending.pop()
        if isinstance(value, dict):
            if PLAN_KEY in value:
                yield (*path, PLAN_KEY)
            pending += [((*path, name), inner) for name, inner in value.items()]
        elif isinstance(value, list):
            pending += [((*path, index), inner) for index, inner in enumerate(value)]
