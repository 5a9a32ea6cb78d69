"""The steering routes: capabilities and the named vectors."""

from __future__ import annotations

import asyncio
import hmac
from typing import Any, cast

import msgspec
from fastapi import APIRouter, Request, Response

from steergate_server.algorithms.registry import get_algorithm
from steergate_server.capabilities import ALGORITHM_CAPABILITIES, AlgorithmCapabilities
from steergate_server.registry.numbers import canonical
from steergate_server.runtime.admission import Admission
from steergate_server.runtime.config import EngineConfig
from steergate_server.runtime.conversations import forget_message
from steergate_server.runtime.engine_status import load_status
from steergate_server.runtime.front_config import FrontConfig
from steergate_server.runtime.resolve import SPECULATIVE_GATES
from steergate_server.schema.decode import decode, decode_conversation_id, decode_steering, encode
from steergate_server.schema.errors import SteeringError
from steergate_server.schema.hooks import HOOK_COMPONENTS, HOOKS, Component
from steergate_server.schema.payloads import DirectionPayload, Payload
from steergate_server.schema.registry import (
    AlgorithmInfo,
    CapabilitiesAnswer,
    DefaultAnswer,
    ErrorDetail,
    ForgetAnswer,
    HookInfo,
    Limits,
    RegisterAnswer,
    RegisterRequest,
    ServerDefault,
    StatusAnswer,
    UnregisterAnswer,
    UnregisterRequest,
    ValidateAnswer,
    WorkerStatus,
)
from steergate_server.schema.requests import MAX_VECTORS
from steergate_server.vllm_plugin import metrics
from steergate_server.vllm_plugin.middleware import MiddlewareState, conversation_key


