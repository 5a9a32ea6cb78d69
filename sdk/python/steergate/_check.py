"""The checks that need no server: the shape ring by encoding and decoding, then the packaged rules."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, NoReturn, TypeVar, cast

import msgspec

from ._capabilities import packaged
from ._generated.decode import decode, decode_conversation_id
from ._generated.errors import PathPart, Problem, SteeringError, format_path
from ._generated.models import SteeringGate, SteeringRequest, VectorSpec
from ._generated.rules import Capability, check, check_conversation
from .errors import InvalidSteering

__all__ = [
    "check_conversation_id",
    "checked",
    "checked_gate",
    "made",
    "raise_first",
    "refuse_vectors",
    "request_problems",
    "wire_bytes",
]

T = TypeVar("T")


def checked(value: T, kind: type[T], *path: PathPart) -> T:
    """Return a struct as the server would decode it: integers become floats where floats are due.

    Args:
        value: A struct, of which msgspec has checked nothing so far.
        kind: Its type.
        path: Where it stands, for `param`.

    Raises:
        InvalidSteering: With a code of the shape ring.
    """
    raw = wire_bytes(value)
    try:
        decoded: T = _decoder(cast(Any, kind)).decode(raw)
        return decoded
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        pass
    try:
        return decode(raw, kind, format_path(path))
    except SteeringError as error:
        raise _local(error) from None


@cache
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def made(kind: Callable[..., T], **members: Any) -> T:
    """Make a struct of the members that differ from its defaults.

    msgspec leaves out what *is* the default, not what equals it, and a float never is. A member that is left out is
    understood by servers that do not know it yet.
    """
    defaults = _defaults(kind)
    return kind(**{name: value for name, value in members.items() if not _same(value, defaults.get(name, _REQUIRED))})


_REQUIRED = object()


@cache
def _defaults(kind: Any) -> dict[str, Any]:
    return {field.name: field.default for field in msgspec.structs.fields(kind)}


def _same(value: Any, default: Any) -> bool:
    # Not 1 for True, which the wire tells apart; 1 for 1.0 it does not.
    same_type = type(value) is type(default) or (type(value) is int and type(default) is float)
    return same_type and bool(value == default)


def wire_bytes(value: Any) -> bytes:
    """Encode structs as JSON. What JSON cannot say (NaN, halves of surrogate pairs) is kept, for decoding to refuse."""
    try:
        raw = msgspec.json.encode(value, enc_hook=_plain)
    except UnicodeEncodeError:
        return _lenient(value)
    # msgspec writes NaN and infinity as null, and a null is a default in places.
    return _lenient(value) if b"null" in raw else raw


def _lenient(value: Any) -> bytes:
    return json.dumps(msgspec.to_builtins(value, enc_hook=_plain)).encode()


def _plain(value: Any) -> Any:
    """Turn the scalars and sequences of other libraries into Python's own: numpy's, torch's, ranges."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "__index__"):
        return int(value)
    if hasattr(value, "__float__"):
        return float(value)
    if isinstance(value, Iterable):
        return list(value)
    raise TypeError(f"a {type(value).__name__} has no place in a steering request")


def checked_gate(gate: SteeringGate) -> SteeringGate:
    """Check a gate by itself; `param` is the path inside the gate.

    Raises:
        InvalidSteering: With a code of the shape ring or of the rules.
    """
    gate = checked(gate, SteeringGate)
    problems = check(SteeringRequest(gates=[gate]), packaged().algorithms)
    raise_first((problem._replace(path=problem.path[2:]) for problem in problems), "")
    return gate


def request_problems(
    request: SteeringRequest,
    algorithms: Mapping[str, Capability] | None = None,
    conversation_id: str | msgspec.UnsetType | None = msgspec.UNSET,
) -> list[Problem]:
    """List what the rules find in a request that has passed the shape ring; paths start at the request.

    Args:
        request: The request.
        algorithms: What each algorithm takes; the packaged table if left out.
        conversation_id: The conversation it will be sent in. Left out: not decided yet.
    """
    problems = check(request, packaged().algorithms if algorithms is None else algorithms)
    if not isinstance(conversation_id, msgspec.UnsetType):
        problems += check_conversation(request, conversation_id)
    return problems


def raise_first(problems: Iterable[Problem], prefix: str, *, as_list: bool = False) -> None:
    """Raise the first problem, if there is one.

    Args:
        problems: Problems with paths from the request down.
        prefix: What stands in front of `param`: `steering`, or nothing.
        as_list: The gates are sent as a bare list, so that a path has no member `gates`.

    Raises:
        InvalidSteering: The first problem.
    """
    for code, message, path in problems:
        sent = path[1:] if as_list and path[:1] == ("gates",) else path
        raise InvalidSteering(code, message, format_path(sent, prefix) or None)


def check_conversation_id(conversation_id: Any) -> None:
    """Check a conversation's name.

    Raises:
        InvalidSteering: `invalid_type` or `invalid_name`, param `conversation_id`.
    """
    try:
        decode_conversation_id(wire_bytes(conversation_id))
    except SteeringError as error:
        raise _local(error) from None


def _local(error: SteeringError) -> InvalidSteering:
    return InvalidSteering(error.code, error.message, error.param)


def refuse_vectors(vectors: list[VectorSpec]) -> NoReturn:
    """Refuse more vectors than a request takes, in the server's words.

    Raises:
        InvalidSteering: `too_many_vectors`.
    """
    checked(SteeringRequest(vectors=vectors), SteeringRequest)
    raise AssertionError("the packaged limit of vectors is not the one of the models")
