"""Edits a steered answer on its way out: the head is held, the header set, the report added, a failure put in place.

The response head is held until the engine's first output, so that a request that the engine refuses still gets a real
status code.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from steergate_server.schema.decode import encode
from steergate_server.schema.errors import SteeringError
from steergate_server.vllm_plugin.call import SteeredCall
from steergate_server.vllm_plugin.dialects import Dialect, with_member

Message = MutableMapping[str, Any]
Send = Callable[[Message], Awaitable[None]]

APPLIED_HEADER = b"x-steering-applied"
OVERRIDDEN_HEADER = b"x-steering-overridden"


async def send_error(send: Send, error: SteeringError, dialect: Dialect) -> None:
    """Answer with a refusal in the route's shape."""
    body = json.dumps(dialect.error_body(error)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class AnswerEditor:
    """Stands between vLLM's handler and the client for one steered request."""

    def __init__(self, send: Send, call: SteeredCall, dialect: Dialect) -> None:
        self._send = send
        self._call = call
        self._dialect = dialect
        self._head: Message | None = None
        self._streaming = False
        self._closed = False
        self.complete = False
        """Whether the whole answer was sent."""
        self._held: list[bytes] = []

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
        elif self._call.failure is not None:
            await self._send_failure(self._call.failure)
        elif self._is_early(message):
            self._held.append(message["body"])
        elif self._is_unsteered():
            await self._send_failure(
                SteeringError("algorithm_failed", "The request was answered without its steering.", "steering")
            )
        elif self._streaming:
            await self._send_events(message)
        else:
            await self._collect(message)

    async def fail(self) -> bool:
        """vLLM's handler raised. Whether that was our refusal, which the client then has got."""
        if self._call.failure is None or self._closed or self.complete:
            return False
        await self._send_failure(self._call.failure)
        return True

    def _is_early(self, message: Message) -> bool:
        """Events that a handler sends before the engine's first output. Comments keep the connection alive, so they
        pass once the request is with the engine."""
        if not self._streaming or self._call.answered or not message.get("more_body", False):
            return False
        return not (self._call.reached_engine and message["body"].startswith(b":"))

    def _is_unsteered(self) -> bool:
        """An answer that no steered engine request stands behind must not go out as one."""
        return self._head is not None and 200 <= self._head["status"] < 300 and not self._call.reached_engine

    async def _send_failure(self, failure: SteeringError) -> None:
        self._closed = self.complete = True
        if self._head is not None:
            await send_error(self._send, failure, self._dialect)
            return
        event = self._dialect.error_event(failure)
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

    async def _collect(self, message: Message) -> None:
        """A body of one piece."""
        self._held.append(message.get("body", b""))
        if message.get("more_body", False):
            return
        body = b"".join(self._held)
        if self._head is not None and self._head["status"] == 200 and self._call.wants_report:
            body = with_member(body, self._report())
        await self._send_head(len(body))
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
        self.complete = True

    async def _send_events(self, message: Message) -> None:
        """A piece of a stream, and what was held before it."""
        events = b"".join([*self._held, message.get("body", b"")])
        self._held.clear()
        if not events and message.get("more_body", False):
            return
        await self._send_head(None)
        if self._call.wants_report:
            events = self._dialect.with_report(events, self._report)
        await self._send({**message, "body": events})
        self.complete = not message.get("more_body", False)

    def _report(self) -> bytes:
        return encode(self._call.report())
