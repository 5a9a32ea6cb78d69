"""A process for each engine, all alive side by side, that answer commands over a pipe one at a time."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.engines import SteeredSession, StockSession
from benchmarks.hooks import HookSession
from benchmarks.model import FOLDER

SESSIONS: dict[str, type[StockSession] | type[HookSession]] = {
    "stock": StockSession,
    "control": StockSession,
    "steered": SteeredSession,
    "hooks": HookSession,
}

_PATIENCE_SECONDS = 900.0

_QUIET_SECONDS = 0.01
"""OpenMP's threads spin for some milliseconds after their last work, at the expense of the next process's first."""


class Remote:
    """One engine in a process of its own."""

    def __init__(self, kind: str, **settings: Any) -> None:
        # Its processes end at once (see _serve), and Python's tracker, which then cleans up after them, says so.
        os.environ["PYTHONWARNINGS"] = "ignore:resource_tracker:UserWarning"
        context = multiprocessing.get_context("spawn")
        self.kind = kind
        self._connection, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, kind, settings), daemon=True)
        self._process.start()
        there.close()

    def ready(self) -> None:
        """Wait until it is up. Raises RuntimeError where it does not come up."""
        self._answer()

    def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the session over there. Raises RuntimeError with what went wrong in it."""
        time.sleep(_QUIET_SECONDS)
        self._connection.send((method, arguments))
        return self._answer()

    def _answer(self) -> Any:
        if not self._connection.poll(_PATIENCE_SECONDS):
            raise RuntimeError(f"the process `{self.kind}` has not answered for {_PATIENCE_SECONDS:.0f} s")
        try:
            fine, value = self._connection.recv()
        except EOFError:
            raise RuntimeError(f"the process `{self.kind}` ended") from None
        if not fine:
            raise RuntimeError(f"in the process `{self.kind}`:\n{value}")
        return value

    def close(self) -> None:
        """End the process."""
        self._connection.close()
        self._process.join(10)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(connection: Connection, kind: str, settings: dict[str, Any]) -> None:
    # vLLM and PyTorch write from C, too. What goes wrong comes back over the pipe.
    with (FOLDER / f"{kind}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    try:
        session: Any = SESSIONS[kind](**settings)
        connection.send((True, None))
        while True:
            method, arguments = connection.recv()
            connection.send((True, getattr(session, method)(*arguments)))
    except EOFError:
        pass
    except BaseException:
        connection.send((False, traceback.format_exc()))
    # vLLM's own end waits for threads and complains; the process has nothing to save.
    os._exit(0)


@contextmanager
def engines(*kinds: str, mode: str, **settings: Any) -> Iterator[list[Remote]]:
    """Engines that end with the block. They start together, but where they compile, since the first fills a cache."""
    with ExitStack() as stack:
        started = []
        for kind in kinds:
            started.append(Remote(kind, mode=mode, **settings))
            stack.callback(started[-1].close)
            if mode == "compiled":
                started[-1].ready()
        if mode != "compiled":
            for remote in started:
                remote.ready()
        yield started
