"""Features of vLLM that touch rows, tokens or scheduling, beside steering: the answers stay the reference's.

One engine has them all: LoRA, structured output, priority scheduling, and little KV cache.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams

from reference import interpreter
from reference.models import HEAD_DIM, SPECIALS, load_hf, random_direction
from reference.results import Result
from reference.wire import ALWAYS_IN_ANSWER, EVERYWHERE, Json, add, gate, probe, static
from steergate_server.runtime.config import EngineConfig
from steergate_server.vllm_plugin.carrier import PLAN_KEY
from support.engines import SteeredEngine

from .conftest import HIDDEN, SETTINGS
from .oracle import TIE, TOLERANCE, Case, Oracle, check_book, prompt

BLOCK = SETTINGS["block_size"]
BLOCKS = 12
"""Of KV cache; vLLM keeps one for itself."""

LENGTH = 160
"""`max_model_len`."""

CHARACTERS = [*'{}[]":,-.', *"0123456789", *"abcdefghijklmnopqrstuvwxyz"]
VOCABULARY = 256
END = VOCABULARY - 1


def _spelling(folder: Path) -> None:
    """A tokenizer whose first tokens are single characters, so that grammars can be spelled."""
    words = [*CHARACTERS, *(f"T{number}" for number in range(VOCABULARY - len(CHARACTERS) - len(SPECIALS))), *SPECIALS]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token=SPECIALS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=SPECIALS[0], bos_token=SPECIALS[1], eos_token=SPECIALS[2]
    ).save_pretrained(folder)


def _adapter(tiny: Path, folder: Path, seed: int) -> tuple[Path, Path]:
    """A random LoRA adapter on every linear layer, and the model with it merged in by hand."""
    generator = torch.Generator().manual_seed(seed)
    rank, alpha = 4, 8
    model = load_hf(tiny)
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    tensors = {}
    with torch.no_grad():
        for name, module in model.named_modules():
            if name.rpartition(".")[2] not in targets:
                continue
            down = torch.randn(rank, module.in_features, generator=generator) * 0.1
            up = torch.randn(module.out_features, rank, generator=generator) * 0.1
            tensors |= {f"base_model.model.{name}.lora_{part}.weight": one for part, one in (("A", down), ("B", up))}
            module.weight += alpha / rank * up @ down
    adapter, merged = folder / "adapter", folder / "merged"
    adapter.mkdir(parents=True)
    save_file(tensors, adapter / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(targets), "bias": "none"}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    model.save_pretrained(merged)
    return adapter, merged


class World(NamedTuple):
    """The engine, the reference over its model, and the same with the adapter merged in."""

    engine: SteeredEngine
    oracle: Oracle
    adapter: LoRARequest
    adapted: Oracle


@pytest.fixture(scope="module")
def world(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("features")
    spelling = folder / "model"
    shutil.copytree(tiny, spelling, ignore=shutil.ignore_patterns("tokenizer*", "special*", "chat*"))
    _spelling(spelling)
    adapter, merged = _adapter(tiny, folder, 3)
    engine = SteeredEngine(
        spelling,
        config=EngineConfig(
            hooks=("pre_attn", "attn_heads", "mlp_out", "post_block"),
            algorithms=("direct", "attention_add"),
            memory_mib=16,
            trace=True,
        ),
        enforce_eager=True,
        enable_lora=True,
        max_loras=2,
        max_lora_rank=8,
        scheduling_policy="priority",
        num_gpu_blocks_override=BLOCKS,
        **{**SETTINGS, "max_model_len": LENGTH},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpreter, "TOP", VOCABULARY)
        yield World(engine, Oracle(tiny, {}), LoRARequest("tuned", 1, str(adapter)), Oracle(merged, {}))
    engine.close()


@pytest.fixture(autouse=True)
def nothing_is_left(world: World) -> Iterator[None]:
    """Each test starts with a cold cache and ends with nothing held."""
    world.engine.llm.reset_prefix_cache()
    world.engine.trace()
    yield
    world.engine.plain([[1]], 1)
    held = ("live", "pool_used", "slots_used", "probes_used", "payloads_held", "lanes_nonzero")
    status = world.engine.status()
    assert {name: status[name] for name in held} == dict.fromkeys(held, 0)


class Job(NamedTuple):
    """A request: its prompt, steering, and what it asks of vLLM."""

    prompt: list[int]
    request: Any
    sampling: Json
    adapter: LoRARequest | None = None
    priority: int = 0


def run(engine: SteeredEngine, jobs: Sequence[Job]) -> list[Any]:
    """vLLM's outputs of jobs that are all queued before the first step."""
    usual = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "logprobs": 0, "detokenize": False}
    plans = [engine.plan(job.request) for job in jobs]
    params = [
        SamplingParams(**usual | job.sampling, extra_args=None if plan is None else {PLAN_KEY: plan})
        for job, plan in zip(jobs, plans, strict=True)
    ]
    engine.llm.sleep(level=0, mode="keep")
    engine.llm.enqueue(
        [{"prompt_token_ids": job.prompt} for job in jobs],
        params,
        lora_request=[job.adapter for job in jobs],
        priority=[job.priority for job in jobs],
        use_tqdm=False,
    )
    engine.llm.wake_up(tags=["scheduling"])
    outputs = engine.llm.wait_for_completion(use_tqdm=False)
    engine.release()
    return outputs


