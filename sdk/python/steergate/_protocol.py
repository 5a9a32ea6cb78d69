"""The protocol as pure functions: from a call to a request's bytes, from an answer's bytes to a value or an error.

Nothing here does I/O; clients, whatever their kind, are a send loop over it.
"""

from __future__ import annotations

import email.utils
import json
import platform
import random
from collections.abc import Mapping
from functools import cache
from importlib.metadata import version
from time import time
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import msgspec

from ._check import check_conversation_id, checked, raise_first
from ._generated.answers import SteeringReport
from ._generated.models import DirectionPayload, InlinePayload, InlineVec
from ._generated.rules_payload import check_payload
from ._generated.version import CONTRACT_VERSION
from ._messages import Answer, Call, Keys, Reply
from ._sources import AnyPayload
from .body import APPLIED_HEADER, Plan, assert_applied, default_request, header, prepare
from .builders import Steering
from .errors import (
    APIStatusError,
    AuthenticationError,
    BadRequestError,
    ConflictError,
    ContractMismatchError,
    InternalServerError,
    InvalidAnswerError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitError,
    UnprocessableEntityError,
)
from .vectors import VectorSet

__all__ = [
    "CONTRACT_HEADER",
    "base_url",
    "chat_call",
    "check_contract",
    "clear_default_call",
    "completion_call",
    "forget_call",
    "get_call",
    "headers_for",
    "parse",
    "parse_default",
    "parse_reply",
    "put_default_call",
    "raise_for_status",
    "register_call",
    "restore_default_call",
    "retry_delay",
    "status_call",
    "unregister_call",
    "validate_call",
    "vector_call",
    "vectors_call",
    "without_secrets",
]

T = TypeVar("T")

CONTRACT_HEADER = "X-Steering-Contract"
OVERRIDDEN_HEADER = "X-Steering-Overridden"

_RETRIED = (408, 409, 429)
_LONGEST_WAIT = 120.0

_STATUS_ERRORS: dict[int, type[APIStatusError]] = {
    400: BadRequestError,
    401: AuthenticationError,
    403: PermissionDeniedError,
    404: NotFoundError,
    409: ConflictError,
    422: UnprocessableEntityError,
    429: RateLimitError,
}

_NOT_BODY = ("extra_body", "extra_headers", "extra_query", "timeout")
"""Arguments of the official client that are no members of a body: sent as such they would be ignored in silence."""


# From a call to a request


def base_url(url: str) -> str:
    """Return the server's root; an address that ends in `/v1` is taken as well.

    Raises:
        ValueError: It is no http or https address.
    """
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"{url!r} is no address of a server. Write it like `http://localhost:8000`.")
    return url.rstrip("/").removesuffix("/v1")


def without_secrets(url: str) -> str:
    """Return an address as it may be shown: without a user and password."""
    scheme, _, rest = url.partition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def headers_for(call: Call, keys: Keys) -> dict[str, str]:
    """Return the headers of a request. The steering key goes only where it is needed."""
    headers = {"Accept": "application/json", "User-Agent": _user_agent(), CONTRACT_HEADER: CONTRACT_VERSION}
    if call.body is not None:
        headers["Content-Type"] = "application/json"
    if keys.api_key is not None:
        headers["Authorization"] = f"Bearer {keys.api_key}"
    if call.mutation and keys.steering_api_key is not None:
        headers["X-Steering-API-Key"] = keys.steering_api_key
    return headers


@cache
def _user_agent() -> str:
    return f"steergate/{version('steergate')} python/{platform.python_version()}"


def chat_call(members: Mapping[str, Any], plan: Plan, conversation_id: str | None) -> Call:
    """Build a call of the chat route."""
    return _generate("/v1/chat/completions", members, plan, conversation_id)


def completion_call(members: Mapping[str, Any], plan: Plan, conversation_id: str | None) -> Call:
    """Build a call of the completions route."""
    return _generate("/v1/completions", members, plan, conversation_id)


def _generate(path: str, members: Mapping[str, Any], plan: Plan, conversation_id: str | None) -> Call:
    if members.get("stream"):
        raise NotImplementedError("streaming is not built yet; leave `stream` out and take the whole reply")
    for name in _NOT_BODY:
        if name in members:
            raise TypeError(f"`{name}` is no member of a request body; give its members as arguments of their own")
    prepared = prepare(plan, conversation_id)
    body = json.dumps(dict(members), allow_nan=False).encode()
    ours = {"steering": prepared.steering, "conversation_id": conversation_id and json.dumps(conversation_id).encode()}
    for name, value in ours.items():
        if value is not None:
            body = body[:-1] + b',"%s":%s}' % (name.encode(), value)
    return Call("POST", path, body, steered=prepared.steered)


