"""The official `anthropic` client, which knows nothing of steering."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import pytest

from reference.models import random_direction
from reference.wire import Json, gate, probe, static
from support.server import MODEL_NAME, PROMPT, Server, words

VECTOR = random_direction(1, 64, [1, 2], norm=4.0)
PROBE = random_direction(3, 64, [1])
STEERING: Json = {
    "vectors": [static(VECTOR)],
    "gates": [gate(probe(PROBE, 0.5), "next_step", {"kind": "attenuate", "keep": 0.0})],
    "report": "summary",
}
SETTINGS: Any = {
    "model": MODEL_NAME,
    "max_tokens": 12,
    "messages": [{"role": "user", "content": words(PROMPT)}],
}


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=60) as opened:
        yield opened


def extra(steering: Any) -> Json:
    """Members beside the client's own arguments, which know no temperature."""
    return {"steering": steering, "temperature": 0}


def said(tokens: list[int]) -> list[str]:
    return [f"t{token}" for token in tokens if token < 253]


def test_messages(client: anthropic.Anthropic, reference: Any) -> None:
    raw = client.messages.with_raw_response.create(extra_body=extra(STEERING), **SETTINGS)
    message = raw.parse()
    expected = reference(STEERING)
    assert message.content[0].text.split() == said(expected.tokens)
    assert message.usage.input_tokens == len(PROMPT)
    report = (message.model_extra or {})["steering_report"]
    assert report["fingerprint"] == raw.headers["x-steering-applied"]
    assert report["choices"][0]["gates"][0]["fired"] == len(expected.gates[0].fired_rows)


def test_a_stream_of_events(client: anthropic.Anthropic, reference: Any) -> None:
    expected = reference(STEERING)
    events = list(client.messages.create(stream=True, extra_body=extra(STEERING), **SETTINGS))
    text = "".join(event.delta.text for event in events if event.type == "content_block_delta")
    assert text.split() == said(expected.tokens)
    assert events[-1].type == "message_stop"
    report = (events[-1].model_extra or {})["steering_report"]
    assert report["choices"][0]["gates"][0]["fired"] == len(expected.gates[0].fired_rows)


def test_the_client_s_own_stream_helper(client: anthropic.Anthropic, reference: Any) -> None:
    with client.messages.stream(extra_body=extra(STEERING), **SETTINGS) as stream:
        assert "".join(stream.text_stream).split() == said(reference(STEERING).tokens)
        assert stream.response.headers["x-steering-applied"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_refusals_are_bad_requests(client: anthropic.Anthropic, stream: bool) -> None:
    bad = {"vectors": [static(VECTOR, layers=[7])]}
    with pytest.raises(anthropic.BadRequestError) as failure:
        client.messages.create(stream=stream, extra_body=extra(bad), **SETTINGS)
    body: Any = failure.value.body
    assert body["type"] == "error"
    assert body["error"]["type"] == "invalid_request_error"
    assert body["error"]["code"] == "layer_not_in_payload"
    assert body["error"]["param"] == "steering.vectors[0].layers[0]"
    assert "It has 1, 2" in failure.value.message


def test_counting_tokens_carries_no_steering(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as failure:
        client.messages.count_tokens(model=MODEL_NAME, messages=SETTINGS["messages"], extra_body=extra(STEERING))
    body: Any = failure.value.body
    assert (body["type"], body["error"]["code"]) == ("error", "steering_not_supported_here")


def test_a_failure_in_the_stream(client: anthropic.Anthropic) -> None:
    late = {"vectors": [static(random_direction(1, 64, [1], norm=3e38), {"generation_positions": [2]})]}
    stream = client.messages.create(stream=True, extra_body=extra(late), **SETTINGS)
    with pytest.raises(anthropic.APIStatusError, match="left the range") as failure:
        list(stream)
    body: Any = failure.value.body
    assert body["error"]["code"] == "algorithm_failed"
