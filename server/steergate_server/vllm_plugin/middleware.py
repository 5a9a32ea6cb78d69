"""The ASGI middleware: takes `steering` out of a request, admits it, and puts what was applied on the answer.

It knows the closed list of routes that carry steering. On every other route our members are refused, never ignored.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec

from steergate_server.runtime.admission import Admission
from steergate_server.runtime.front_config import FrontConfig
from steergate_server.runtime.plan import Conversation
from steergate_server.schema.decode import decode_conversation_id, decode_steering
from steergate_server.schema.errors import SteeringError
from steergate_server.schema.requests import SteeringRequest
from steergate_server.vllm_plugin import metrics
from steergate_server.vllm_plugin.answer import AnswerEditor, send_error
from steergate_server.vllm_plugin.call import SteeredCall, current_call
from steergate_server.vllm_plugin.envelope import Envelope, open_envelope

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

CARRYING_ROUTES = frozenset({"/v1/completions", "/v1/chat/completions"})
"""The POST routes that carry steering."""

GENERATING_ROUTES = CARRYING_ROUTES | {
    "/v1/responses", "/v1/messages", "/invocations", "/inference/v1/generate", "/generative_scoring", "/v1/systemone",
    "/v1/chat/completions/batch", "/v1/audio/transcriptions", "/v1/audio/translations", "/cohere/v2/chat",
}  # fmt: skip
"""The POST routes that generate: those that cannot carry steering are refused while a server default is in force."""

_OWN_ROUTES = "/v1/steering/"

_ABORT_GRACE_SECONDS = 5.0

_LARGE_BODY = 2**18
"""Bytes from which a body is opened in a thread."""

_OTHER_BYTES = 64 * 2**20
"""Room for the rest of a body (prompts, images) beside the inline numbers."""


class SteeringMiddleware:
    """Pure ASGI; one instance for an app. `bind` gives it the admission once the engine is up."""

    def __init__(self, app: Any, state: MiddlewareState) -> None:
        self._app = app
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        if scope["method"] != "POST" or path.startswith(_OWN_ROUTES):
            await self._app(scope, receive, send)
            return
        try:
            received = await _read_body(receive, scope, self._state.config.max_inline_bytes)
            if received is None:  # the client went away
                return
            if len(received) > _LARGE_BODY:
                # Decoding and hashing many numbers must not hold up the streams of everybody else.
                call, body = await asyncio.to_thread(self._open, path, scope, received)
            else:
                call, body = self._open(path, scope, received)
        except SteeringError as error:
            await send_error(send, error)
            return
        await self._serve(scope, _replay(body, receive), send, call, body)

    def _open(self, path: str, scope: Scope, body: bytes) -> tuple[SteeredCall | None, bytes]:
        """The call that a body asks for, and the body that vLLM gets. Raises SteeringError."""
        with metrics.admission():
            call, rest = self._open_body(path, scope, body)
        if call is not None:
            metrics.admitted(call.admitted.plan)
        return call, rest

    def _open_body(self, path: str, scope: Scope, body: bytes) -> tuple[SteeredCall | None, bytes]:
        if b'name="steering"' in body and _content_type(scope).startswith(b"multipart/"):
            raise _not_here(path)
        envelope = open_envelope(body)
        default = self._state.admission.default if self._state.admission is not None else None
        if envelope is None:
            if default is not None and path in GENERATING_ROUTES - CARRYING_ROUTES:
                raise _not_here(path, inherited=True)
            return None, body
        asked = envelope.steering is not None or envelope.conversation_id is not None
        if not asked and (default is None or path not in GENERATING_ROUTES):
            return None, body
        if path not in CARRYING_ROUTES:
            raise _not_here(path, "conversation_id" if envelope.steering is None else "steering", inherited=not asked)
        return self._admit(envelope, scope), envelope.body

    def _admit(self, envelope: Envelope, scope: Scope) -> SteeredCall | None:
        if self._state.admission is None:
            raise SteeringError("steering_not_supported_here", "The engine is not up yet. Send the request again.")
        conversation = decode_conversation_id(envelope.conversation_id or b"null")
        raw = envelope.steering or b"null"
        limit = self._state.config.max_inline_bytes
        # Base64 writes three bytes as four characters; a kilobyte is left for each vector's own words.
        if len(raw) > limit * 4 // 3 + 65_536:
            raise SteeringError(
                "payload_too_large",
                f"`steering` has {len(raw)} bytes; this server takes {limit} bytes of numbers. Register vectors.",
                "steering",
            )
        request = decode_steering(raw)
        turn = None
        if conversation is not None and self._state.admission.config.gates:
            turn = Conversation(key=conversation_key(self._state.principal(scope), conversation))
        call = self._admit_steering(request, turn, conversation, as_list=raw.lstrip()[:1] == b"[")
        if call is not None and msgspec.json.decode(envelope.rest.get("use_beam_search", b"null")) not in (None, False):
            raise SteeringError(
                "steering_not_supported_here",
                "Beam search sends generated tokens as a new prompt, so rows cannot be told. Leave one of the two out.",
                "use_beam_search",
            )
        return call

    def _admit_steering(
        self,
        request: SteeringRequest | Literal[False] | None,
        turn: Conversation | None,
        conversation_id: str | None,
        *,
        as_list: bool,
    ) -> SteeredCall | None:
        admission = self._state.admission
        assert admission is not None
        if request is False:
            admitted = admission.admit_opt_out(turn)
            return None if admitted is None else SteeredCall(admitted)
        if request is None and turn is None and admission.default is None:
            return None
        return SteeredCall(
            admission.admit(request, as_list=as_list, conversation_id=conversation_id, conversation=turn)
        )

    async def _serve(self, scope: Scope, receive: Receive, send: Send, call: SteeredCall | None, body: bytes) -> None:
        scope["headers"] = [
            (name, str(len(body)).encode() if name == b"content-length" else value) for name, value in scope["headers"]
        ]
        if call is None:
            await self._app(scope, receive, send)
            return
        token = current_call.set(call)
        editor = AnswerEditor(send, call)
        try:
            await self._app(scope, receive, editor.send)
        finally:
            current_call.reset(token)
            assert self._state.admission is not None
            release = partial(self._state.admission.release, call.admitted.digests)
            # After a disconnect the engine may start the request before it hears of the abort, and wants its numbers.
            asyncio.get_running_loop().call_later(0 if editor.complete else _ABORT_GRACE_SECONDS, release)


class MiddlewareState:
    """What the middleware and the routes share. `admission` is None until the engine is up; `server_key`: vLLM's own
    `--api-key` is set."""

    def __init__(self, config: FrontConfig, contract: str) -> None:
        self.config = config
        self.contract = contract
        self.server_key = False
        self.admission: Admission | None = None
        self.send_message: Callable[[str], Awaitable[None]] | None = None
        """Sends the scheduler a message about a conversation."""
        self.ask_workers: Callable[[], Awaitable[list[dict[str, Any]]]] | None = None
        """What steering holds on each worker."""
        self.spool: Path | None = None
        """The folder in which payloads lie, and the engine's status."""

    def principal(self, scope: Scope) -> str:
        """Who is asking: the API key, where the server has one; without it all clients are one."""
        if not self.server_key:
            return ""
        given = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"), "")
        # The scheme's spelling is free, so it tells nobody apart.
        return given.partition(" ")[2]


