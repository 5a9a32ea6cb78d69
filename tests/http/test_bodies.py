"""Bodies that are odd as a whole: whatever way they are spelled, steering in them is honoured or refused."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from typing import Any

import pytest

from reference.models import random_direction
from reference.results import Result
from reference.wire import Json, static
from support.server import ROUTES, Api, request_body

VECTOR = random_direction(1, 64, [1, 2], norm=4.0)
STEERING = {"vectors": [static(VECTOR)]}
TEXT = json.dumps(STEERING)


def text(more: str, **members: Any) -> str:
    """The text of a completion's body, with `more` as its last members."""
    return json.dumps(request_body("completions", **members))[:-1] + f", {more}}}"


HONOURED: dict[str, bytes] = {
    "utf-8-mark": text(f'"steering": {TEXT}').encode("utf-8-sig"),
    "utf-16": text(f'"steering": {TEXT}').encode("utf-16"),
    "escaped-name": text(f'"st\\u0065ering": {TEXT}').encode(),
    "nan-elsewhere": text(f'"steering": {TEXT}, "unrelated": NaN').encode(),
    "lone-surrogate-elsewhere": text(f'"steering": {TEXT}, "unrelated": "\\ud800"').encode(),
    "white-space": text(f'"steering"\n:\t {TEXT} ').encode(),
}


@pytest.mark.parametrize("body", HONOURED.values(), ids=HONOURED)
def test_odd_spellings_are_honoured(api: Api, reference: Any, body: bytes) -> None:
    answer = api.send(ROUTES["completions"], body)
    assert answer.status == 200, answer.body
    assert answer.fingerprint
    assert answer.logprobs == pytest.approx(reference(STEERING).logprobs, abs=1e-4)


REFUSED: dict[str, tuple[bytes, str, str | None]] = {
    "misspelt-beside-nan": (text(f'"steerings": {TEXT}, "unrelated": NaN').encode(), "unknown_field", "steerings"),
    "misspelt-in-utf-16": (text(f'"steerings": {TEXT}').encode("utf-16"), "unknown_field", "steerings"),
    "misspelt-escaped-beside-nan": (
        text(f'"st\\u0065erings": {TEXT}, "unrelated": NaN').encode(),
        "unknown_field",
        "steerings",
    ),
    "reserved-beside-nan": (
        text('"vllm_xargs": {"steergate": "x"}, "unrelated": NaN').encode(),
        "reserved_field",
        "vllm_xargs.steergate",
    ),
    "twice-null-last": (text(f'"steering": {TEXT}, "steering": null').encode(), "invalid_json", "steering"),
    "twice-null-first": (text(f'"steering": null, "steering": {TEXT}').encode(), "invalid_json", "steering"),
    "beam-search-as-1": (
        text(f'"steering": {TEXT}', use_beam_search=1, n=2).encode(),
        "steering_not_supported_here",
        "use_beam_search",
    ),
    "beam-search-as-text": (
        text(f'"steering": {TEXT}', use_beam_search="true", n=2).encode(),
        "steering_not_supported_here",
        "use_beam_search",
    ),
    "beam-search-beside-nan": (
        text(f'"steering": {TEXT}, "unrelated": NaN', use_beam_search=True, n=2).encode(),
        "steering_not_supported_here",
        "use_beam_search",
    ),
    "steering-in-text-that-is-no-json": (text(f'"steering": {TEXT}').encode()[:-2], "invalid_json", None),
}


@pytest.mark.parametrize(("body", "code", "param"), REFUSED.values(), ids=REFUSED)
def test_odd_spellings_are_refused(api: Api, body: bytes, code: str, param: str | None) -> None:
    answer = api.send(ROUTES["completions"], body)
    assert answer.status == 400, "it was answered, as if nothing were wrong"
    assert (answer.error["code"], answer.error["param"]) == (code, param)
    assert answer.fingerprint is None


def _without_colon(body: Json) -> bytes:
    return json.dumps(body).replace(":", " ", 1).encode()


FOREIGN: dict[str, Callable[[Json], bytes]] = {
    "no-json": _without_colon,
    "list": lambda _: b"[]",
    "text": lambda _: b'"a"',
    "empty": lambda _: b"",
    "no-prompt": lambda body: json.dumps({"model": body["model"]}).encode(),
    "deep": lambda _: b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("spoil", FOREIGN.values(), ids=FOREIGN)
def test_bodies_without_anything_of_ours_are_for_vllm(api: Api, route: str, spoil: Callable[[Json], bytes]) -> None:
    answer = api.send(ROUTES[route], spoil(request_body(route)))
    assert 400 <= answer.status < 500
    assert answer.body.get("error", {}).get("type") != "invalid_request_error", "the words are vLLM's own"


def test_a_body_declared_too_large_is_refused_unread(api: Api) -> None:
    connection = http.client.HTTPConnection(api.url.removeprefix("http://"), timeout=10)
    try:
        connection.putrequest("POST", ROUTES["completions"])
        connection.putheader("content-type", "application/json")
        connection.putheader("content-length", str(2**40))
        connection.endheaders()
        response = connection.getresponse()
        error = json.loads(response.read())["error"]
    finally:
        connection.close()
    assert response.status == 413
    assert (error["code"], error["param"]) == ("payload_too_large", None)


def test_a_body_without_a_length_is_read_in_pieces(api: Api, reference: Any) -> None:
    body = json.dumps(request_body("completions", steering=STEERING)).encode()
    pieces = (body[start : start + 100] for start in range(0, len(body), 100))
    response = api.http.post(ROUTES["completions"], content=pieces, headers={"content-type": "application/json"})
    assert response.status_code == 200
    expected = reference(STEERING)
    assert response.json()["choices"][0]["token_ids"] == expected.tokens


def test_a_refusal_leaves_the_connection_usable(api: Api, plain: Result) -> None:
    for _ in range(3):
        assert api.ask("completions", steering={"vectors": 1}).status == 400
        assert api.ask("completions").tokens == plain.tokens
        assert api.ask("completions", steering=STEERING).tokens != plain.tokens
