"""The synchronous client."""

from __future__ import annotations

import builtins
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import _protocol as protocol
from ._default import Default
from ._generated.answers import (
    CapabilitiesAnswer,
    ForgetAnswer,
    RegisterAnswer,
    StatusAnswer,
    UnregisterAnswer,
    ValidateAnswer,
    VectorInfo,
)
from ._generated.models import InlinePayload, InlineVec
from ._generated.words import VectorKind
from ._messages import Call, Keys, Reply
from ._model_ring import check_plan
from ._sources import AnyPayload
from ._transport import Transport
from .body import Plan
from .errors import SteeringOverriddenWarning
from .vectors import VectorSet

if TYPE_CHECKING:
    import httpx

__all__ = ["Default", "Reply", "SteeringClient", "Vectors"]


class SteeringClient:
    """Talks to one SteerGate server. Threads may share a client; close it, or use it as a context manager.

    Args:
        base_url: The server's address, with or without `/v1`. Else `STEERGATE_BASE_URL`, else `http://localhost:8000`.
        api_key: The server's API key. Else `STEERGATE_API_KEY`.
        steering_api_key: The key that changing registered vectors takes. Else `STEERGATE_STEERING_API_KEY`.
        timeout: Seconds that an answer may take, or httpx's own timeouts. Else `STEERGATE_TIMEOUT`, else 600, of which
            connecting may take 5.
        max_retries: How often a call is tried again: where the connection fails, and on 408, 409, 429 and 5xx, after
            `Retry-After` or a growing, jittered wait.
        http_client: An `httpx.Client` to use, with its own proxies, certificates and limits. It is not closed.

    Examples:
        >>> from steergate import SteeringClient, When
        >>> calm = When.always().scope("this_token").add("calm", strength=2.0)
        >>> with SteeringClient("http://localhost:8000") as client:  # doctest: +SKIP
        ...     reply = client.chat(model="demo", messages=[{"role": "user", "content": "Hello"}], steering=calm)
        ...     print(reply.text)
        Hello, and welcome.
    """

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        steering_api_key: str | None = None,
        timeout: float | httpx.Timeout | None = None,
        max_retries: int = 2,
        http_client: httpx.Client | None = None,
    ) -> None:
        keys = Keys(
            api_key or os.environ.get("STEERGATE_API_KEY") or None,
            steering_api_key or os.environ.get("STEERGATE_STEERING_API_KEY") or None,
        )
        url = base_url or os.environ.get("STEERGATE_BASE_URL") or "http://localhost:8000"
        limit = _timeout_from_environment() if timeout is None else timeout
        self._transport = Transport(url, keys, limit, max_retries, http_client)
        self._capabilities: CapabilitiesAnswer | None = None
        self.vectors = Vectors(self._transport)
        self.default = Default(self._transport)

    # Generation

    def chat(
        self,
        *,
        model: str,
        messages: Sequence[Mapping[str, Any]],
        steering: Plan = None,
        conversation_id: str | None = None,
        **openai_fields: Any,
    ) -> Reply:
        """Let the model answer a conversation.

        Args:
            model: Name of the served model.
            messages: The conversation, as OpenAI's API has it.
            steering: A `Steering`, a gate, a list of gates; False for no steering at all, not even the server's
                default; None for the default alone.
            conversation_id: Name of the conversation, which the scope `rest_of_conversation` needs.
            openai_fields: Further members of the body, such as `temperature`, `max_tokens`, `n`.

        Raises:
            InvalidSteering: The plan breaks a rule; nothing was sent.
            APIStatusError: The server refused.
            APIConnectionError: The server was not reached.
            SteeringNotAppliedError: The plan was sent, and the answer does not say that it was applied.
            NotImplementedError: `stream=True`.

        Examples:
            >>> messages = [{"role": "user", "content": "Review the hotel."}]
            >>> client.chat(model="demo", messages=messages, max_tokens=40, temperature=0).text  # doctest: +SKIP
            'The hotel was fine.'
        """
        members = {"model": model, "messages": list(messages), **openai_fields}
        return self._generate(protocol.chat_call(members, steering, conversation_id))

    def complete(
        self,
        *,
        model: str,
        prompt: str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]],
        steering: Plan = None,
        conversation_id: str | None = None,
        **openai_fields: Any,
    ) -> Reply:
        """Let the model continue a prompt.

        Args:
            model: Name of the served model.
            prompt: The prompt, several of them, or token ids.
            steering: As for `chat`.
            conversation_id: As for `chat`.
            openai_fields: Further members of the body.

        Raises:
            SteerGateError: As for `chat`.

        Examples:
            >>> client.complete(model="demo", prompt="The hotel was", max_tokens=8).text  # doctest: +SKIP
            ' clean and quiet.'
        """
        members = {"model": model, "prompt": prompt if isinstance(prompt, str) else list(prompt), **openai_fields}
        return self._generate(protocol.completion_call(members, steering, conversation_id))

    def _generate(self, call: Call) -> Reply:
        reply = protocol.parse_reply(call, self._transport.send(call))
        if reply.overridden is not None:
            message = f"The server did not run everything that was asked for: {reply.overridden} overridden."
            warnings.warn(message, SteeringOverriddenWarning, stacklevel=3)
        return reply

    # What the server can do

    def capabilities(self) -> CapabilitiesAnswer:
        """Return what the server and its model can do. It is asked once; later calls return the same answer.

        Examples:
            >>> client.capabilities().algorithms["direct"].enabled  # doctest: +SKIP
            True
        """
        if self._capabilities is None:
            answer = self._transport.send(protocol.get_call("capabilities"))
            self._capabilities = protocol.parse(answer, CapabilitiesAnswer)
        return self._capabilities

    def check(self, plan: Plan) -> None:
        """Check a plan against this very server, as far as its capabilities tell.

        Beside the rules, which building the plan has checked: whether algorithms are enabled, gates switched on and not
        too many, and whether inline vectors have layers, hooks and widths that the model has. Names of registered
        vectors are not looked up.

        Raises:
            InvalidSteering: With `param` as `chat` would send it.

        Examples:
            >>> client.check(plan)  # doctest: +SKIP
        """
        check_plan(plan, self.capabilities())

    def validate(self, plan: Plan) -> ValidateAnswer:
        """Have the server check a plan, names and all, without running anything.

        Returns:
            Whether it would be admitted, and everything that is wrong with it; `param` starts at the plan.

        Examples:
            >>> [error.code for error in client.validate(plan).errors]  # doctest: +SKIP
            ['unknown_vector']
        """
        return protocol.parse(self._transport.send(protocol.validate_call(plan)), ValidateAnswer)

    def status(self) -> StatusAnswer:
        """Return what steering holds on the server, and its counters. Needs the steering key.

        Examples:
            >>> client.status().live_requests  # doctest: +SKIP
            3
        """
        return protocol.parse(self._transport.send(protocol.status_call()), StatusAnswer)

    def forget(self, conversation_id: str) -> ForgetAnswer:
        """Forget what gates of scope `rest_of_conversation` latched in a conversation.

        Raises:
            InvalidSteering: It can be no conversation's id.

        Examples:
            >>> client.forget("support-4711").status  # doctest: +SKIP
            'forgotten'
        """
        return protocol.parse(self._transport.send(protocol.forget_call(conversation_id)), ForgetAnswer)

    def close(self) -> None:
        """Close the connections."""
        self._transport.close()

    def __enter__(self) -> SteeringClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"SteeringClient({self._transport.shown_url!r})"