def conversation_key(principal: str, conversation_id: str) -> str:
    """What stands for a conversation outside of this process: neither the API key nor the id can be read from it."""
    content = len(principal).to_bytes(8, "little") + principal.encode() + conversation_id.encode()
    return hashlib.sha256(b"steergate/conversation/1\0" + content).hexdigest()


def _not_here(path: str, member: str = "steering", *, inherited: bool = False) -> SteeringError:
    routes = " or ".join(sorted(CARRYING_ROUTES))
    if inherited:
        return SteeringError(
            "steering_not_supported_here",
            f"This server has default steering, which {path} does not carry. Use {routes}.",
            None,
        )
    return SteeringError("steering_not_supported_here", f"{path} does not carry steering. Send it to {routes}.", member)


def _content_type(scope: Scope) -> bytes:
    return next((value for name, value in scope["headers"] if name == b"content-type"), b"")


async def _read_body(receive: Receive, scope: Scope, inline_bytes: int) -> bytes | None:
    """The whole body, or None if the client went away. Raises SteeringError for one over the limit."""
    limit = inline_bytes * 4 // 3 + _OTHER_BYTES
    declared = next((int(value) for name, value in scope["headers"] if name == b"content-length"), 0)
    chunks: list[bytes] = []
    size = 0
    while declared <= limit and size <= limit:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if not message.get("more_body", False):
            return b"".join(chunks)
    raise SteeringError("payload_too_large", f"The body is larger than {limit} bytes.", None)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body once and then whatever comes, a disconnect above all."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if given:
            return await receive()
        given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay
