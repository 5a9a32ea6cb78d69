"""The server default, as `client.default`."""

from __future__ import annotations

from typing import Any, Literal

from . import _protocol as protocol
from ._messages import Call
from ._transport import Transport
from .body import Plan

__all__ = ["Default"]

ClientGates = Literal["reject", "ignore", "allow"]


class Default:
    """The steering that every request inherits, unless it opts out.

    Examples:
        >>> from steergate import When
        >>> calm = When.always().scope("this_token").add("calm")
        >>> client.default.put(calm, client_gates="allow")["gates"][0]["scope"]  # doctest: +SKIP
        'this_token'
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def show(self) -> dict[str, Any] | None:
        """Return the default in force, with digests in place of inline numbers; None if there is none.

        Examples:
            >>> client.default.show() is None  # doctest: +SKIP
            True
        """
        return self._send(protocol.get_call("default"))

    def put(self, plan: Plan, *, client_gates: ClientGates = "reject", locked: bool = False) -> dict[str, Any] | None:
        """Put a default in force, for requests from now on. Needs the steering key.

        Args:
            plan: A `Steering`, a gate or a list of gates.
            client_gates: What becomes of a request's own gates where the default carries gates: the request is refused,
                its gates are not run, or both run.
            locked: Refuse requests that opt out, and apply the default's vectors last of all.

        Returns:
            The default in force, as `show` gives it.

        Raises:
            InvalidSteering: The plan breaks a rule; nothing was sent.
            TypeError: The plan is None or False, which is no default: use `clear`.
            APIStatusError: The server refused.

        Examples:
            >>> client.default.put(plan, locked=True)  # doctest: +SKIP
        """
        return self._send(protocol.put_default_call(plan, client_gates, locked))

    def restore(self, definition: dict[str, Any]) -> dict[str, Any] | None:
        """Put a default in force that `show` returned. Needs the steering key.

        Examples:
            >>> before = client.default.show()  # doctest: +SKIP
            >>> client.default.restore(before)  # doctest: +SKIP
        """
        return self._send(protocol.restore_default_call(definition))

    def clear(self) -> None:
        """Take the default out of force, for requests from now on. Needs the steering key.

        Examples:
            >>> client.default.clear()  # doctest: +SKIP
        """
        self._send(protocol.clear_default_call())

    def _send(self, call: Call) -> dict[str, Any] | None:
        return protocol.parse_default(self._transport.send(call))
