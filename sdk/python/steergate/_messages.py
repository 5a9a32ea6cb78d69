"""What goes over the wire, as values: the keys, a call, an answer, and the reply that a user gets."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from ._generated.answers import SteeringReport

__all__ = ["Answer", "Call", "Keys", "Reply"]


class Keys(NamedTuple):
    """What the client shows to be let in."""

    api_key: str | None = None
    steering_api_key: str | None = None

    def __repr__(self) -> str:
        shown = {name: None if key is None else "***" for name, key in self._asdict().items()}
        return f"Keys({', '.join(f'{name}={key}' for name, key in shown.items())})"


class Call(NamedTuple):
    """One request, without the address and the keys."""

    method: str
    path: str
    body: bytes | None = None
    mutation: bool = False
    """Whether it needs the steering key."""
    steered: bool = False
    """Whether the answer must say that steering was applied."""


class Answer(NamedTuple):
    """One answer, read to its end. Header names are lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """A generated answer.

    Attributes:
        texts: The text of each choice.
        steering_report: What was applied, where the plan asked for a report; else None.
        applied: Fingerprint of the plan that was applied; None for an answer without steering.
        overridden: What the server did not run although it was asked for, such as `gates`; else None.
        request_id: The server's id of the request, or None.
        raw: The whole body, as OpenAI's API has it.

    Examples:
        >>> from steergate import SteeringClient
        >>> with SteeringClient("http://localhost:8000") as client:  # doctest: +SKIP
        ...     reply = client.chat(model="demo", messages=[{"role": "user", "content": "Hello"}])
        >>> reply.text, reply.raw["usage"]["completion_tokens"]  # doctest: +SKIP
        ('Hello there', 2)
    """

    texts: list[str]
    raw: dict[str, Any]
    steering_report: SteeringReport | None = None
    applied: str | None = None
    overridden: str | None = None
    request_id: str | None = None

    @property
    def text(self) -> str:
        """The text of the first choice; empty if it has none."""
        return self.texts[0] if self.texts else ""
