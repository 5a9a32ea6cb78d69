"""A model split over two ranks: the answers, books and decisions are those of the whole model.

Each rank is a process with half of the weights. vLLM's CPU build shares rows between them through shared memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from reference.models import HEAD_DIM, pack, random_direction
from reference.sources import Site
from reference.wire import ALWAYS_IN_ANSWER, EVERYWHERE, gate, probe, static
from steergate_server.runtime.config import EngineConfig
from steergate_server.schema.decode import decode, encode
from steergate_server.schema.registry import ServerDefault
from support.engines import SteeredEngine

from .algorithm_requests import HOOKS, LOWERABLE, STREAM_HOOKS, Requests
from .conftest import HIDDEN, REGISTERED, SETTINGS
from .oracle import Case, Oracle, check_batch, differ, prompt, run_cold
from .programs import matrix, rows_at

HEADS = 4 * HEAD_DIM
RANKS = 2


@pytest.fixture(scope="module")
def split(tiny: Path) -> Iterator[SteeredEngine]:
    """An engine over two ranks with an op at every hook, which traces what it applies."""
    with pytest.MonkeyPatch.context() as patch:
        # Left to itself vLLM gives each rank a NUMA node of its own, and stops where there are fewer.
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        config = EngineConfig(hooks=HOOKS, algorithms=LOWERABLE, memory_mib=64, trace=True)
        engine = SteeredEngine(tiny, config=config, tensor_parallel_size=RANKS, **SETTINGS)
    for kind, vectors in REGISTERED.items():
        for name, source in vectors.items():
            engine.register(name, kind, source["packed"])
    yield engine
    engine.close()


@pytest.fixture
def both(split: SteeredEngine) -> Iterator[SteeredEngine]:
    """The engine; after a test both ranks have applied the same, to the bit, and hold nothing."""
    split.llm.collective_rpc("steergate_trace")
    yield split
    # But for the numbers of the slots: each rank gives its own ones away.
    first, second = (
        [[*record[:5], record[6]] for record in records] for records in split.llm.collective_rpc("steergate_trace")
    )
    assert first == second
    assert first
    held = ("live", "gates", "pool_used", "slots_used", "probes_used", "payloads_held", "lanes_nonzero")
    for status in split.llm.collective_rpc("steergate_status"):
        assert {name: status[name] for name in held} == dict.fromkeys(held, 0)


def heads(seed: int, layers: list[int], norm: float = 6.0) -> dict[str, Any]:
    """Rows of attention's heads, all ranks'."""
    return random_direction(seed, HEADS, layers, "attn_heads", norm)


def test_each_rank_has_its_half_of_the_heads(split: SteeredEngine) -> None:
    for rank, status in enumerate(split.llm.collective_rpc("steergate_status")):
        half = [rank * HEADS // RANKS, (rank + 1) * HEADS // RANKS]
        assert [list(site) for site in status["sites"]] == [
            [layer, hook, *((HEADS, half) if hook == "attn_heads" else (HIDDEN, None))]
            for layer in range(4)
            for hook in ("pre_attn", "attn_heads", "post_attn", "mlp_in", "mlp_out", "post_block")
        ]


def test_static_steering_at_every_hook(both: SteeredEngine, oracle: Oracle) -> None:
    cases = [
        Case(prompt(700 + number, (3, 40, 70)[number % 3]), {"vectors": [static(packed)]}, 8)
        for number, packed in enumerate(
            [heads(1, [0]), heads(2, [1, 3])]
            + [random_direction(3 + number, HIDDEN, [0, 2], hook, 6.0) for number, hook in enumerate(STREAM_HOOKS)]
        )
    ]
    requests = Requests(7)
    cases += [requests.single(name)._replace(max_tokens=8) for name in LOWERABLE]
    for case in cases[:2]:
        case.request["vectors"][0]["algorithm"] = "attention_add"

    plain = run_cold(both, [case._replace(request=None) for case in cases])
    steered = check_batch(both, oracle, cases)

    assert all(map(differ, steered[:7], plain[:7]))


@pytest.mark.parametrize("half", range(RANKS))
def test_a_row_that_is_zero_on_one_rank(both: SteeredEngine, oracle: Oracle, half: int) -> None:
    row = np.random.default_rng(half).standard_normal(HEADS)
    row[half * HEADS // RANKS :][: HEADS // RANKS] = 0.0
    vector = static(pack("attn_heads", {1: row}), algorithm="attention_add")
    (plain,) = run_cold(both, [Case(prompt(720, 20), None, 6)])
    (steered,) = check_batch(both, oracle, [Case(prompt(720, 20), {"vectors": [vector]}, 6)])
    assert differ(plain, steered)


def test_gates_of_every_scope(both: SteeredEngine, oracle: Oracle) -> None:
    """Thresholds lie among the scores, so some fire and some do not; soft weights show what each rank decided on."""
    cases = [case._replace(max_tokens=8) for case in matrix(oracle, 8)[::7]]
    scopes = {one["scope"] for case in cases for one in case.request["gates"]}
    assert scopes == {"this_token", "next_step", "rest_of_request"}
    check_batch(both, oracle, cases)


def test_a_later_turn_is_bridged(both: SteeredEngine, oracle: Oracle) -> None:
    fires = probe(rows_at(70, [Site(1, "post_block")], 1.0), -1e4, at="answer")
    adds = {"kind": "add", "steer": {"kind": "name", "name": "last"}, "strength": 0.7}
    lasting = gate(fires, "rest_of_conversation", adds)
    first = Case(prompt(730, 9), {"gates": [lasting], "report": "summary"}, 5)
    (opening,) = both.steer([first.prompt], [first.request], 5, ["talk"])
    oracle.check(first, opening)
    later = Case([*first.prompt, *opening.tokens, 7], {"report": "summary"}, 5, {"bridged": [lasting]})
    (answer,) = both.steer([later.prompt], [later.request], 5, ["talk"])
    oracle.check(later, answer)


def test_a_locked_default(both: SteeredEngine, oracle: Oracle) -> None:
    default = {
        "vectors": [
            static(heads(8, [2]), algorithm="attention_add"),
            static(random_direction(9, HIDDEN, [1], "mlp_out", 6.0), {"answer": "all"}),
        ]
    }
    halved = gate(ALWAYS_IN_ANSWER, "this_token", {"kind": "attenuate", "keep": 0.5})
    requests = [None, {"vectors": [static(heads(10, [2]), algorithm="attention_add")], "gates": [halved]}]
    around = {"default": default, "locked": True}
    body = {**default, "client_gates": "allow", "locked": True}
    both.admission.set_default(decode(encode(body), ServerDefault))
    try:
        check_batch(both, oracle, [Case(prompt(740, 12), request, 6, around) for request in requests])
    finally:
        both.admission.clear_default()


@pytest.mark.parametrize("rank", range(RANKS))
def test_what_fails_on_one_rank_fails_the_request(both: SteeredEngine, oracle: Oracle, rank: int) -> None:
    """The rows of one rank's heads leave the range; only the first rank tells the scheduler."""
    row = np.zeros(HEADS)
    row[rank * HEADS // RANKS] = 3e37
    failing = {"vectors": [static(pack("attn_heads", {1: row}), EVERYWHERE, algorithm="attention_add")]}
    neighbour = Case(prompt(751, 20), {"vectors": [static(heads(11, [1]), algorithm="attention_add")]}, 6)
    failed, answer = run_cold(both, [Case(prompt(750, 20), failing, 6), neighbour])
    assert (failed.finish_reason, failed.ours["error"]["code"]) == ("error", "algorithm_failed")
    oracle.check(neighbour, answer)
