"""The outermost middleware: every answer of the server, also one of vLLM's own key check, names the contract."""

from __future__ import annotations

from typing import Any

from steergate_server.schema.version import CONTRACT_VERSION


class ContractHeader:
    """Pure ASGI; added by vLLM's own `--middleware`, whose middlewares stand outside of all others."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve one connection."""

        async def sender(message: Any) -> None:
            if message["type"] == "http.response.start":
                header = (b"x-steering-contract", CONTRACT_VERSION.encode())
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        await self._app(scope, receive, sender if scope["type"] == "http" else send)