def get_call(path: str) -> Call:
    """Build a call that only reads."""
    return Call("GET", f"/v1/steering/{path}")


def vectors_call(kind: str | None, name: str | None) -> Call:
    """Build a call of the list route."""
    query = {key: value for key, value in (("kind", kind), ("name", name)) if value is not None}
    return get_call("vectors" + (f"?{urlencode(query)}" if query else ""))


def vector_call(kind: str, name: str) -> Call:
    """Build a call of the route of one vector."""
    return get_call(f"vectors/{quote(kind, safe='')}/{quote(name, safe='')}")


def register_call(
    name: str,
    source: VectorSet | AnyPayload | InlineVec | InlinePayload,
    kind: str,
    metadata: Mapping[str, Any] | None,
    replace: bool,
) -> Call:
    """Build a call of the register route.

    Raises:
        InvalidSteering: The numbers are not in order; `param` starts at `packed` or `payload`.
        TypeError: The source is nothing that can be registered.
    """
    if isinstance(source, VectorSet):
        source = InlineVec(packed=source.packed())
    payload = source.payload if isinstance(source, InlinePayload) else source
    if isinstance(payload, InlineVec):
        payload = DirectionPayload(packed=payload.packed)
    if not isinstance(payload, AnyPayload):
        raise TypeError(f"a {type(source).__name__} cannot be registered; give a VectorSet or a payload")
    short = isinstance(payload, DirectionPayload)
    payload = checked(payload, type(payload))
    raise_first(check_payload(payload), "" if short else "payload")
    numbers = {"packed": payload.packed} if isinstance(payload, DirectionPayload) else {"payload": payload}
    notes = json.dumps(dict(metadata or {}), allow_nan=False).encode()
    body = {"name": name, "kind": kind, **numbers, "metadata": msgspec.Raw(notes), "replace": replace}
    return Call("POST", "/v1/steering/vectors/register", msgspec.json.encode(body), mutation=True)


def unregister_call(name: str, kind: str) -> Call:
    """Build a call of the unregister route."""
    body = msgspec.json.encode({"name": name, "kind": kind})
    return Call("POST", "/v1/steering/vectors/unregister", body, mutation=True)


def put_default_call(plan: Plan, client_gates: str, locked: bool) -> Call:
    """Build a call that puts a server default in force.

    Raises:
        InvalidSteering: The plan breaks a rule.
        TypeError: It is nothing that could be a default.
    """
    request = None if plan is None or plan is False else default_request(plan)
    if request is None:
        raise TypeError("a default steers; give a Steering, a gate or a list of gates, or use `client.default.clear()`")
    definition = msgspec.to_builtins(request)
    return restore_default_call({**definition, "client_gates": client_gates, "locked": locked})


def restore_default_call(definition: Mapping[str, Any]) -> Call:
    """Build a call that puts a default in force which the server told before."""
    body = json.dumps(dict(definition), allow_nan=False).encode()
    return Call("PUT", "/v1/steering/default", body, mutation=True)


def clear_default_call() -> Call:
    """Build a call that takes the server default out of force."""
    return Call("DELETE", "/v1/steering/default", mutation=True)


def forget_call(conversation_id: str) -> Call:
    """Build a call that forgets what a conversation latched. Raises InvalidSteering for an id that can't be one."""
    check_conversation_id(conversation_id)
    return Call("DELETE", f"/v1/steering/conversations/{quote(conversation_id, safe='')}")


def status_call() -> Call:
    """Build a call of the status route, which takes the steering key."""
    return Call("GET", "/v1/steering/status", mutation=True)


def validate_call(plan: Plan) -> Call:
    """Build a call that has a plan checked by the server. What the rules refuse is sent all the same."""
    if plan is None or plan is False:
        body = b"null" if plan is None else b"false"
    else:
        body = msgspec.json.encode(plan.request if isinstance(plan, Steering) else plan)
    return Call("POST", "/v1/steering/validate", body)


# From an answer to a value or an error


def check_contract(answer: Answer) -> bool:
    """Compare contract versions; return whether the answer told one.

    Raises:
        ContractMismatchError: The server speaks another major.
    """
    theirs = answer.headers.get(CONTRACT_HEADER.lower())
    if theirs is None:
        return False
    if theirs.partition(".")[0] != CONTRACT_VERSION.partition(".")[0]:
        raise ContractMismatchError(CONTRACT_VERSION, theirs)
    return True


