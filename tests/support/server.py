"""A real `steergate-serve` process for the HTTP tests, and a small client of its generate routes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import httpx

MODEL_NAME = "tiny"

PROMPT = [254, *range(5, 29), 255]
"""Token ids that both a completion's prompt and a single chat message of `t5` to `t28` come down to."""

ROUTES = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
"""The routes whose answers tell token ids, by a short name."""

EVERY_ROUTE = ROUTES | {
    "batch": "/v1/chat/completions/batch",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
    "invocations": "/invocations",
}
"""All routes that carry steering."""

COMMAND = (sys.executable, "-m", "steergate_server.vllm_plugin.serve")
"""The console script `steergate-serve`, spelled so that it runs under this very interpreter."""

SETTINGS = (
    *("--dtype", "float32"),
    *("--max-model-len", "512"),
    *("--max-num-seqs", "16"),
    *("--kv-cache-memory-bytes", "67108864"),
    *("--host", "127.0.0.1"),
    *("--served-model-name", MODEL_NAME),
    "--enforce-eager",
)
"""vLLM flags that keep a tiny model small and quick."""

QUIET = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}
"""No network, no usage reports, a loopback address for vLLM's own sockets, one thread for each process."""

_INHERITED_SETTINGS = ("VLLM_API_KEY", "VLLM_PLUGINS", "VLLM_SERVER_DEV_MODE")
"""Variables of the caller that would change what a server does; ours, `STEERGATE_*`, are dropped as well."""


class Server(NamedTuple):
    """A server that answers: its address, the process that was started, and the file of its output."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def tail(self, lines: int = 60) -> str:
        """The end of the log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def spool(self) -> Path:
        """The folder of payloads, as the engine's process was told."""
        for child in _descendants(self.process.pid):
            with suppress(OSError):
                for entry in Path(f"/proc/{child}/environ").read_bytes().split(b"\0"):
                    name, _, value = entry.partition(b"=")
                    if name == b"STEERGATE_SPOOL":
                        return Path(value.decode())
        raise AssertionError("no process of this server knows the spool")


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment, without what would change the server, and with `more`."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in _INHERITED_SETTINGS and not name.startswith("STEERGATE_")
    }
    return {**kept, **QUIET, **(more or {})}


@contextmanager
def steergate_serve(
    model: Path,
    log: Path,
    arguments: Sequence[str] = (),
    *,
    variables: Mapping[str, str] | None = None,
    limit: float = 180,
) -> Iterator[Server]:
    """Run a server for the length of the `with` block.

    Args:
        model: Folder of the model.
        log: File that takes everything the server prints.
        arguments: More of the command line.
        variables: More of the environment.
        limit: Seconds until it must answer.

    Raises:
        AssertionError: It ended, or did not answer in time; the message shows the end of the log.
    """
    port = _free_port()
    command = [*COMMAND, str(model), *SETTINGS, "--port", str(port), *arguments]
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment(variables),
            start_new_session=True,
        )
    server = Server(f"http://127.0.0.1:{port}", process, log)
    try:
        _wait(server, limit)
        yield server
    finally:
        _end(process)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait(server: Server, limit: float) -> None:
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            raise AssertionError(f"the server ended with {server.process.returncode}:\n{server.tail()}")
        with suppress(httpx.TransportError):
            if httpx.get(f"{server.url}/health", timeout=5, trust_env=False).status_code == 200:
                return
        time.sleep(0.1)
    raise AssertionError(f"the server did not answer within {limit} s:\n{server.tail()}")


def _end(process: subprocess.Popen[bytes], limit: float = 20) -> None:
    """End the group that was started: politely, and after `limit` seconds by force, leftovers of the group too."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(limit)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _descendants(pid: int) -> Iterator[int]:
    """A process and its children, the engine's among them."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in task.read_text().split():
                yield from _descendants(int(child))


class Choice(NamedTuple):
    """One choice of an answer. `tokens`: their ids; `logprobs`: of the chosen tokens."""

    tokens: list[int]
    logprobs: list[float]
    text: str


class Answer(NamedTuple):
    """An answer: `body` is that of a whole answer or an error, `events` are the chunks of a stream before `[DONE]`."""

    status: int
    headers: httpx.Headers
    body: dict[str, Any]
    events: list[dict[str, Any]]
    choices: list[Choice]

    @property
    def tokens(self) -> list[int]:
        """The first choice's token ids."""
        return self.choices[0].tokens

    @property
    def logprobs(self) -> list[float]:
        """The log-probabilities of the first choice's tokens."""
        return self.choices[0].logprobs

    @property
    def text(self) -> str:
        """The first choice's text."""
        return self.choices[0].text

    @property
    def fingerprint(self) -> str | None:
        """The header that says which plan was applied."""
        return self.headers.get("x-steering-applied")

    @property
    def report(self) -> dict[str, Any] | None:
        """The steering report, from wherever this kind of answer carries it."""
        found = [event["steering_report"] for event in self.events if "steering_report" in event]
        assert len(found) <= 1, "a stream carries one report"
        return found[0] if found else self.body.get("steering_report")

    @property
    def error(self) -> dict[str, Any]:
        """The error of a refusal."""
        error: dict[str, Any] = self.body["error"]
        return error


