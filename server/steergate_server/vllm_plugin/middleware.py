"""The ASGI middleware: takes `steering` out of a request, admits it, and puts what was applied on the answer.

It knows the closed list of routes that carry steering. On every other route our members are refused, never ignored.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

from steergate_server.runtime.admission import Admission, Admitted
from steergate_server.runtime.front_config import FrontConfig
from steergate_server.runtime.plan import Conversation
from steergate_server.schema.decode import decode_conversation_id, decode_steering
from steergate_server.schema.errors import SteeringError
from steergate_server.schema.requests import SteeringRequest
from steergate_server.vllm_plugin import metrics
from steergate_server.vllm_plugin.answer import AnswerEditor, send_error
from steergate_server.vllm_plugin.call import SteeredCall, current_call, decided
from steergate_server.vllm_plugin.dialects import CARRYING_ROUTES, Dialect, dialect_of
from steergate_server.vllm_plugin.envelope import Envelope, open_envelope

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

GENERATING_ROUTES = frozenset(CARRYING_ROUTES) | {
    "/inference/v1/generate", "/generative_scoring", "/v1/systemone", "/cohere/v2/chat", "/v1/audio/transcriptions",
    "/v1/audio/translations",
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
        path = _route_path(scope)
        if scope["method"] != "POST" or path.startswith(_OWN_ROUTES):
            await self._app(scope, receive, send)
            return
        dialect = dialect_of(path)
        try:
            received = await _read_body(receive, scope, self._state.config.max_inline_bytes)
            if received is None:  # the client went away
                return
            if len(received) > _LARGE_BODY:
                # Decoding and hashing many numbers must not hold up the streams of everybody else.
                call, body = await asyncio.to_thread(self._open, path, dialect, scope, received)
            else:
                call, body = self._open(path, dialect, scope, received)
        except SteeringError as error:
            await send_error(send, error, dialect)
            return
        if call is None and path in CARRYING_ROUTES:
            decided.set(True)
        await self._serve(scope, _replay(body, receive), send, dialect, call, body)

    def _open(self, path: str, dialect: Dialect, scope: Scope, body: bytes) -> tuple[SteeredCall | None, bytes]:
        """The call that a body asks for, and the body that vLLM gets. Raises SteeringError."""
        with metrics.admission():
            call, rest = self._open_body(path, dialect, scope, body)
        if call is not None:
            metrics.admitted(call.admitted.plan)
        return call, rest

    def _open_body(self, path: str, dialect: Dialect, scope: Scope, body: bytes) -> tuple[SteeredCall | None, bytes]:
        if b'name="steering"' in body and _content_type(scope).startswith(b"multipart/"):
            raise _not_here(path)
        default = self._state.admission.default if self._state.admission is not None else None
        inherits = default is not None and path in GENERATING_ROUTES
        envelope = open_envelope(body)
        if inherits and path not in CARRYING_ROUTES:
            raise _not_inherited_here(path)
        if envelope is None:
            return None, body
        asked = envelope.steering is not None or envelope.conversation_id is not None
        if not asked and not inherits:
            return None, body
        if path not in CARRYING_ROUTES:
            raise _not_here(path, "conversation_id" if envelope.steering is None else "steering")
        if not path.startswith(self._state.guarded) and not _bears_key(scope, self._state.server_keys):
            raise SteeringError("unauthorized", f"Steering on {path} needs this server's API key as the bearer.")
        return self._admit(envelope, dialect, scope), envelope.body

    def _admit(self, envelope: Envelope, dialect: Dialect, scope: Scope) -> SteeredCall | None:
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
        admitted = self._admit_steering(request, turn, conversation, as_list=raw.lstrip()[:1] == b"[")
        if admitted is None:
            return None
        try:
            dialect.check(envelope.rest, admitted.plan)
        except SteeringError:
            self._state.admission.release(admitted.digests)
            raise
        return SteeredCall(admitted, one_engine_request=dialect.one_engine_request)

    def _admit_steering(
        self,
        request: SteeringRequest | Literal[False] | None,
        turn: Conversation | None,
        conversation_id: str | None,
        *,
        as_list: bool,
    ) -> Admitted | None:
        admission = self._state.admission
        assert admission is not None
        if request is False:
            return admission.admit_opt_out(turn)
        if request is None and turn is None and admission.default is None:
            return None
        return admission.admit(request, as_list=as_list, conversation_id=conversation_id, conversation=turn)

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, dialect: Dialect, call: SteeredCall | None, body: bytes
    ) -> None:
        scope["headers"] = [
            (name, str(len(body)).encode() if name == b"content-length" else value) for name, value in scope["headers"]
        ]
        if call is None:
            await self._app(scope, receive, send)
            return
        token = current_call.set(call)
        editor = AnswerEditor(send, call, dialect)
        try:
            await self._app(scope, receive, editor.send)
        except Exception:
            # A stream's handler has begun its answer, as it believes, when the refusal reaches it.
            if not await editor.fail():
                raise
        finally:
            current_call.reset(token)
            assert self._state.admission is not None
            release = partial(self._state.admission.release, call.admitted.digests)
            # After a disconnect the engine may start the request before it hears of the abort, and wants its numbers.
            asyncio.get_running_loop().call_later(0 if editor.complete else _ABORT_GRACE_SECONDS, release)


class MiddlewareState:
    """What the middleware and the routes share. `admission` is None until the engine is up; `server_keys`: vLLM's own
    `--api-key`s; `guarded`: the prefixes of paths for which vLLM itself asks for one."""

    def __init__(self, config: FrontConfig, contract: str) -> None:
        self.config = config
        self.contract = contract
        self.server_keys: tuple[str, ...] = ()
        self.guarded: tuple[str, ...] = ("/v1",)
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
        return _authorization(scope)[1].decode("latin-1")

    @property
    def server_key(self) -> bool:
        """Whether vLLM itself asks for a key."""
        return bool(self.server_keys)


def conversation_key(principal: str, conversation_id: str) -> str:
    """What stands for a conversation outside of this process: neither the API key nor the id can be read from it."""
    content = len(principal).to_bytes(8, "little") + principal.encode() + conversation_id.encode()
    return hashlib.sha256(b"steergate/conversation/1\0" + content).hexdigest()


def _not_here(path: str, member: str = "steering") -> SteeringError:
    return _only_carrying(f"{path} does not carry steering.", member)


def _not_inherited_here(path: str) -> SteeringError:
    return _only_carrying(f"This server has default steering, which {path} does not carry.", None)


def _only_carrying(why: str, member: str | None) -> SteeringError:
    routes = ", ".join(sorted(CARRYING_ROUTES))
    return SteeringError("steering_not_supported_here", f"{why} These routes do: {routes}.", member)


def _route_path(scope: Scope) -> str:
    """The path as vLLM's router matches it: without a root path, and without a last slash, which it redirects."""
    path: str = scope["path"]
    root = scope.get("root_path", "")
    if root and path.startswith(f"{root}/"):
        path = path[len(root) :]
    return path.rstrip("/") or "/"


def _authorization(scope: Scope) -> tuple[bytes, bytes]:
    """Scheme and token of the header `Authorization`; empty where there are none."""
    given: bytes = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    scheme, _, token = given.partition(b" ")
    return scheme, token


def _bears_key(scope: Scope, keys: Sequence[str]) -> bool:
    """Whether a request bears one of vLLM's keys, or there is none: vLLM asks for it under some prefixes only."""
    scheme, token = _authorization(scope)
    # Every key is compared, in constant time, so that the time tells nothing.
    matches = [hmac.compare_digest(token, key.encode()) for key in keys]
    return not keys or (scheme.lower() == b"bearer" and any(matches))


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