def retry_delay(answer: Answer | None, attempt: int) -> float | None:
    """Return the seconds to wait before the next attempt, or None where another would be no use.

    Args:
        answer: What came back; None where the connection failed.
        attempt: Attempts so far, less one.
    """
    if answer is not None:
        if answer.status not in _RETRIED and answer.status < 500:
            return None
        if answer.status == 409 and _error_members(answer).get("code") == "name_conflict":
            return None
        asked = _retry_after(answer.headers.get("retry-after"))
        if asked is not None:
            return asked if asked <= _LONGEST_WAIT else None
    return float(min(0.5 * 2**attempt, 8.0) * random.uniform(0.75, 1.0))


def _retry_after(value: str | None) -> float | None:
    """Read `Retry-After`, which is a number of seconds or a date."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time())
    except ValueError:
        return None


def raise_for_status(answer: Answer) -> None:
    """Raise the error that an answer stands for, if it does.

    Raises:
        APIStatusError: The subclass that belongs to the status.
    """
    if 200 <= answer.status < 300:
        return
    error = _error_members(answer)
    kind = _STATUS_ERRORS.get(answer.status, InternalServerError if answer.status >= 500 else APIStatusError)
    code = error.get("code")
    raise kind(
        f"{error.get('message') or 'The server gave no reason.'}{_age_hint(code, answer)}",
        status_code=answer.status,
        code=code if isinstance(code, str) else None,
        param=error.get("param"),
        type=error.get("type"),
        request_id=answer.headers.get("x-request-id"),
        body=_body(answer),
    )


def _error_members(answer: Answer) -> dict[str, Any]:
    """Find message, type, param and code, in the shapes that servers and proxies use."""
    body = _body(answer)
    if isinstance(body, dict):
        error = body.get("error", body)
        if isinstance(error, dict):
            return {"message": error.get("detail"), **error}
        return {"message": str(error)}
    return {"message": str(body)[:500]}


def _body(answer: Answer) -> Any:
    try:
        return json.loads(answer.body)
    except ValueError:
        return answer.body.decode(errors="replace")


def _age_hint(code: Any, answer: Answer) -> str:
    """Say so where a refusal may come from the server being older than the SDK."""
    theirs = answer.headers.get(CONTRACT_HEADER.lower(), CONTRACT_VERSION)
    if code not in ("unknown_field", "unknown_kind", "unknown_algorithm") or _number(theirs) >= _number(
        CONTRACT_VERSION
    ):
        return ""
    return f" (The server's contract {theirs} is older than this SDK's {CONTRACT_VERSION}.)"


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdecimal())


def parse(answer: Answer, kind: type[T]) -> T:
    """Read an answer as a struct of the contract. Members that a newer server adds are skipped.

    Raises:
        InvalidAnswerError: It is not what the contract says.
    """
    try:
        return msgspec.json.decode(answer.body, type=kind)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise InvalidAnswerError(
            f"The server's answer is not what contract {CONTRACT_VERSION} says: {error}."
        ) from None


def parse_default(answer: Answer) -> dict[str, Any] | None:
    """Read the answer of the default's routes. Raises InvalidAnswerError."""
    body = _body(answer)
    if isinstance(body, dict) and isinstance(body.get("default"), dict | None):
        default: dict[str, Any] | None = body.get("default")
        return default
    raise InvalidAnswerError(f"The server's answer is not what contract {CONTRACT_VERSION} says.")


def parse_reply(call: Call, answer: Answer) -> Reply:
    """Read the answer of a generate route.

    Raises:
        SteeringNotAppliedError: The call was steered, and the answer does not say so.
        InvalidAnswerError: It is no answer of a generate route.
    """
    if call.steered:
        assert_applied(answer.headers)
    raw = _body(answer)
    try:
        choices = sorted(raw["choices"], key=lambda choice: choice["index"])
        texts = [choice["message"]["content"] if "message" in choice else choice["text"] for choice in choices]
        report = raw.get("steering_report")
        return Reply(
            texts=[text or "" for text in texts],
            raw=raw,
            steering_report=None if report is None else msgspec.convert(report, SteeringReport),
            applied=header(answer.headers, APPLIED_HEADER),
            overridden=header(answer.headers, OVERRIDDEN_HEADER),
            request_id=answer.headers.get("x-request-id"),
        )
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        message = f"The server's answer is not what contract {CONTRACT_VERSION} says: {error!r}."
        raise InvalidAnswerError(message) from None
