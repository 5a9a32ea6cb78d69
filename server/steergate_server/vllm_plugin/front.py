"""The HTTP side's entry point: what vLLM loads from the entry-point group `vllm.endpoint_plugins`."""

from __future__ import annotations

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from vllm import envs
from vllm.entrypoints.serve.middleware.authenticate import GUARDED_PREFIX

from steergate_server.algorithms.extensions import load_extensions
from steergate_server.registry.names import NameIndex
from steergate_server.registry.spool import Spool
from steergate_server.runtime.admission import Admission
from steergate_server.runtime.capacity import Capacity
from steergate_server.runtime.config import SPOOL_ENVIRONMENT, engine_config
from steergate_server.runtime.front_config import load_front_config
from steergate_server.runtime.sites import Site
from steergate_server.runtime.sources import ModelFacts
from steergate_server.schema.decode import decode
from steergate_server.schema.registry import ServerDefault
from steergate_server.schema.version import CONTRACT_VERSION
from steergate_server.vllm_plugin import metrics
from steergate_server.vllm_plugin.compat import check_vllm
from steergate_server.vllm_plugin.generate import wrap_generate
from steergate_server.vllm_plugin.middleware import MiddlewareState, SteeringMiddleware
from steergate_server.vllm_plugin.routes import Routes


class SteerGateEndpoint:
    """vLLM's endpoint-plugin protocol: routes and middleware first, the engine's facts once it is up."""

    name = "steergate"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        check_vllm()
        load_extensions()
        self._state = MiddlewareState(load_front_config(), CONTRACT_VERSION)

    def attach_router(self, app: FastAPI) -> None:
        """Add the steering routes and the middleware."""
        app.include_router(Routes(self._state).router())
        app.add_middleware(SteeringMiddleware, state=self._state)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:  # noqa: ARG002 - vLLM's protocol
        """Learn the model's sites from the workers, open admission, and wrap the engine client's `generate`."""
        config = engine_config(engine_client.vllm_config.additional_config)
        assert config is not None
        statuses = await engine_client.collective_rpc("steergate_status")
        sites = _sites_of(statuses)
        facts = ModelFacts(
            name=args.served_model_name[0] if args.served_model_name else args.model,
            layers=statuses[0]["layers"],
            hidden_width=engine_client.model_config.get_hidden_size(),
            sites=sites,
            capacity=Capacity(*statuses[0]["capacity"]),
            graph_mode=config.graph_mode,
            speculative=engine_client.vllm_config.speculative_config is not None,
        )
        self._state.guarded = GUARDED_PREFIX
        self._state.server_keys = tuple(filter(None, args.api_key or [envs.VLLM_API_KEY]))
        spool = Path(os.environ[SPOOL_ENVIRONMENT])
        self._state.admission = Admission(config, facts, NameIndex(Spool(spool)), sources=self._state.config.sources)

        async def send_message(message: str) -> None:
            # Between the requests that were sent before and after it, as nothing else of vLLM's is: see the scheduler.
            await engine_client.engine_core.abort_requests_async([message])

        async def ask_workers() -> list[dict[str, Any]]:
            answers: list[dict[str, Any]] = await engine_client.collective_rpc("steergate_status")
            return answers

        self._state.send_message = send_message
        self._state.ask_workers = ask_workers
        self._state.spool = spool
        metrics.watch(spool)
        wrap_generate(engine_client, self._state.admission, send_message)
        if self._state.config.default_file is not None:
            content = Path(self._state.config.default_file).read_bytes()
            self._state.admission.set_default(decode(content, ServerDefault))


def _sites_of(statuses: list[dict[str, Any]]) -> tuple[Site, ...]:
    """The sites as the first rank has them; every rank has the same, and perhaps another part of their rows."""
    first, *others = ([Site(*entry) for entry in status["sites"]] for status in statuses)
    if any([site[:3] for site in other] != [site[:3] for site in first] for other in others):
        raise RuntimeError("the ranks found different steering sites in the model, so it cannot be steered exactly")
    return tuple(first)
