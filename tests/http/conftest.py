"""The servers of the HTTP tests, each started once, and the reference interpreter over the same model."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from reference.interpreter import generate
from reference.models import load_hf, random_direction, tiny_llama
from reference.results import Result
from reference.wire import ALWAYS, gate, inline, static
from support.server import PROMPT, Answer, Api, Server, steergate_serve

STEERING_KEY = "steering-key"
HIDDEN = 64

NAMED: dict[str, dict[str, Any]] = {
    "steer": {"happy": {"packed": random_direction(1, HIDDEN, [1, 2], norm=4.0)}},
    "probe": {"topic": {"packed": random_direction(3, HIDDEN, [1])}},
}
"""What is registered on the main server, as the reference takes it."""

LATCHED_BY_FILE = random_direction(42, HIDDEN, [2], norm=5.0)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the model and the servers' logs are."""
    return tmp_path_factory.mktemp("http")


@pytest.fixture(scope="session")
def model(folder: Path) -> Path:
    return tiny_llama(folder / "tiny")


@pytest.fixture(scope="session")
def server(model: Path, folder: Path) -> Iterator[Server]:
    """The main server: no `--api-key`, one steering key, two hooks, a small limit on inline numbers; it stores
    responses."""
    flags = ["--steer-hooks", "pre_attn,post_block", "--steering-api-key", STEERING_KEY, "--max-inline-bytes", "65536"]
    stores = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}
    with steergate_serve(model, folder / "server.log", flags, variables=stores) as running:
        with Api(running) as client:
            for kind, names in NAMED.items():
                for name, payload in names.items():
                    answer = client.register(name, kind, payload["packed"], STEERING_KEY)
                    assert answer.status == 200, answer.body
        yield running


@pytest.fixture(scope="session")
def api(server: Server) -> Iterator[Api]:
    """A client of the main server."""
    with Api(server) as client:
        yield client


@pytest.fixture(scope="session")
def key() -> str:
    """The main server's steering key."""
    return STEERING_KEY


@pytest.fixture(scope="session")
def guarded(model: Path, folder: Path) -> Iterator[tuple[Server, Server]]:
    """`keyed` and `restricted`, started side by side."""
    keyed = ["--api-key", "server-key", "--steering-api-key", "old-key", "--steering-api-key", "new-key"]
    keyed += ["--root-path", "/behind"]
    restricted = ["--steer-sources", "name", "--no-enable-declarative-gates"]
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        contexts = [
            steergate_serve(model, folder / "keyed.log", keyed),
            steergate_serve(model, folder / "restricted.log", restricted),
        ]
        started = list(pool.map(stack.enter_context, contexts))
        spools = [server.spool() for server in started]
        assert all(spool.is_dir() for spool in spools)
        yield started[0], started[1]
    assert not any(spool.exists() for spool in spools), "a server that ends in good order takes its spool with it"


@pytest.fixture(scope="session")
def keyed(guarded: tuple[Server, Server]) -> Server:
    """A server with a server key and two steering keys, as during a rotation."""
    return guarded[0]


@pytest.fixture(scope="session")
def restricted(guarded: tuple[Server, Server]) -> Server:
    """A server without a steering key, without gates, that takes registered vectors only."""
    return guarded[1]


FILE_DEFAULT: dict[str, Any] = {
    "vectors": [static(random_direction(41, HIDDEN, [1, 3], norm=3.0), {"answer": "all"})],
    "gates": [gate(ALWAYS, "rest_of_conversation", {"kind": "add", "steer": inline(LATCHED_BY_FILE), "strength": 0.5})],
    "client_gates": "allow",
}
"""The server default of `shared`, from a file."""


@pytest.fixture(scope="session")
def shared(model: Path, folder: Path) -> Iterator[Server]:
    """A server with two server keys, so two principals, and a server default from a file."""
    file = folder / "default.json"
    file.write_text(json.dumps(FILE_DEFAULT))
    flags = ["--api-key", "key-a", "key-b", "--steering-api-key", STEERING_KEY, "--steering-default", str(file)]
    with steergate_serve(model, folder / "shared.log", flags) as running:
        yield running


@pytest.fixture(scope="session")
def file_default() -> dict[str, Any]:
    """The server default of `shared`, as its file has it."""
    return FILE_DEFAULT


_conversations = itertools.count()


@pytest.fixture
def conversation() -> str:
    """The id of a conversation of this test's own."""
    return f"conversation-{next(_conversations)}"


@pytest.fixture
def put_default(api: Api, key: str) -> Iterator[Callable[[Any], Answer]]:
    """`put_default(definition)` on the main server, for the length of one test."""

    def put(definition: Any) -> Answer:
        answer = api.put_default(definition, key)
        assert answer.status == 200, answer.body
        return answer

    yield put
    api.clear_default(key)


Reference = Callable[..., Result]


@pytest.fixture(scope="session")
def reference(model: Path) -> Reference:
    """`reference(steering, prompt=PROMPT, max_tokens=12, **around)`: what the interpreter answers, each thing once.

    around: what else acts, by the interpreter's own words (`bridged`, `default`, `locked`).
    """
    torch.set_num_threads(1)
    return functools.partial(_run, load_hf(model), {})


def _run(
    network: Any,
    known: dict[str, Result],
    steering: Any,
    prompt: list[int] = PROMPT,
    max_tokens: int = 12,
    **around: Any,
) -> Result:
    key = json.dumps([steering, prompt, max_tokens, around], sort_keys=True)
    if key not in known:
        known[key] = generate(network, prompt, steering, vectors=NAMED, max_tokens=max_tokens, **around)
    return known[key]


@pytest.fixture(scope="session")
def plain(reference: Reference) -> Result:
    """The reference's unsteered answer to `PROMPT`."""
    return reference(None)
