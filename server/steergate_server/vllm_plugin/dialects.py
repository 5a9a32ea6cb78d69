"""The routes that carry steering, and how each of them words reports, refusals and failures in a stream."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from steergate_server.runtime.plan import Plan
from steergate_server.schema.errors import SteeringError

REPORT_MEMBER = "steering_report"

_SERVER_TOOLS = frozenset({"code_interpreter", "container", "mcp", "web_search_preview"})
"""Types of tools that vLLM runs by itself, between several engine requests for one answer."""


class Dialect:
    """Completions and chat: streams end with `[DONE]`. One instance for each request."""

    one_engine_request = False
    """Whether an answer of this route comes from a single engine request, unless the server runs tools."""

    def __init__(self) -> None:
        self._first: bytes | None = None

    def check(self, members: Mapping[str, msgspec.Raw], plan: Plan) -> None:  # noqa: ARG002 - for other dialects
        """Refuse what this route cannot steer exactly; raises SteeringError. members: the body's, without ours."""
        if _value(members, "use_beam_search") not in (None, False):
            raise SteeringError(
                "steering_not_supported_here",
                "Beam search sends generated tokens as a new prompt, so rows cannot be told. Leave one of the two out.",
                "use_beam_search",
            )

    @staticmethod
    def error_body(error: SteeringError) -> dict[str, Any]:
        """The body of a refusal."""
        return error.body()

    def error_event(self, error: SteeringError) -> bytes:
        """What ends a stream that failed."""
        return b"data: " + json.dumps(self.error_body(error)).encode() + b"\n\ndata: [DONE]\n\n"

    def with_report(self, events: bytes, report: Any) -> bytes:
        """Events on their way out, with the report where it belongs. report: gives it, as JSON, once all is known."""
        if self._first is None and events.startswith(b"data: {"):
            self._first = events.split(b"\n", 1)[0][len(b"data: ") :]
        start = _line(events, b"data: [DONE]")
        if start is None:
            return events
        first = msgspec.json.decode(self._first or b"{}")
        chunk = {name: first[name] for name in ("id", "object", "created", "model") if name in first}
        chunk |= {"choices": [], REPORT_MEMBER: msgspec.Raw(report())}
        return events[:start] + b"data: " + msgspec.json.encode(chunk) + b"\n\n" + events[start:]


class InvocationsDialect(Dialect):
    """SageMaker's alias: chat if there are `messages`, completions if there is a `prompt`."""

    def check(self, members: Mapping[str, msgspec.Raw], plan: Plan) -> None:
        """Refuse bodies of other routes, and what those two refuse."""
        if not {"messages", "prompt"} & set(members):
            raise SteeringError(
                "steering_not_supported_here",
                "/invocations carries steering for bodies with `messages` or a `prompt`; others have no answer rows.",
                "steering",
            )
        super().check(members, plan)


class _NamedEvents(Dialect):
    """Streams of named events, the last of which takes the report among its members."""

    one_engine_request = True
    _last_event = b""

    def check(self, members: Mapping[str, msgspec.Raw], plan: Plan) -> None:
        """Nothing to refuse."""

    def with_report(self, events: bytes, report: Any) -> bytes:
        """Add the report to the last event's data."""
        start = _line(events, b"event: " + self._last_event + b"\ndata: {")
        if start is None:
            return events
        end = events.find(b"\n", events.index(b"data: {", start))
        end = len(events) if end < 0 else end
        return with_member(events[:end], report()) + events[end:]


class ResponsesDialect(_NamedEvents):
    """OpenAI's responses route."""

    _last_event = b"response.completed"

    def check(self, members: Mapping[str, msgspec.Raw], plan: Plan) -> None:
        """Refuse background mode, and gates or a report where the server itself runs tools."""
        if _value(members, "background"):
            raise SteeringError(
                "steering_not_supported_here",
                "A response in the background outlives the request that holds its steering. Leave `background` out.",
                "background",
            )
        if not (plan.gates or plan.report != "none"):
            return
        tools = _value(members, "tools")
        for index, tool in enumerate(tools if isinstance(tools, list) else ()):
            if isinstance(tool, dict) and tool.get("type") in _SERVER_TOOLS:
                raise SteeringError(
                    "steering_not_supported_here",
                    f"With the tool `{tool['type']}` the server generates several times for one answer, and gates and "
                    "reports speak of one. Leave the tool out, or steer with vectors and no report.",
                    f"tools[{index}].type",
                )

    def error_event(self, error: SteeringError) -> bytes:
        """An `error` event that readers of the event's members and readers of `error` both understand."""
        body = error.body()
        event = {"type": "error", **{name: body["error"][name] for name in ("code", "message", "param")}, **body}
        return b"event: error\ndata: " + json.dumps(event).encode() + b"\n\n"


class MessagesDialect(_NamedEvents):
    """Anthropic's messages route."""

    _last_event = b"message_stop"

    @staticmethod
    def error_body(error: SteeringError) -> dict[str, Any]:
        """Anthropic's shape, with `code` and `param` beside its `type` and `message`."""
        return {"type": "error", **error.body()}

    def error_event(self, error: SteeringError) -> bytes:
        """Anthropic's `error` event."""
        return b"event: error\ndata: " + json.dumps(self.error_body(error)).encode() + b"\n\n"


CARRYING_ROUTES: dict[str, type[Dialect]] = {
    "/v1/completions": Dialect,
    "/v1/chat/completions": Dialect,
    "/v1/chat/completions/batch": Dialect,
    "/v1/responses": ResponsesDialect,
    "/v1/messages": MessagesDialect,
    "/invocations": InvocationsDialect,
}
"""The POST routes that carry steering. Every other route refuses it."""


def dialect_of(path: str) -> Dialect:
    """A dialect for one request; for a route that does not carry steering, the one that words its refusal."""
    kind = CARRYING_ROUTES.get(path)
    if kind is None:
        kind = MessagesDialect if path.startswith("/v1/messages/") else Dialect
    return kind()


def with_member(body: bytes, report: bytes) -> bytes:
    """A JSON object with the report as its last member; anything else is left alone."""
    stripped = body.rstrip()
    if not stripped.endswith(b"}"):
        return body
    comma = b"" if stripped[:-1].rstrip().endswith(b"{") else b","
    return stripped[:-1] + comma + b'"' + REPORT_MEMBER.encode() + b'":' + report + b"}"


def _value(members: Mapping[str, msgspec.Raw], name: str) -> Any:
    return json.loads(bytes(members.get(name, b"null")))


def _line(events: bytes, start: bytes) -> int | None:
    """Where a line of a stream starts so, or None."""
    if events.startswith(start):
        return 0
    found = events.find(b"\n" + start)
    return None if found < 0 else found + 1
