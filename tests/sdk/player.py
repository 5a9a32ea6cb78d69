"""A real HTTP server on 127.0.0.1 that records requests and plays answers."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

CONTRACT = {"X-Steering-Contract": "1.0"}
APPLIED = {**CONTRACT, "X-Steering-Applied": "5f1d"}


class Recorded(NamedTuple):
    """A request as it arrived."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Played(NamedTuple):
    """An answer to play. Status 0 closes the connection without one."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = CONTRACT
    delay: float = 0.0

    @property
    def raw(self) -> bytes:
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body, ensure_ascii=False).encode()


class Player:
    """Plays its answers in order, the last one again and again."""

    def __init__(self) -> None:
        self.url = ""
        self.answers: list[Played] = [Played(body={})]
        self.requests: list[Recorded] = []

    def play(self, *answers: Played) -> None:
        self.answers = [*answers]
        self.requests.clear()

    def next(self) -> Played:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def chat_body(text: str | None = "hi", **more: Any) -> dict[str, Any]:
    """The body of a chat answer."""
    return {"id": "c", "choices": [{"index": 0, "message": {"role": "assistant", "content": text}}], **more}


def refusal(code: str, message: str = "No.", param: str | None = None) -> dict[str, Any]:
    """The body of a refusal."""
    return {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": code}}


REPORT = {
    "fingerprint": "5f1d",
    "default": "none",
    "vectors": [],
    "choices": [
        {
            "index": 0,
            "vectors": [{"label": None, "digest": "0" * 64, "algorithm": "direct", "sites": ["3:post_block"]}],
            "gates": [
                {
                    "label": "calm",
                    "when": "probe",
                    "scope": "this_token",
                    "apply": "a word of a newer server",
                    "status": "ran",
                    "evaluated": 9,
                    "fired": 2,
                    "first_fired": 11,
                    "last_fired": 12,
                    "max_score": 1.5,
                    "latched": False,
                    "sites_out_of_reach": [],
                    "first_answer_token": "untouched",
                    "scores": [[11, 1.5]],
                    "a member of a newer server": {},
                }
            ],
        }
    ],
}

CAPABILITIES = {
    "contract": "1.0",
    "model": "demo",
    "hidden_width": 4,
    "layers": 6,
    "hooks": [
        {"hook": hook, "component": component, "width": width, "layers": [*range(6)], "steerable": steerable}
        for hook, component, width, steerable in [
            ("attn_heads", "attention_heads", 8, False),
            ("router_logits", "router_logits", 3, True),
            ("post_block", "hidden_states", 4, True),
        ]
    ],
    "algorithms": {
        name: {
            "payload_kind": kind,
            "source": "none",
            "normalize": False,
            "params": params,
            "target_component": component,
            "enabled": enabled,
            "graph_mode": "in_graph" if enabled else None,
        }
        for name, kind, params, component, enabled in [
            ("direct", "direction", [], "hidden_states", True),
            ("erase", "direction", [], "hidden_states", False),
            ("linear", "linear", [], "hidden_states", True),
            ("moe_router", "router", ["mode", "expert_ids"], "router_logits", True),
            ("my_own", "direction", ["depth"], "hidden_states", True),
        ]
    },
    "sources": ["name", "inline"],
    "gates": True,
    "graph_mode": "in_graph",
    "limits": {
        "vectors": 16,
        "gates": 2,
        "inline_bytes": 64,
        "graph_rank": 32,
        "slots": 1023,
        "pool_rows": {"hidden_states": 4095},
    },
}


@contextmanager
def player() -> Iterator[Player]:
    """Serve for the length of the `with` block."""
    state = Player()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items()}
            state.requests.append(Recorded(self.command, self.path, headers, body))
            answer = state.next()
            time.sleep(answer.delay)
            if answer.status == 0:
                self.close_connection = True
                return
            self.send_response(answer.status)
            for name, value in {"Content-Length": str(len(answer.raw)), **answer.headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(answer.raw)

        do_GET = do_POST = _answer  # noqa: N815 (the names that http.server looks for)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
