"""Edits a steered answer on its way out: the head is held, the header set, the report added, a failure put in place.

The response head is held until the first piece of the body, so that a request that the engine refuses still gets a real
status code.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from steergate_server.schema.decode import encode
from steergate_server.schema.errors import SteeringError
from steergate_server.vllm_plugin.call import SteeredCall

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

APPLIED_HEADER = b"x-steering-applied"
OVERRIDDEN_HEADER = b"x-steering-overridden"
_DONE = b"data: [DONE]"


async def send_error(send: Send, error: SteeringError) -> None:
    """Answer with a refusal in OpenAI's shape."""
    body = json.dumps(error.body()).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class AnswerEditor:
    """Stands between vLLM's handler and the client for one steered request."""

    def __init__(self, send: Send, call: SteeredCall) -> None:
        self._send = send
        self._call = call
        self._head: Message | None = None
        self._streaming = False
        self._closed = False
        self.complete = False
        """Whether the whole answer was sent."""
        self._body: list[bytes] = []
        self._first_event: bytes | None = None

    async def send(self, message: Message) -> None:
        """What vLLM's handler sends goes through here."""
        if self._closed:
            return
        if message["type"] == "http.response.start":
            self._head = message
            content_type = next((value for name, value in message["headers"] if name == b"content-type"), b"")
            self._streaming = content_type.startswith(b"text/event-stream")
        elif message["type"] != "http.response.body":
            await self._send(message)
        elif self._is_unsteered():
            await self._send_failure(
                SteeringError("algorithm_failed", "The request was answered without its steering.", "steering")
            )
        elif self._call.failure is not None:
            await self._send_failure(self._call.failure)
        elif self._streaming:
            await self._send_event(message)
        else:
            await self._collect(message)

    def _is_unsteered(self) -> bool:
        """An answer that no steered engine request stands behind must not go out as one."""
        return self._head is not None and 200 <= self._head["status"] < 300 and not self._call.reached_engine

    async def _send_failure(self, failure: SteeringError) -> None:
        self._closed = self.complete = True
        if self._head is not None:
            await send_error(self._send, failure)
            return
        event = b"data: " + json.dumps(failure.body()).encode() + b"\n\n" + _DONE + b"\n\n"
        await self._send({"type": "http.response.body", "body": event, "more_body": False})

    async def _send_head(self, length: int | None) -> None:
        """Send the held head, once; `length` replaces a content-length that an edit made wrong."""
        head, self._head = self._head, None
        if head is None:
            return
        headers = list(head["headers"])
        if length is not None:
            headers = [(name, value) for name, value in headers if name != b"content-length"]
            headers.append((b"content-length", str(length).encode()))
        if 200 <= head["status"] < 300:
            if self._call.admitted.announced:
                headers.append((APPLIED_HEADER, self._call.admitted.fingerprint.encode()))
            if self._call.admitted.overridden:
                headers.append((OVERRIDDEN_HEADER, b"gates"))
        await self._send({**head, "headers": headers})

    # A body of one piece ----------------------------------------------------------------------------------------

    async def _collect(self, message: Message) -> None:
        self._body.append(message.get("body", b""))
        if message.get("more_body", False):
            return
        body = b"".join(self._body)
        if self._head is not None and self._head["status"] == 200 and self._call.wants_report:
            body = _with_member(body, encode(self._call.report()))
        await self._send_head(len(body))
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
        self.complete = True

    # A stream ---------------------------------------------------------------------------------------------------

    async def _send_event(self, message: Message) -> None:
        body: bytes = message.get("body", b"")
        if not body and message.get("more_body", False):
            return
        await self._send_head(None)
        if self._call.wants_report:
            if self._first_event is None and body.startswith(b"data: {"):
                self._first_event = body.split(b"\n", 1)[0][len(b"data: ") :]
            start = 0 if body.startswith(_DONE) else body.find(b"\n" + _DONE) + 1
            if body.startswith(_DONE, start):
                body = body[:start] + self._report_event() + body[start:]
        await self._send({**message, "body": body})
        self.complete = not message.get("more_body", False)

    def _report_event(self) -> bytes:
        """One more chunk, without choices, that carries the report."""
        first = msgspec.json.decode(self._first_event or b"{}")
        chunk = {name: first[name] for name in ("id", "object", "created", "model") if name in first}
        chunk |= {"choices": [], "steering_report": msgspec.Raw(encode(self._call.report()))}
        return b"data: " + msgspec.json.encode(chunk) + b"\n\n"


def _with_member(body: bytes, report: bytes) -> bytes:
    """A JSON object with one more member at its end; anything else is left alone."""
    stripped = body.rstrip()
    if not stripped.endswith(b"}"):
        return body
    comma = b"" if stripped[:-1].rstrip().endswith(b"{") else b","
    return stripped[:-1] + comma + b'"steering_report":' + report + b"}"