def along(oracle: Oracle, job: Job, choice: Any) -> Result:
    """The reference's account of a choice."""
    return oracle.along(Case(job.prompt, job.request, len(choice.token_ids)), list(choice.token_ids))


def chosen(choice: Any) -> list[float]:
    """Log-probabilities of a choice's tokens."""
    return [step[token].logprob for token, step in zip(choice.token_ids, choice.logprobs, strict=True)]


def check(oracle: Oracle, job: Job, choice: Any) -> Result:
    """A choice's log-probabilities are the reference's."""
    expected = along(oracle, job, choice)
    np.testing.assert_allclose(chosen(choice), expected.logprobs, rtol=0, atol=TOLERANCE)
    return expected


def check_greedy(
    expected: Result, tokens: Sequence[int], masked: Callable[[int, int], bool] = lambda *_: False
) -> None:
    """Every token is the likeliest one of those that are not masked (step, token)."""
    for step, (token, every) in enumerate(zip(tokens, expected.top_logprobs, strict=True)):
        best = max(value for one, value in every.items() if not masked(step, one))
        assert every[token] > best - TIE


def check_books(output: Any, expected: Result) -> None:
    """The report of a request's gates is the reference's."""
    for book, trace in zip(output.kv_transfer_params[PLAN_KEY]["gates"], expected.gates, strict=True):
        check_book(book, trace)


HEADS = random_direction(1, 4 * HEAD_DIM, [0, 2], "attn_heads", 6.0)
STREAM = random_direction(2, HIDDEN, [1, 3], "post_block", 6.0)
ADDED = random_direction(3, HIDDEN, [2, 3], "mlp_out", 6.0)
PROBE = random_direction(4, HIDDEN, [1])
STEERED: Json = {"vectors": [static(HEADS, algorithm="attention_add"), static(STREAM, scale=0.8)]}
GATED: Json = {
    "vectors": [static(STREAM, {"answer": "all"})],
    "gates": [
        gate(probe(PROBE, 0.3, at="answer", sharpness=0.7), "this_token", add(ADDED)),
        gate(probe(PROBE, 0.3, at="answer", fires="below"), "next_step", add(ADDED, -0.6)),
        gate(ALWAYS_IN_ANSWER, "rest_of_request", {"kind": "attenuate", "keep": 0.5}),
    ],
    "report": "summary",
}


# LoRA ---------------------------------------------------------------------------------------------------------------


def test_lora_beside_no_lora(world: World) -> None:
    """All four of steered or not x adapter or not, in one batch, twice: the second time from the prefix cache."""
    text = prompt(800, 2 * BLOCK + 6)
    jobs = [Job(text, request, {}, adapter) for request in (None, STEERED) for adapter in (None, world.adapter)]
    oracles = [world.oracle, world.adapted] * 2
    cached = []
    for _ in range(2):
        outputs = run(world.engine, jobs)
        for job, oracle, output in zip(jobs, oracles, outputs, strict=True):
            check_greedy(check(oracle, job, output.outputs[0]), output.outputs[0].token_ids)
        cached.append([output.num_cached_tokens for output in outputs])
    answers = [chosen(output.outputs[0]) for output in outputs]
    assert min(np.abs(np.subtract(a, b)).max() for at, a in enumerate(answers) for b in answers[:at]) > 0.01
    assert cached == [[0] * 4, [2 * BLOCK] * 4]


def test_gates_under_lora(world: World) -> None:
    job = Job(prompt(801, 9), GATED, {"max_tokens": 12}, world.adapter)
    (output,) = run(world.engine, [job])
    check_books(output, check(world.adapted, job, output.outputs[0]))


# Structured output --------------------------------------------------------------------------------------------------

SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "yz", 17]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
IDS = {character: token for token, character in enumerate(CHARACTERS)}


