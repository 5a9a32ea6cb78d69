"""The official `openai` client, which knows nothing of steering."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from reference.models import random_direction
from reference.wire import Json, gate, probe, static
from support.server import MODEL_NAME, PROMPT, Server

VECTOR = random_direction(1, 64, [1, 2], norm=4.0)
PROBE = random_direction(3, 64, [1])
STEERING: Json = {
    "vectors": [static(VECTOR)],
    "gates": [gate(probe(PROBE, 0.5), "next_step", {"kind": "attenuate", "keep": 0.0})],
    "report": "summary",
}
MESSAGES: Any = [{"role": "user", "content": " ".join(f"t{token}" for token in PROMPT[1:-1])}]


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as opened:
        yield opened


def extra(steering: Any) -> Json:
    return {"steering": steering, "ignore_eos": True}


def words(tokens: list[int]) -> list[str]:
    return [f"t{token}" for token in tokens if token < 253]


def test_completions(client: openai.OpenAI, reference: Any) -> None:
    answer = client.completions.create(
        model=MODEL_NAME, prompt=PROMPT, max_tokens=12, temperature=0, logprobs=1, extra_body=extra(STEERING)
    )
    expected = reference(STEERING)
    choice = answer.choices[0]
    assert choice.text.split() == words(expected.tokens)
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert answer.model_extra is not None
    report = answer.model_extra["steering_report"]
    assert report["choices"][0]["gates"][0]["fired"] == len(expected.gates[0].fired_rows)


def test_chat(client: openai.OpenAI, reference: Any) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model=MODEL_NAME, messages=MESSAGES, max_tokens=12, temperature=0, logprobs=True, extra_body=extra(STEERING)
    )
    answer = raw.parse()
    expected = reference(STEERING)
    assert (answer.choices[0].message.content or "").split() == words(expected.tokens)
    assert answer.choices[0].logprobs is not None
    logprobs = [entry.logprob for entry in answer.choices[0].logprobs.content or ()]
    assert logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert answer.model_extra is not None
    assert answer.model_extra["steering_report"]["fingerprint"] == raw.headers["x-steering-applied"]


def test_streams(client: openai.OpenAI, reference: Any) -> None:
    expected = reference(STEERING)
    settings: Any = {"model": MODEL_NAME, "max_tokens": 12, "temperature": 0, "stream": True}
    completion = list(client.completions.create(prompt=PROMPT, extra_body=extra(STEERING), **settings))
    chat = list(client.chat.completions.create(messages=MESSAGES, extra_body=extra(STEERING), **settings))
    text = "".join(chunk.choices[0].text for chunk in completion if chunk.choices)
    content = "".join(chunk.choices[0].delta.content or "" for chunk in chat if chunk.choices)
    assert text.split() == content.split() == words(expected.tokens)
    for chunks in (completion, chat):
        assert chunks[-1].choices == []
        assert chunks[-1].model_extra["steering_report"]["choices"][0]["index"] == 0


def test_responses(client: openai.OpenAI, reference: Any) -> None:
    raw = client.responses.with_raw_response.create(
        model=MODEL_NAME,
        input=MESSAGES,
        max_output_tokens=12,
        temperature=0,
        include=["message.output_text.logprobs"],
        top_logprobs=1,
        extra_body=extra(STEERING),
    )
    answer = raw.parse()
    expected = reference(STEERING)
    assert answer.output_text.split() == words(expected.tokens)
    logprobs = [entry.logprob for entry in answer.output[0].content[0].logprobs]  # type: ignore[union-attr]
    assert logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert answer.model_extra is not None
    report = answer.model_extra["steering_report"]
    assert report["fingerprint"] == raw.headers["x-steering-applied"]
    assert report["choices"][0]["gates"][0]["fired"] == len(expected.gates[0].fired_rows)


def test_a_stream_of_a_response(client: openai.OpenAI, reference: Any) -> None:
    expected = reference(STEERING)
    settings: Any = {"model": MODEL_NAME, "max_output_tokens": 12, "temperature": 0, "extra_body": extra(STEERING)}
    events = list(client.responses.create(input=MESSAGES, stream=True, **settings))
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert text.split() == words(expected.tokens)
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text.split() == words(expected.tokens)
    report = (last.model_extra or {})["steering_report"]
    assert report["choices"][0]["gates"][0]["fired"] == len(expected.gates[0].fired_rows)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_refusals_are_bad_requests(client: openai.OpenAI, stream: bool) -> None:
    bad = {"vectors": [static(VECTOR, layers=[7])]}
    settings: Any = {"model": MODEL_NAME, "stream": stream, "extra_body": extra(bad)}
    with pytest.raises(openai.BadRequestError) as completion:
        client.completions.create(prompt=PROMPT, **settings)
    with pytest.raises(openai.BadRequestError) as chat:
        client.chat.completions.create(messages=MESSAGES, **settings)
    with pytest.raises(openai.BadRequestError) as response:
        client.responses.create(input=MESSAGES, **settings)
    for failure in (completion.value, chat.value, response.value):
        assert failure.code == "layer_not_in_payload"
        assert failure.param == "steering.vectors[0].layers[0]"
        assert failure.type == "invalid_request_error"
        assert "It has 1, 2" in failure.message
        assert failure.response.headers["x-steering-contract"] == "1.0"


def test_a_response_that_fails_in_its_stream(client: openai.OpenAI) -> None:
    late = {"vectors": [static(random_direction(1, 64, [1], norm=3e38), {"generation_positions": [2]})]}
    stream = client.responses.create(model=MODEL_NAME, input=MESSAGES, stream=True, extra_body=extra(late))
    with pytest.raises(openai.APIError, match="left the range") as failure:
        list(stream)
    assert failure.value.code == "algorithm_failed"