class Routes:
    """Handlers over the shared state of one app."""

    def __init__(self, state: MiddlewareState) -> None:
        self._state = state

    def router(self) -> APIRouter:
        """A router with every steering route of this server."""
        router = APIRouter(prefix="/v1/steering")
        router.add_api_route("/capabilities", self._guarded(self.capabilities), methods=["GET"])
        router.add_api_route("/vectors", self._guarded(self.list_vectors), methods=["GET"])
        router.add_api_route("/vectors/{kind}/{name}", self._guarded(self.show_vector), methods=["GET"])
        router.add_api_route("/vectors/register", self._guarded(self.register), methods=["POST"])
        router.add_api_route("/vectors/unregister", self._guarded(self.unregister), methods=["POST"])
        router.add_api_route("/default", self._guarded(self.show_default), methods=["GET"])
        router.add_api_route("/default", self._guarded(self.put_default), methods=["PUT"])
        router.add_api_route("/default", self._guarded(self.clear_default), methods=["DELETE"])
        router.add_api_route("/status", self._guarded(self.status), methods=["GET"])
        router.add_api_route("/validate", self._guarded(self.validate), methods=["POST"])
        router.add_api_route("/conversations/{id}", self._guarded(self.forget), methods=["DELETE"])
        return router

    @property
    def _admission(self) -> Admission:
        assert self._state.admission is not None, "the server answers before its engine is up"
        return self._state.admission

    def _guarded(self, handler: Any) -> Any:
        async def endpoint(request: Request) -> Response:
            try:
                return _json(await handler(request))
            except SteeringError as error:
                return _json(error.body(), status=error.status)

        endpoint.__name__ = handler.__name__
        return endpoint

    async def capabilities(self, request: Request) -> CapabilitiesAnswer:  # noqa: ARG002 - one shape for all handlers
        """`GET /v1/steering/capabilities`."""
        admission = self._admission
        return capabilities_answer(admission, self._state.config, self._state.contract)

    async def list_vectors(self, request: Request) -> list[Any]:
        """`GET /v1/steering/vectors?kind=&name=`."""
        query = request.query_params
        return self._admission.names.list(kind=query.get("kind"), name=query.get("name"))

    async def show_vector(self, request: Request) -> Any:
        """`GET /v1/steering/vectors/{kind}/{name}`."""
        return self._admission.names.get(request.path_params["name"], request.path_params["kind"])

    async def register(self, request: Request) -> Any:
        """`POST /v1/steering/vectors/register`."""
        self._require_steering_key(request)
        body = decode(await _body(request, self._state.config.max_inline_bytes), RegisterRequest)
        if (body.packed is None) == (body.payload is None):
            raise SteeringError("missing_field", "Give exactly one of `packed` and `payload`.", "packed")
        payload = DirectionPayload(packed=body.packed) if body.packed is not None else body.payload
        assert payload is not None
        prefix = "" if body.packed is not None else "payload"
        # Hashing and syncing to disk must not hold up the streams of everybody else.
        return await asyncio.to_thread(self._register, body, payload, prefix)

    def _register(self, body: RegisterRequest, payload: Payload, prefix: str) -> RegisterAnswer:
        # The numbers first: a payload whose shape is off has no sites to speak of.
        canonical(payload, prefix)
        self._admission.check_registered(payload, tuple(filter(None, [prefix])))
        return self._admission.names.register(body.name, body.kind, payload, body.metadata, body.replace, prefix)

    async def unregister(self, request: Request) -> UnregisterAnswer:
        """`POST /v1/steering/vectors/unregister`."""
        self._require_steering_key(request)
        body = decode(await _body(request, 65_536), UnregisterRequest)
        return self._admission.names.unregister(body.name, body.kind)

    async def show_default(self, request: Request) -> DefaultAnswer:  # noqa: ARG002 - one shape for all handlers
        """`GET /v1/steering/default`."""
        default = self._admission.default
        return DefaultAnswer(default=None if default is None else default.told(self._admission.names))

    async def put_default(self, request: Request) -> DefaultAnswer:
        """`PUT /v1/steering/default`."""
        self._require_steering_key(request)
        body = decode(await _body(request, self._state.config.max_inline_bytes), ServerDefault)
        return DefaultAnswer(default=await asyncio.to_thread(self._admission.set_default, body))

    async def clear_default(self, request: Request) -> DefaultAnswer:
        """`DELETE /v1/steering/default`."""
        self._require_steering_key(request)
        self._admission.clear_default()
        return DefaultAnswer(default=None)

    async def status(self, request: Request) -> StatusAnswer:
        """`GET /v1/steering/status`."""
        self._require_steering_key(request)
        assert self._state.ask_workers is not None
        assert self._state.spool is not None
        workers = await self._state.ask_workers()
        return StatusAnswer(
            pool_used=max(worker["pool_used"] for worker in workers),
            pool_capacity=workers[0]["pool_capacity"],
            live_requests=max(worker["live"] for worker in workers),
            gates_installed=max(worker["gates"] for worker in workers),
            latches=load_status(self._state.spool).latches,
            one_principal=not self._state.server_key,
            latches_per_engine=True,
            workers=[
                WorkerStatus(
                    rank=rank,
                    graph_mode=worker["graph_mode"],
                    pool_used=worker["pool_used"],
                    pool_capacity=worker["pool_capacity"],
                )
                for rank, worker in enumerate(workers)
            ],
            counters=metrics.counters(),
        )

    async def validate(self, request: Request) -> ValidateAnswer:
        """`POST /v1/steering/validate`: everything that is wrong with a steering request, which is the whole body."""
        raw = await _body(request, self._state.config.max_inline_bytes)
        errors = await asyncio.to_thread(self._errors_of, raw)
        details = [ErrorDetail(**error.body()["error"]) for error in errors]
        return ValidateAnswer(valid=not details, errors=details)

    def _errors_of(self, raw: bytes) -> list[SteeringError]:
        try:
            steering = decode_steering(raw, "")
        except SteeringError as error:
            return [error]
        if steering is False:
            try:
                self._admission.admit_opt_out(None, param=None)
            except SteeringError as error:
                return [error]
            return []
        return self._admission.problems(steering, as_list=raw.lstrip()[:1] == b"[")

    async def forget(self, request: Request) -> ForgetAnswer:
        """`DELETE /v1/steering/conversations/{id}`: a conversation of the client's own."""
        name = request.path_params["id"]
        decode_conversation_id(msgspec.json.encode(name))
        assert self._state.send_message is not None
        key = conversation_key(self._state.principal(request.scope), name)
        await self._state.send_message(forget_message(key))
        return ForgetAnswer(status="forgotten", conversation_id=name)

    def _require_steering_key(self, request: Request) -> None:
        """Mutations need the steering key: `X-Steering-API-Key`, or the bearer where vLLM itself has no key."""
        config = self._state.config
        if not config.keys:
            if config.development:
                return
            raise SteeringError(
                "steering_key_required",
                "This server has no steering key, so vectors cannot be changed. Start it with --steering-api-key.",
            )
        given = request.headers.get("x-steering-api-key")
        if given is None and not self._state.server_key:
            scheme, _, token = request.headers.get("authorization", "").partition(" ")
            given = token if scheme.lower() == "bearer" else None
        # Every key is compared, in constant time, so that the time tells nothing.
        matches = [hmac.compare_digest((given or "").encode(), key.encode()) for key in config.keys]
        if given is None:
            raise SteeringError("unauthorized", "No steering key was sent. Send it in the header X-Steering-API-Key.")
        if not any(matches):
            raise SteeringError("unauthorized", "The steering key is not one of this server's.")


