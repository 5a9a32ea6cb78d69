"""Errors and retries of the client."""

from __future__ import annotations

import email.utils
import pickle
import time

import httpx
import httpx2
import pytest

from sdk.player import CONTRACT, Played, chat_body, refusal
from sdk.test_client import ask
from steergate import (
    APIConnectionError,
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    BadRequestError,
    ConflictError,
    ContractMismatchError,
    InternalServerError,
    NotFoundError,
    PermissionDeniedError,
    RateLimitError,
    SteeringClient,
    UnprocessableEntityError,
)
from steergate._protocol import Answer, retry_delay

# Errors

STATUSES = {
    400: BadRequestError,
    401: AuthenticationError,
    403: PermissionDeniedError,
    404: NotFoundError,
    409: ConflictError,
    413: APIStatusError,
    422: UnprocessableEntityError,
    429: RateLimitError,
    500: InternalServerError,
    503: InternalServerError,
}


@pytest.mark.usefixtures("waits")
@pytest.mark.parametrize("status", STATUSES)
def test_each_status_has_its_error(server, client, status):
    body = refusal("name_conflict", "It exists.", "name")
    server.play(Played(status, body, {**CONTRACT, "x-request-id": "r7"}))
    with pytest.raises(STATUSES[status]) as caught:
        ask(client)
    error = caught.value
    assert type(error) is STATUSES[status]
    assert (error.status_code, error.code, error.param, error.type) == (
        status, "name_conflict", "name", "invalid_request_error",
    )  # fmt: skip
    assert (error.message, error.request_id, error.body) == ("It exists.", "r7", body)
    assert str(error) == f"{status} name_conflict at name: It exists."
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.body) == (type(error), str(error), body)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"Bad Gateway", "Bad Gateway"),
        (b"", "The server gave no reason."),
        ({"detail": "Not Found"}, "Not Found"),
        ({"error": "no"}, "no"),
        ({"error": {"message": "vLLM says", "code": 400}}, "vLLM says"),
        ([1], "[1]"),
    ],
    ids=str,
)
def test_refusals_of_other_shapes(server, client, body, message):
    server.play(Played(418, body))
    with pytest.raises(APIStatusError) as caught:
        ask(client)
    assert (caught.value.message, caught.value.code) == (message, None)


def test_a_redirect_is_no_success(server, client):
    server.play(Played(307, b"", {**CONTRACT, "Location": "http://127.0.0.1:1/"}))
    with pytest.raises(APIStatusError, match="307"):
        ask(client)
    assert len(server.requests) == 1


def test_another_major_of_the_contract(server, client):
    server.play(Played(400, refusal("unknown_field"), {"X-Steering-Contract": "2.3"}))
    with pytest.raises(
        ContractMismatchError, match=r"contract 2\.3, this SDK speaks 1\.0; the server is newer"
    ) as caught:
        ask(client)
    assert (caught.value.client, caught.value.server) == ("1.0", "2.3")
    server.play(Played(200, chat_body(), {"X-Steering-Contract": "0.9"}))
    with pytest.raises(ContractMismatchError, match="the SDK is newer"):
        ask(client)


def test_the_contract_is_compared_once(server, client):
    server.play(Played(body=chat_body(), headers={"X-Steering-Contract": "1.7"}), Played(body=chat_body(), headers={}))
    ask(client)
    assert ask(client).text == "hi"


def test_an_older_server_is_named_as_the_reason(server, client, monkeypatch):
    monkeypatch.setattr("steergate._protocol.CONTRACT_VERSION", "1.4")
    server.play(Played(400, refusal("unknown_field", "`zz` is no field.")))
    with pytest.raises(BadRequestError, match=r"server's contract 1\.0 is older than this SDK's 1\.4"):
        ask(client)


# Retries


@pytest.mark.parametrize("status", [408, 409, 429, 500, 503])
def test_what_may_pass_is_tried_again(server, client, waits, status):
    server.play(Played(status, refusal("registry_full")), Played(0), Played(body=chat_body()))
    assert ask(client).text == "hi"
    assert len(server.requests) == 3
    assert 0.375 <= waits[0] <= 0.5
    assert 0.75 <= waits[1] <= 1.0
    assert server.requests[0] == server.requests[2]


@pytest.mark.usefixtures("waits")
def test_two_retries_and_no_more(server, client):
    server.play(Played(500, {}))
    with pytest.raises(InternalServerError):
        ask(client)
    assert len(server.requests) == 3


def test_retries_can_be_switched_off(server, waits):
    server.play(Played(0))
    with SteeringClient(server.url, max_retries=0) as client, pytest.raises(APIConnectionError):
        ask(client)
    assert (len(server.requests), waits) == (1, [])


@pytest.mark.parametrize(("status", "code"), [(400, "x"), (401, "x"), (404, "x"), (422, "x"), (409, "name_conflict")])
def test_what_will_not_pass_is_not_tried_again(server, client, waits, status, code):
    server.play(Played(status, refusal(code)))
    with pytest.raises(APIStatusError):
        ask(client)
    assert (len(server.requests), waits) == (1, [])


def test_retry_after_is_obeyed(server, client, waits):
    server.play(
        Played(429, {}, {"Retry-After": "7.5"}), Played(503, {}, {"Retry-After": "0"}), Played(body=chat_body())
    )
    ask(client)
    assert waits == [7.5, 0.0]


def test_retry_after_may_be_a_date(server, client, waits):
    date = email.utils.formatdate(time.time() + 30, usegmt=True)
    server.play(Played(429, {}, {"Retry-After": date}), Played(body=chat_body()))
    ask(client)
    assert 25 <= waits[0] <= 30


def test_a_longer_wait_is_not_waited(server, client, waits):
    server.play(Played(429, {}, {"Retry-After": "121"}))
    with pytest.raises(RateLimitError):
        ask(client)
    assert (len(server.requests), waits) == (1, [])


def test_backoff_grows_to_8_seconds():
    longest = [max(retry_delay(None, attempt) for _ in range(200)) for attempt in range(8)]
    assert longest == pytest.approx([0.5, 1, 2, 4, 8, 8, 8, 8], rel=0.02)
    assert min(retry_delay(None, 0) for _ in range(200)) == pytest.approx(0.375, rel=0.02)
    odd = Answer(503, {"retry-after": "in a while"}, b"")
    assert 0.375 <= retry_delay(odd, 0) <= 0.5


def test_a_server_that_is_not_there(waits):
    with SteeringClient("http://127.0.0.1:1") as client, pytest.raises(APIConnectionError, match="was not reached"):
        client.capabilities()
    assert len(waits) == 2


def test_a_server_that_is_too_slow(server, waits):
    server.play(Played(body=chat_body(), delay=0.5), Played(body=chat_body()))
    with SteeringClient(server.url, timeout=0.1, max_retries=0) as client, pytest.raises(APITimeoutError):
        ask(client)
    server.play(Played(body=chat_body(), delay=0.5), Played(body=chat_body()))
    with SteeringClient(server.url, timeout=0.1) as client:
        assert ask(client).text == "hi"
    assert len(waits) == 1


@pytest.mark.parametrize("library", [httpx, httpx2])
def test_an_http_client_can_be_handed_in(server, library):
    with library.Client(headers={"x-mine": "1"}, timeout=30) as mine:
        with SteeringClient(server.url, http_client=mine, max_retries=0) as client:
            server.play(Played(body=chat_body()))
            assert ask(client).text == "hi"
            assert server.requests[0].headers["x-mine"] == "1"
            server.play(Played(0))
            with pytest.raises(APIConnectionError):
                ask(client)
        assert not mine.is_closed
