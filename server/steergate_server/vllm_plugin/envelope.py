"""What of a generate request's body is ours: found, taken out, and everything that looks like it refused.

vLLM ignores body members that it does not know. A misspelt `steering` would therefore run unsteered, so whatever comes
close to our two members is refused, and so is our reserved key wherever clients can reach vLLM's own carriers.
"""

from __future__ import annotations

import json
from difflib import SequenceMatcher
from typing import NamedTuple

import msgspec

from steergate_server.schema.errors import SteeringError
from steergate_server.vllm_plugin.carrier import PLAN_KEY

MEMBERS = ("steering", "conversation_id")

_CARRIERS = ("vllm_xargs", "extra_args", "kv_transfer_params", "sampling_params", "ec_transfer_params")
"""vLLM's members through which a client could reach the engine's arguments."""

_decoder = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Envelope(NamedTuple):
    """A body, split: our two members as raw JSON (None if absent), and the body without them."""

    steering: bytes | None
    conversation_id: bytes | None
    rest: dict[str, msgspec.Raw]
    body: bytes


def open_envelope(body: bytes) -> Envelope | None:
    """Split a body. None where it is no JSON object and nothing in it is ours: vLLM's own answer is best then.

    Raises SteeringError for look-alikes, for our reserved key, and for a body that names our members but is no JSON.
    """
    try:
        members = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError):
        return _unreadable(body)
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


def _unreadable(body: bytes) -> Envelope | None:
    """Python's reader takes bodies that are no strict JSON (NaN, lone surrogates), and vLLM reads with it."""
    try:
        tree = json.loads(body)
    except (ValueError, RecursionError):
        tree = None
    if isinstance(tree, dict):
        if not any(member in tree for member in MEMBERS) and PLAN_KEY.encode() not in body and b"steer" not in body:
            return None
        steering = tree.pop("steering", None)
        raw = None if steering is None else json.dumps(steering).encode()
        return Envelope(raw, json.dumps(tree.pop("conversation_id", None)).encode(), {}, json.dumps(tree).encode())
    if any(member.encode() in body for member in MEMBERS):
        raise SteeringError("invalid_json", "the request body is not valid JSON", None)
    return None


def _refuse_look_alikes(members: dict[str, msgspec.Raw]) -> None:
    for name in members:
        if name in MEMBERS or name == "conversation":
            continue
        plain = "".join(letter for letter in name.lower() if letter.isalnum())
        for member in MEMBERS:
            target = member.replace("_", "")
            if "steer" in plain or SequenceMatcher(None, plain, target).ratio() >= 0.85:
                nearest = "steering" if "steer" in plain else member
                raise SteeringError("unknown_field", f"unknown member {name!r}; did you mean {nearest!r}?", name)


def _refuse_reserved(members: dict[str, msgspec.Raw]) -> None:
    for carrier in _CARRIERS:
        raw = members.get(carrier)
        if raw is not None and _holds_key(bytes(raw)):
            raise SteeringError(
                "reserved_field",
                f"the key {PLAN_KEY!r} is reserved for the server; use the member 'steering'",
                f"{carrier}.{PLAN_KEY}",
            )


def _holds_key(raw: bytes) -> bool:
    """Whether our key stands anywhere in a raw value; a first look at the bytes spares the parse."""
    if PLAN_KEY.encode() not in raw and b"\\u" not in raw:
        return False
    pending = [msgspec.json.decode(raw)]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if PLAN_KEY in value:
                return True
            pending += value.values()
        elif isinstance(value, list):
            pending += value
    return False