def capabilities_answer(admission: Admission, config: FrontConfig, contract: str) -> CapabilitiesAnswer:
    """What this server can do, as the capabilities route tells it."""
    facts, engine = admission.facts, admission.config
    widths = {site.hook: site.width for site in facts.sites}
    return CapabilitiesAnswer(
        contract=contract,
        model=facts.name,
        hidden_width=facts.hidden_width,
        layers=facts.layers,
        hooks=[
            HookInfo(
                hook=hook,
                component=HOOK_COMPONENTS[hook],
                width=widths[hook],
                layers=[site.layer for site in facts.sites if site.hook == hook],
                steerable=True,
            )
            for hook in HOOKS
            if hook in widths
        ],
        algorithms={
            name: _algorithm_info(name, capability, engine)
            for name, capability in sorted(ALGORITHM_CAPABILITIES.items())
        },
        sources=[source for source in ("name", "inline") if source in config.sources],
        gates=engine.gates,
        gates_reason=_gates_reason(admission),
        graph_mode=facts.graph_mode,
        limits=Limits(
            vectors=MAX_VECTORS,
            gates=engine.max_gates if engine.gates else 0,
            inline_bytes=config.max_inline_bytes,
            graph_rank=engine.graph_max_rank,
            slots=facts.capacity.slots,
            pool_rows=facts.capacity.rows,
        ),
    )


def _gates_reason(admission: Admission) -> str | None:
    if not admission.config.gates:
        return "The operator switched gates off."
    return SPECULATIVE_GATES if admission.facts.speculative else None


def _algorithm_info(name: str, capability: AlgorithmCapabilities, engine: EngineConfig) -> AlgorithmInfo:
    enabled = name in engine.algorithms
    algorithm = get_algorithm(name)
    problem = algorithm.graph_payload_problem() if algorithm.graph_family is None else None
    return AlgorithmInfo(
        payload_kind=capability.payload_kind,
        source=capability.source,
        normalize=capability.normalize,
        params=list(capability.params),
        target_component=cast(Component, capability.target_component),
        enabled=enabled,
        graph_mode=engine.graph_mode if enabled else None,
        reason=problem or (engine.graph_reason if enabled else None),
    )


async def _body(request: Request, limit: int) -> bytes:
    """The request's body. Raises SteeringError (413) over the limit, counted in base64 characters."""
    allowed = limit * 4 // 3 + 65_536
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > allowed:
            raise SteeringError("payload_too_large", f"The body is larger than {allowed} bytes.", None)
        chunks.append(chunk)
    return b"".join(chunks)


def _json(value: Any, status: int = 200) -> Response:
    return Response(encode(value), status_code=status, media_type="application/json")