def _choice(step: int, so_far: str) -> set[str]:
    return {word[step] for word in ("abc", "xyz", "xq") if word.startswith(so_far) and len(word) > step}


def _regex(step: int, so_far: str) -> set[str]:  # noqa: ARG001 - each step for itself
    return set("abc") if step < 4 else {"9"} if step == 4 else set()


GRAMMARS: dict[str, tuple[StructuredOutputsParams, Callable[[int, str], set[str]] | None]] = {
    "choice": (StructuredOutputsParams(choice=["abc", "xyz", "xq"]), _choice),
    "regex": (StructuredOutputsParams(regex="[a-c]{4}9"), _regex),
    "json": (StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True), None),
}


def test_structured_output(world: World) -> None:
    """Tokens follow the grammar; their log-probabilities are the reference's, over the tokens that it allows."""
    jobs, allowed = [], []
    for number, (grammar, letters) in enumerate(GRAMMARS.values()):
        for request in (None, STEERED, GATED):
            sampling = {"structured_outputs": grammar, "ignore_eos": False, "max_tokens": 40, "logprobs": 20}
            jobs.append(Job(prompt(810 + number, 5), request, sampling))
            allowed.append(letters)
    beside = Job(prompt(820, 5), GATED, {"max_tokens": 20})

    *outputs, free = run(world.engine, [*jobs, beside])

    for job, letters, output in zip(jobs, allowed, outputs, strict=True):
        choice = output.outputs[0]
        assert choice.finish_reason == "stop"
        assert choice.token_ids[-1] == END
        expected = along(world.oracle, job, choice)
        for step, (token, every) in enumerate(zip(choice.token_ids, expected.top_logprobs, strict=True)):
            if letters is None:
                may = {one for one, seen in choice.logprobs[step].items() if np.isfinite(seen.logprob)}
                assert len(may) < 10
            else:
                may = {IDS[one] for one in letters(step, _text(choice.token_ids[:step]))} or {END}
                if letters is _choice and step == 2 and _text(choice.token_ids[:2]) == "xq":
                    may = {END}
            total = np.logaddexp.reduce([every[one] for one in may])
            assert choice.logprobs[step][token].logprob == pytest.approx(every[token] - total, abs=TOLERANCE)
            assert every[token] > max(every[one] for one in may) - TIE
        if job.request is GATED:
            check_books(output, expected)
    check_books(free, check(world.oracle, beside, free.outputs[0]))
    texts = [_text(output.outputs[0].token_ids[:-1]) for output in outputs]
    assert set(texts[:3]) <= {"abc", "xyz", "xq"}
    assert all(re.fullmatch("[a-c]{4}9", text) for text in texts[3:6])
    for text in texts[6:]:
        found = json.loads(text)
        assert found.keys() == {"a", "b"}
        assert isinstance(found["a"], bool)
        assert found["b"] in ("x", "yz", 17)


def _text(tokens: Sequence[int]) -> str:
    return "".join(CHARACTERS[token] for token in tokens)


# Choices and log-probabilities ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("request_", [STEERED, GATED], ids=["static", "gates"])
def test_several_choices(world: World, request_: Json) -> None:
    """Each choice is steered by itself, on the prompt's blocks that it shares; and so is who comes later."""
    # Without a seed: vLLM's CPU engine ends at a seeded request whose prompt takes more than one step.
    job = Job(prompt(830, 2 * BLOCK + 5), request_, {"n": 3, "temperature": 1.0, "max_tokens": 10})
    (output,) = run(world.engine, [job])
    assert len({tuple(choice.token_ids) for choice in output.outputs}) == 3
    for choice in output.outputs:
        check(world.oracle, job, choice)
    later = job._replace(sampling={"max_tokens": 4})
    (again,) = run(world.engine, [later])
    assert again.num_cached_tokens == 2 * BLOCK
    check(world.oracle, later, again.outputs[0])


def test_seeded_choices(world: World) -> None:
    job = Job(prompt(831, 9), GATED, {"n": 3, "temperature": 1.0, "seed": 5})
    (first,), (second,) = run(world.engine, [job]), run(world.engine, [job])
    tokens = [[choice.token_ids for choice in output.outputs] for output in (first, second)]
    assert tokens[0] == tokens[1]
    for choice in first.outputs:
        check(world.oracle, job, choice)


def test_logprobs(world: World) -> None:
    jobs = [Job(prompt(840, 20), request, {"logprobs": 7}) for request in (None, STEERED, GATED)]
    for job, output in zip(jobs, run(world.engine, jobs), strict=True):
        expected = check(world.oracle, job, output.outputs[0])
        for step, every in zip(output.outputs[0].logprobs, expected.top_logprobs, strict=True):
            assert len(step) == 7
            for token, seen in step.items():
                assert seen.logprob == pytest.approx(every[token], abs=TOLERANCE)
            assert min(seen.logprob for seen in step.values()) > sorted(every.values())[-8] - TOLERANCE