class Vectors:
    """The server's registered vectors, as `client.vectors`.

    Examples:
        >>> from steergate.vectors import VectorSet
        >>> calm = VectorSet.load("calm.safetensors")  # doctest: +SKIP
        >>> client.vectors.register("calm", calm, kind="steer").status  # doctest: +SKIP
        'created'
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def register(
        self,
        name: str,
        source: VectorSet | AnyPayload | InlineVec | InlinePayload,
        *,
        kind: VectorKind,
        metadata: Mapping[str, Any] | None = None,
        replace: bool = False,
    ) -> RegisterAnswer:
        """Register a vector. Needs the steering key.

        Args:
            name: Its name: letters, digits, `.`, `_` and `-`, at most 128.
            source: A `VectorSet`, or a payload of `steergate.payloads`.
            kind: `steer` for vectors that steer, `probe` for those that gates look with. Two namespaces.
            metadata: Notes of your own, which `list` and `show` give back.
            replace: Let a name that exists with other content move to this one.

        Returns:
            Status `created`, `unchanged` or `replaced`, and the digest of the numbers.

        Raises:
            ConflictError: The name exists with other content.
            InvalidSteering: The numbers are not in order; nothing was sent.
            APIStatusError: The server refused.

        Examples:
            >>> client.vectors.register("calm", VectorSet.from_rows({3: [0.5, 1.0]}), kind="steer")  # doctest: +SKIP
        """
        call = protocol.register_call(name, source, kind, metadata, replace)
        return protocol.parse(self._transport.send(call), RegisterAnswer)

    def list(self, kind: VectorKind | None = None, name: str | None = None) -> builtins.list[VectorInfo]:
        """List what is registered, by name; all of it, or one namespace, or one name.

        Examples:
            >>> [vector.name for vector in client.vectors.list(kind="probe")]  # doctest: +SKIP
            ['refusal']
        """
        return protocol.parse(self._transport.send(protocol.vectors_call(kind, name)), list[VectorInfo])

    def show(self, kind: VectorKind, name: str) -> VectorInfo:
        """Describe one vector.

        Raises:
            NotFoundError: There is none of that name.

        Examples:
            >>> client.vectors.show("steer", "calm").layers  # doctest: +SKIP
            [10, 11, 12]
        """
        return protocol.parse(self._transport.send(protocol.vector_call(kind, name)), VectorInfo)

    def unregister(self, name: str, kind: VectorKind) -> UnregisterAnswer:
        """Forget a name. Requests that run keep their numbers. Needs the steering key.

        Raises:
            NotFoundError: There is none of that name.

        Examples:
            >>> client.vectors.unregister("calm", kind="steer").status  # doctest: +SKIP
            'unregistered'
        """
        return protocol.parse(self._transport.send(protocol.unregister_call(name, kind)), UnregisterAnswer)


def _timeout_from_environment() -> float | None:
    given = os.environ.get("STEERGATE_TIMEOUT")
    if not given:
        return None
    try:
        return float(given)
    except ValueError:
        raise ValueError(f"STEERGATE_TIMEOUT is {given!r}. Give a number of seconds.") from None
