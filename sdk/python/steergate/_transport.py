"""The one place that talks HTTP: sends a call, waits and tries again where that helps, reads the answer to its end."""

from __future__ import annotations

import sys
from time import sleep
from typing import Any

import httpx

from ._messages import Answer, Call, Keys
from ._protocol import (
    base_url,
    check_contract,
    headers_for,
    raise_for_status,
    retry_delay,
    without_secrets,
)
from .errors import APIConnectionError, APITimeoutError

__all__ = ["DEFAULT_TIMEOUT", "Transport"]

DEFAULT_TIMEOUT = 600.0
"""Seconds that an answer may take; a connection has 5."""


class Transport:
    """Sends calls to one server. Threads may share it."""

    def __init__(
        self,
        url: str,
        keys: Keys,
        timeout: float | httpx.Timeout | None,
        max_retries: int,
        http_client: httpx.Client | None,
    ) -> None:
        self._url = base_url(url)
        self.shown_url = without_secrets(self._url)
        self._keys = keys
        self._max_retries = max_retries
        self._owned = http_client is None
        # A client that was handed in keeps its own limits, unless others are asked for.
        self._options: dict[str, Any] = {} if http_client and timeout is None else {"timeout": _timeout(timeout)}
        # The server closes connections that were idle for five seconds, httpx's own time as well: a call must not meet
        # the end of one.
        limits = httpx.Limits(max_connections=100, max_keepalive_connections=20, keepalive_expiry=4.0)
        self._client: Any = http_client or httpx.Client(limits=limits)
        self._library = _library_of(self._client)
        self._contract_known = False

    def send(self, call: Call) -> Answer:
        """Send a call and return its answer, which is a success.

        Raises:
            APIStatusError: The server refused, or failed to the last attempt.
            APIConnectionError: It was not reached; APITimeoutError where it took too long.
            ContractMismatchError: It speaks another major of the contract.
        """
        attempt = 0
        while True:
            answer, error = self._attempt(call)
            delay = retry_delay(answer, attempt) if attempt < self._max_retries else None
            if error is not None and delay is None:
                raise error
            if answer is not None:
                self._contract_known = self._contract_known or check_contract(answer)
                if delay is None:
                    raise_for_status(answer)
                    return answer
            sleep(delay or 0.0)
            attempt += 1

    def _attempt(self, call: Call) -> tuple[Answer | None, APIConnectionError | None]:
        try:
            response = self._client.request(
                call.method,
                self._url + call.path,
                content=call.body,
                headers=headers_for(call, self._keys),
                **self._options,
            )
        except self._library.TimeoutException as error:
            return None, APITimeoutError(f"{self.shown_url} did not answer in time ({type(error).__name__}).")
        except self._library.RequestError as error:
            reason = str(error) or type(error).__name__
            return None, APIConnectionError(f"{self.shown_url} was not reached, or the connection broke: {reason}.")
        headers = {str(name).lower(): str(value) for name, value in response.headers.items()}
        return Answer(response.status_code, headers, response.content), None

    def close(self) -> None:
        """Close the connections, unless the HTTP client was handed in."""
        if self._owned:
            self._client.close()


def _timeout(timeout: float | httpx.Timeout | None) -> Any:
    if isinstance(timeout, int | float):
        return httpx.Timeout(timeout, connect=min(timeout, 5.0))
    return httpx.Timeout(DEFAULT_TIMEOUT, connect=5.0) if timeout is None else timeout


def _library_of(client: Any) -> Any:
    """Find the module whose errors a client raises: httpx, or its successor of the same shape."""
    tops = (base.__module__.partition(".")[0] for base in type(client).__mro__)
    return sys.modules[next((top for top in tops if top in ("httpx", "httpx2")), "httpx")]