def test_prompt_logprobs(world: World) -> None:
    """A steered row of the prompt shows in the log-probabilities of the token behind it, whatever is cached.

    To the reference the same rows are those of an answer to the first token.
    """
    text = prompt(850, 2 * BLOCK + 10)  # computed in two chunks
    vectors = STEERED["vectors"]
    as_answer = {
        "everywhere": (EVERYWHERE, EVERYWHERE),
        "one row": ({"prompt_positions": [5]}, {"generation_positions": [4]}),
        "a window": ({"prompt_window": [40, 50]}, {"generation_window": [39, 49]}),
    }
    run(world.engine, [Job(text, None, {}), Job(text, STEERED, {})])  # leaves blocks behind
    for where, generated in [*as_answer.values(), (None, None)]:
        request, same = (
            None if clause is None else {"vectors": [{**vector, "where": clause} for vector in vectors]}
            for clause in (where, generated)
        )
        (output,) = run(world.engine, [Job(text, request, {"prompt_logprobs": 3, "max_tokens": 1})])
        expected = world.oracle.along(Case(text[:1], same, len(text) - 1), text[1:])
        first, *rows = output.prompt_logprobs
        assert first is None
        np.testing.assert_allclose(
            [row[token].logprob for row, token in zip(rows, text[1:], strict=True)], expected.logprobs,
            rtol=0, atol=TOLERANCE,
        )  # fmt: skip
        for row, every in zip(rows, expected.top_logprobs, strict=True):
            assert {token: pytest.approx(every[token], abs=TOLERANCE) for token in row} == {
                token: seen.logprob for token, seen in row.items()
            }


# Where answers end --------------------------------------------------------------------------------------------------


def test_min_tokens_and_stop_tokens(world: World) -> None:
    job = Job(prompt(860, 12), GATED, {"max_tokens": 10})
    (free,) = run(world.engine, [job])
    tokens = list(free.outputs[0].token_ids)
    stop = tokens[3]
    first = tokens.index(stop)
    at_once = job._replace(sampling={"max_tokens": 10, "stop_token_ids": [stop]})
    late = job._replace(sampling={"max_tokens": 10, "stop_token_ids": [stop], "min_tokens": first + 3})

    stopped, held_off = run(world.engine, [at_once, late])

    assert list(stopped.outputs[0].token_ids) == tokens[: first + 1]
    check_books(stopped, check(world.oracle, at_once, stopped.outputs[0]))
    choice = held_off.outputs[0]
    assert len(choice.token_ids) >= first + 3
    expected = check(world.oracle, late, choice)
    check_greedy(expected, choice.token_ids, lambda step, token: token == stop and step < first + 3)
    check_books(held_off, expected)


def test_an_answer_that_reaches_the_longest_length(world: World) -> None:
    where = {"prompt_positions": [-1, 0], "generation_window": [3, None]}
    for request in ({"vectors": [static(STREAM, where)], "report": "summary"}, GATED):
        job = Job(prompt(870, LENGTH - 10), request, {"max_tokens": 50})
        (output,) = run(world.engine, [job])
        choice = output.outputs[0]
        assert (len(choice.token_ids), choice.finish_reason) == (10, "length")
        expected = check(world.oracle, job, choice)
        check_greedy(expected, choice.token_ids)
        check_books(output, expected)


# Priority -----------------------------------------------------------------------------------------------------------


def test_priority(world: World) -> None:
    """The least urgent are preempted for want of KV cache, though they came first; all answers stay what they are."""
    jobs = [
        Job(prompt(880 + number, 40), (GATED, STEERED)[number % 2], {"max_tokens": 40}, priority=5 - number)
        for number in range(5)
    ]
    outputs = run(world.engine, jobs)
    times: dict[str, int] = {}
    seen = Counter((record[2], record[1], record[3], record[4]) for record in world.engine.trace())
    for (request_id, *_), count in seen.items():
        times[request_id] = max(times.get(request_id, 0), count)
    in_order = [times[name] for name in sorted(times, key=lambda name: int(name.split("-")[0]))]
    assert in_order[0] > 1
    assert in_order[-1] == 1
    for job, output in zip(jobs, outputs, strict=True):
        expected = check(world.oracle, job, output.outputs[0])
        check_greedy(expected, output.outputs[0].token_ids)
        if job.request is GATED:
            check_books(output, expected)
