"""Reading the wire: JSON to structs, or a refusal with a precise code and param."""

from functools import lru_cache
from typing import Any, Literal, TypeVar

import msgspec

from .errors import SteeringError
from .explain import duplicate_member, explain
from .requests import SteeringGate, SteeringRequest
from .words import ConversationId

__all__ = ["decode", "decode_conversation_id", "decode_steering", "encode"]

T = TypeVar("T")

_NO_STEERING = SteeringRequest()


@lru_cache(maxsize=64)
def _decoder(expected: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(expected)


def decode(raw: bytes, type: type[T], prefix: str = "") -> T:  # noqa: A002 (as in msgspec)
    """Decode a JSON document as `type`.

    Args:
        raw: The document, UTF-8.
        type: A wire struct, or a list of one.
        prefix: Path of the document in the request as sent: `steering`. Empty for a route's own body.

    Raises:
        SteeringError: With a code of the shape ring, and `param` naming the very member.
    """
    value: T = _decode(raw, type, prefix)
    return value


def _decode(raw: bytes, expected: Any, prefix: str) -> Any:
    try:
        value = _decoder(expected).decode(raw)
    except (msgspec.DecodeError, RecursionError, UnicodeError) as failure:
        raise explain(raw, expected, failure, prefix) from None
    duplicate = duplicate_member(raw, prefix)
    if duplicate is not None:
        raise duplicate
    return value


def decode_steering(raw: bytes, prefix: str = "steering") -> SteeringRequest | Literal[False] | None:
    """Decode the member `steering` of a generate request.

    Returns:
        None for null, `[]`, `{}` and whatever equals them: no client steering, the server default is inherited.
        False for `false`: no steering at all. Otherwise the request; a list of gates is wrapped in one.

    Raises:
        SteeringError: With a code of the shape ring. `param` is the path as sent: `steering[0].when.threshold` where
            a list was sent, `steering.gates[0].when.threshold` where an object was.
    """
    text = raw.strip(b" \t\r\n")
    if text == b"null":
        return None
    if text == b"false":
        return False
    if text == b"true":
        message = "`true` says nothing about what to steer. Send a steering request, a list of gates, or `false`."
        raise SteeringError("invalid_type", message, prefix or None)
    if text[:1] == b"[":
        gates: list[SteeringGate] = _decode(raw, list[SteeringGate], prefix)
        return SteeringRequest(gates=gates) if gates else None
    request: SteeringRequest = _decode(raw, SteeringRequest, prefix)
    return None if request == _NO_STEERING else request


def decode_conversation_id(raw: bytes, prefix: str = "conversation_id") -> str | None:
    """Decode the member `conversation_id` of a generate request; null is the same as leaving it out.

    Raises:
        SteeringError: `invalid_type`, `invalid_name` or `invalid_json`.
    """
    value: str | None = _decode(raw, ConversationId | None, prefix)
    return value


def encode(value: Any) -> bytes:
    """Encode a wire struct, or a list of them, as compact JSON; members that have their default are left out."""
    return msgspec.json.encode(value)
