"""Steering for clients that are not ours: what to put into a request body, and how to tell that it was applied."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import msgspec

from ._check import check_conversation_id, checked, raise_first, request_problems, wire_bytes
from ._gates import Scoped, When, refuse_unfinished
from ._generated.decode import decode_steering
from ._generated.errors import SteeringError
from ._generated.models import SteeringGate, SteeringRequest
from ._generated.rules import Capability
from .builders import Steering
from .errors import InvalidSteering, SteeringNotAppliedError

__all__ = ["APPLIED_HEADER", "Plan", "Prepared", "assert_applied", "header", "prepare", "steering_body"]

Plan: TypeAlias = Steering | SteeringRequest | SteeringGate | Sequence[SteeringGate] | Literal[False] | None
"""What may be given as steering: a plan, a gate, a list of gates, False for none at all, None for the default."""

APPLIED_HEADER = "X-Steering-Applied"


class Prepared(NamedTuple):
    """A plan that is ready to be sent."""

    steering: bytes | None
    """The member `steering` as JSON; None where it is left out."""
    request: SteeringRequest | None
    """What it says; None for no steering of the client's own."""
    as_list: bool = False
    """Whether gates are sent as a bare list."""

    @property
    def steered(self) -> bool:
        """Whether the answer must say that steering was applied."""
        if self.request is None:
            return False
        return bool(self.request.gates) or any(spec.scale != 0 for spec in self.request.vectors)


def prepare(
    plan: Plan,
    conversation_id: str | msgspec.UnsetType | None = None,
    algorithms: Mapping[str, Capability] | None = None,
) -> Prepared:
    """Check a plan as a whole and encode it.

    Args:
        plan: See `Plan`.
        conversation_id: The conversation it is sent in. UNSET: not decided yet.
        algorithms: What each algorithm takes; the packaged table if left out.

    Raises:
        InvalidSteering: With `param` as sent.
        TypeError: It is no plan, or a gate that is not finished.
    """
    if conversation_id is not None and not isinstance(conversation_id, msgspec.UnsetType):
        check_conversation_id(conversation_id)
    if plan is None or plan is False:
        return Prepared(b"false" if plan is False else None, None)
    as_list = not isinstance(plan, Steering | SteeringRequest)
    request = _request_of(plan)
    if request is None or request == SteeringRequest():
        return Prepared(None, None)
    raise_first(request_problems(request, algorithms, conversation_id), "steering", as_list=as_list)
    return Prepared(msgspec.json.encode(request.gates if as_list else request), request, as_list)


def default_request(plan: Plan) -> SteeringRequest | None:
    """Check a plan as a server default and return what it says; None for nothing.

    Raises:
        InvalidSteering: With `param` from the root of the route's body.
        TypeError: It is no plan, or a gate that is not finished.
    """
    request = _request_of(plan)
    if request is None or request == SteeringRequest():
        return None
    # The server keeps the numbers of its default, so they last as long as a conversation may.
    raise_first((found for found in request_problems(request) if found.code != "inline_conversation_steer"), "")
    return request


def _request_of(plan: Plan) -> SteeringRequest | None:
    if isinstance(plan, Steering):
        # What it holds was checked when it was built, and may be large.
        return plan.request
    sent = _sent(plan)
    if isinstance(sent, list):
        # Text of our own has no member twice, so nobody looks for one.
        return SteeringRequest(gates=checked(sent, list[SteeringGate], "steering"))
    return _decoded(sent)


def _sent(plan: Any) -> Any:
    """Return what travels, unchecked: a request, or a list of gates."""
    if isinstance(plan, SteeringRequest | bool):
        return plan
    gates = [plan] if isinstance(plan, SteeringGate | When | Scoped) else plan
    if not isinstance(gates, list | tuple):
        given = type(plan).__name__
        raise TypeError(f"a {given} is no steering; give a Steering, a gate, a list of gates, False or None")
    for gate in gates:
        refuse_unfinished(gate)
    return list(gates)


def _decoded(sent: SteeringRequest | bool) -> SteeringRequest | None:
    try:
        return decode_steering(wire_bytes(sent)) or None
    except SteeringError as error:
        raise InvalidSteering(error.code, error.message, error.param) from None


def steering_body(plan: Plan, conversation_id: str | None = None) -> dict[str, Any]:
    """Make the members of a request body that carry steering, for any OpenAI-style client.

    Args:
        plan: A `Steering`, a gate, a list of gates; False for no steering at all, not even the server's default; None
            for the default alone.
        conversation_id: The conversation, which the scope `rest_of_conversation` needs.

    Returns:
        Plain JSON values, for `extra_body` of the official client.

    Raises:
        InvalidSteering: With `param` as sent: `steering.gates[0].scope` for a plan, `steering[0].scope` for gates.

    Examples:
        >>> from steergate import When, steering_body
        >>> body = steering_body(When.always().scope("this_token").add("calm"))
        >>> body["steering"][0]["apply"]
        {'kind': 'add', 'steer': {'kind': 'name', 'name': 'calm'}}
        >>> steering_body(False)
        {'steering': False}
    """
    prepared = prepare(plan, conversation_id)
    body: dict[str, Any] = {}
    if prepared.steering is not None:
        body["steering"] = msgspec.json.decode(prepared.steering)
    if conversation_id is not None:
        body["conversation_id"] = conversation_id
    return body


def assert_applied(response: Any) -> str:
    """Make sure that a response was steered.

    Args:
        response: An httpx response, a raw response of the official client (`with_raw_response`), or the headers.

    Returns:
        The fingerprint of the plan that was applied.

    Raises:
        SteeringNotAppliedError: The header `X-Steering-Applied` is missing: whoever answered did not steer.
        TypeError: There are no headers to look at.

    Examples:
        >>> from steergate import assert_applied
        >>> assert_applied({"x-steering-applied": "5f1d"})
        '5f1d'
    """
    headers = response if isinstance(response, Mapping) else getattr(response, "headers", None)
    if not isinstance(headers, Mapping):
        given = type(response).__name__
        raise TypeError(f"a {given} has no headers; use `client.chat.completions.with_raw_response.create(...)`")
    fingerprint = header(headers, APPLIED_HEADER)
    if fingerprint is None:
        raise SteeringNotAppliedError(
            f"The response has no {APPLIED_HEADER}: steering was asked for, and whoever answered did not apply it. "
            "Check that the address is a SteerGate server's, and that nothing on the way drops headers."
        )
    return fingerprint


def header(headers: Mapping[Any, Any], name: str) -> str | None:
    """Read a header, whatever its case."""
    return next((str(value) for key, value in headers.items() if str(key).lower() == name.lower()), None)