def request_body(
    route: str, prompt: Sequence[int] | Sequence[Sequence[int]] = PROMPT, **members: Any
) -> dict[str, Any]:
    """The body of a greedy request for 12 tokens with logprobs, where the route has them; `members` are set last.

    route: of `EVERY_ROUTE`. The one prompt is the first conversation of a batch, too.
    """
    body: dict[str, Any] = {"model": MODEL_NAME, "temperature": 0, "max_tokens": 12, "ignore_eos": True}
    if route == "completions":
        return {**body, "prompt": prompt, "logprobs": 1, "return_token_ids": True, **members}
    messages: Any = [{"role": "user", "content": words(prompt)}]
    if route == "responses":
        del body["max_tokens"]
        body |= {"input": messages, "max_output_tokens": 12, "include": ["message.output_text.logprobs"]}
        return {**body, "top_logprobs": 1, **members}
    if route != "messages":
        body |= {"logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    return {**body, "messages": [messages] if route == "batch" else messages, **members}


def words(prompt: Sequence[Any]) -> str:
    """The text that a chat template turns into these token ids."""
    return " ".join(f"t{token}" for token in prompt[1:-1])


class Api:
    """One client of one server, over connections that are kept alive; `headers` go with every request."""

    def __init__(self, server: Server, headers: Mapping[str, str] | None = None) -> None:
        self.url = server.url
        # A connection is given up before the server closes it, after five seconds: a request must not meet its end.
        limits = httpx.Limits(keepalive_expiry=2.0)
        self.http = httpx.Client(base_url=server.url, headers=headers, timeout=60, trust_env=False, limits=limits)

    def __enter__(self) -> Api:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def ask(self, route: str, prompt: Any = PROMPT, **members: Any) -> Answer:
        """Send a generate request (see `request_body`) and read its answer to the end."""
        return self.send(EVERY_ROUTE[route], request_body(route, prompt, **members))

    def send(self, path: str, body: Any, headers: Mapping[str, str] | None = None, method: str = "POST") -> Answer:
        """Send a body, given as JSON values or as bytes, and read the answer to the end."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        response = self.http.request(
            method, path, content=content, headers={"content-type": "application/json", **(headers or {})}
        )
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            events = _events(response.text)
            return Answer(response.status_code, response.headers, {}, events, _choices(events))
        try:
            whole = response.json()
        except ValueError:
            whole = {}
        return Answer(response.status_code, response.headers, whole, [], _choices([whole]))

    def register(self, name: str, kind: str, packed: Mapping[str, Any], key: str, **members: Any) -> Answer:
        """Register a direction."""
        body = {"name": name, "kind": kind, "packed": packed, **members}
        return self.send("/v1/steering/vectors/register", body, {"X-Steering-API-Key": key})

    def unregister(self, name: str, kind: str, key: str) -> Answer:
        """Unregister a name."""
        body = {"name": name, "kind": kind}
        return self.send("/v1/steering/vectors/unregister", body, {"X-Steering-API-Key": key})

    def put_default(self, definition: Any, key: str) -> Answer:
        """Put a server default in force."""
        return self.send("/v1/steering/default", definition, {"X-Steering-API-Key": key}, "PUT")

    def clear_default(self, key: str) -> None:
        """Take the server default out of force."""
        response = self.http.delete("/v1/steering/default", headers={"X-Steering-API-Key": key})
        assert response.json() == {"default": None}, response.text

    def forget(self, conversation: str) -> httpx.Response:
        """Forget what a conversation latched."""
        return self.http.delete(f"/v1/steering/conversations/{conversation}")

    def status(self, key: str) -> dict[str, Any]:
        """What steering holds."""
        response = self.http.get("/v1/steering/status", headers={"X-Steering-API-Key": key})
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def metric(self, name: str) -> float:
        """The value of one of vLLM's metrics, over all its labels."""
        lines = self.http.get("/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{name}{{"))


_LAST_EVENTS = ("response.completed", "message_stop", "error")
"""The types of the events that end a stream of named events."""


def _events(text: str) -> list[dict[str, Any]]:
    """The events of a stream, which must end with `[DONE]`, or with an event that ends streams of its kind."""
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if data[-1] == "[DONE]":
        return [json.loads(line) for line in data[:-1]]
    events: list[dict[str, Any]] = [json.loads(line) for line in data]
    names = [line.removeprefix("event: ") for line in text.splitlines() if line.startswith("event: ")]
    assert names == [event["type"] for event in events]
    assert names[-1] in _LAST_EVENTS, text
    return events


def _choices(bodies: Sequence[Mapping[str, Any]]) -> list[Choice]:
    """The choices of a whole answer, or of the chunks of a stream put together."""
    found: dict[int, Choice] = {}
    for body in bodies:
        for choice in body.get("choices", ()):
            whole = found.setdefault(choice["index"], Choice([], [], ""))
            part = choice.get("text")
            if part is None:
                part = (choice.get("message") or choice.get("delta") or {}).get("content") or ""
            found[choice["index"]] = Choice(
                whole.tokens + (choice.get("token_ids") or []),
                whole.logprobs + _logprobs(choice.get("logprobs") or {}),
                whole.text + part,
            )
    if not found:
        parts = [part for body in bodies for part in _parts(body)]
        text = "".join(part.get("text") or part.get("delta") or "" for part in parts)
        logprobs = [entry["logprob"] for part in parts for entry in part.get("logprobs") or ()]
        return [Choice([], logprobs, text)] if parts else []
    return [found[index] for index in sorted(found)]


def _parts(body: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The pieces of text of a whole response or message, or of one event of their streams."""
    if body.get("type") == "content_block_delta":
        return [body["delta"]]
    if body.get("type") == "response.output_text.delta":
        return [body]
    if body.get("object") == "response":
        return [part for item in body["output"] for part in item["content"]]
    return list(body["content"]) if body.get("type") == "message" else []


def _logprobs(given: Mapping[str, Any]) -> list[float]:
    """The log-probabilities of the chosen tokens, as completions or as chat write them."""
    if "token_logprobs" in given:
        return list(given["token_logprobs"])
    return [entry["logprob"] for entry in given.get("content") or ()]
