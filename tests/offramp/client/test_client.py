from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from earlyexit.errors import (
    AdmissionError,
    DeadlineError,
    ExecutionError,
    InputError,
    OfframpError,
    OverloadedError,
    PlanError,
    RateLimitError,
    UnauthorizedError,
    UnknownModelError,
    UnprocessableInputError,
)
from offramp.client.client import LONGEST_S, AsyncClient, Client
from offramp.client.protocol import ERRORS_BY_KIND, NoServerError, Prediction, predict_request
from offramp.commands.options import ApiKeyOption
from tests.clock import ManualClock

Handler = Callable[[httpx.Request], httpx.Response]
STOPPING = "Path '/predict' not found. Ping http://.../-/routes for available routes."
"""The answer of Serve's proxy while a service stops."""


class HalfwayRandom(random.Random):
    """A generator whose draws are 0.5, so the n-th backoff is half of 0.1 s * 2 ** (n - 1)."""

    def random(self) -> float:
        return 0.5


class Sleeper:
    """A sleep that advances a clock and records its durations."""

    def __init__(self, clock: ManualClock) -> None:
        self.clock = clock
        self.waits_s: list[float] = []

    def __call__(self, seconds: float) -> None:
        self.waits_s.append(seconds)
        self.clock.advance(seconds)


class Script:
    """A server that gives prepared replies in order, repeats the last one, and records requests."""

    def __init__(self, *replies: httpx.Response | Exception) -> None:
        self.replies = list(replies)
        self.requests: list[httpx.Request] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        reply = self.replies.pop(0) if len(self.replies) > 1 else self.replies[0]
        if isinstance(reply, Exception):
            raise reply
        return httpx.Response(reply.status_code, headers=reply.headers, content=reply.content)

    @property
    def request_ids(self) -> list[str]:
        return [request.headers["X-Request-ID"] for request in self.requests]


def client_of(handler: Handler, *, max_attempts: int = 4) -> tuple[Client, Sleeper]:
    sleeper, rng = Sleeper(ManualClock()), HalfwayRandom()
    transport = httpx.MockTransport(handler)
    client = Client("http://server", 10.0, max_attempts, transport, clock=sleeper.clock, rng=rng, sleep=sleeper)
    return client, sleeper


def answer() -> httpx.Response:
    return httpx.Response(200, json={"label": "positive", "score": 0.9, "exit": 2, "request_id": "r1"})


def failure(status: int, kind: str, message: str = "no", retry_after: str | None = None) -> httpx.Response:
    headers = {} if retry_after is None else {"Retry-After": retry_after}
    body = {"error": {"kind": kind, "message": message}, "request_id": "r1"}
    return httpx.Response(status, json=body, headers=headers)


def test_predict_sends_inputs_under_an_id_and_returns_the_answer() -> None:
    server = Script(answer())
    client, _ = client_of(server)
    assert client.predict("good film") == Prediction(label="positive", score=0.9, exit=2, request_id="r1")
    assert server.requests[0].url == "http://server/predict"
    assert json.loads(server.requests[0].content) == {"inputs": "good film", "timeout_s": 10.0}
    client.predict("long", truncate=True, timeout_s=3.0)
    assert json.loads(server.requests[1].content) == {"inputs": "long", "truncate": True, "timeout_s": 3.0}
    client.predict("x")
    client.predict("x")
    client.predict("x", request_id="mine")
    first, second, third = server.request_ids[2:]
    assert len(first) == 32
    assert first != second
    assert third == "mine"


def test_all_inputs_of_a_call_are_sent_in_one_request() -> None:
    rows: list[dict[str, Any]] = [{"label": "a", "score": 0.5, "exit": 0}, {"label": "b", "score": 0.6, "exit": 1}]
    server = Script(httpx.Response(200, json={"outputs": rows, "request_id": "r7"}))
    client, _ = client_of(server)
    assert client.predict_many([]) == []
    with pytest.raises(InputError, match="use predict for a single one"):
        client.predict_many("abc")
    assert server.requests == []
    assert client.predict_many(["x", "y"]) == [Prediction(**row, request_id="r7") for row in rows]
    assert len(server.requests) == 1
    metadata = {"name": "m", "inputs": [{"name": "counts", "datatype": "UINT8", "shape": [-1, 2]}], "outputs": []}
    assert predict_request([np.array([0, 255]), np.array([7, 8])], metadata, many=True).tail == bytes([0, 255, 7, 8])
    with pytest.raises(InputError, match="the model takes UINT8 arrays of one shape: UINT8 holds 0 to 255, not 256"):
        predict_request([np.array([0, 256], dtype=np.uint16)], metadata, many=True)
    with pytest.raises(InputError, match="UINT8 arrays of one shape: setting an array element with a sequence"):
        predict_request([{"counts": [[1, 2], [3]]}], metadata, many=False)  # type: ignore[dict-item] # as users do
    with pytest.raises(InputError, match="UINT8 arrays of one shape: can't convert meta device type tensor to numpy"):
        predict_request([{"counts": torch.zeros(2, device="meta")}], metadata, many=False)  # type: ignore[dict-item]
    with pytest.raises(InputError, match="every input needs the model's columns, and no others: counts"):
        predict_request([{"count": np.array([0, 255])}], metadata, many=False)
    assert predict_request([("a", "b")], {}, many=False).body == {"inputs": [("a", "b")]}  # one pair, not two texts


@pytest.mark.parametrize(
    ("reply", "wait_s"),
    [
        pytest.param(httpx.ConnectError("refused"), 0.05, id="refused"),
        pytest.param(httpx.RemoteProtocolError("cut off"), 0.05, id="cut off"),
        pytest.param(httpx.Response(500, text="Internal Server Error"), 0.05, id="the proxy's 500"),
        pytest.param(httpx.Response(404, text=STOPPING), 0.05, id="the proxy's 404"),
        pytest.param(httpx.Response(502, text="bad gateway"), 0.05, id="502"),
        pytest.param(failure(503, "overloaded"), 0.05, id="503"),
        pytest.param(failure(503, "overloaded", retry_after="0.5"), 0.55, id="503 for half a second"),
        pytest.param(failure(503, "overloaded", retry_after="Wed, 21 Oct 2026 07:28:00 GMT"), 0.05, id="503 to a date"),
        pytest.param(failure(429, "rate_limit", retry_after="3"), 3.05, id="429 for 3 s"),
    ],
)
def test_a_temporary_error_is_retried_with_the_remaining_time(reply: httpx.Response | Exception, wait_s: float) -> None:
    server = Script(reply, answer())
    client, sleeper = client_of(server)
    assert client.predict("x").label == "positive"
    first, second = server.request_ids
    assert first == second
    assert sleeper.waits_s == [wait_s]
    assert json.loads(server.requests[1].content)["timeout_s"] == pytest.approx(10 - wait_s)
    assert server.requests[1].extensions["timeout"]["read"] == pytest.approx(10 - wait_s)


def test_backoff_doubles_up_to_its_longest_until_the_attempts_are_used_up() -> None:
    server = Script(failure(503, "overloaded", "queue is full"))
    client, sleeper = client_of(server, max_attempts=8)
    with pytest.raises(OverloadedError, match="queue is full"):
        client.predict("x")
    assert len(server.requests) == 8
    assert sleeper.waits_s == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


@pytest.mark.parametrize(
    ("status", "kind", "error"), [(503, "overloaded", OverloadedError), (429, "rate_limit", RateLimitError)]
)
def test_a_retry_that_would_exceed_the_timeout_is_not_started(
    status: int, kind: str, error: type[OverloadedError | RateLimitError]
) -> None:
    client, sleeper = client_of(Script(failure(status, kind, "too many", retry_after="9.95")))
    with pytest.raises(error, match="too many") as refusal:
        client.predict("x")
    assert sleeper.waits_s == []
    assert refusal.value.retry_after_s == 9.95


@pytest.mark.parametrize(
    ("reply", "error", "words"),
    [
        *((httpx.Response(status, text="no"), OfframpError, "no") for status in (400, 404, 408, 413, 422, 429, 504)),
        (failure(401, "unauthorized", "the API key is not known"), UnauthorizedError, "the API key is not known"),
        (failure(422, "unprocessable_input", "600 tokens, 512"), UnprocessableInputError, "^600 tokens, 512\n"),
        (failure(500, "execution", "the model failed"), ExecutionError, "the model failed"),
        (httpx.ReadTimeout("slow"), DeadlineError, "no answer from http://server within 10 s"),
    ],
)
def test_other_errors_are_not_retried(reply: httpx.Response | Exception, error: type[Exception], words: str) -> None:
    server = Script(reply)
    client, sleeper = client_of(server)
    with pytest.raises(error, match=words) as caught:
        client.predict("x", request_id="mine")
    assert (len(server.requests), sleeper.waits_s) == (1, [])
    assert caught.value.__notes__ == ["request id mine"]


@pytest.mark.parametrize(
    ("status", "kind", "expected"),
    [
        (400, "input", InputError),
        (404, "unknown_model", UnknownModelError),
        (418, "teapot", InputError),
        (422, "plan", PlanError),
        (422, "", UnprocessableInputError),
        (500, "", OfframpError),
        (500, "internal", OfframpError),
        (502, "", NoServerError),
        (503, "admission", AdmissionError),
        (503, "", OverloadedError),
        (504, "deadline", DeadlineError),
        (504, "", DeadlineError),
    ],
)
def test_an_error_answer_becomes_the_servers_error(status: int, kind: str, expected: type[OfframpError]) -> None:
    client, _ = client_of(Script(failure(status, kind, "why")), max_attempts=1)
    with pytest.raises(OfframpError, match=r"^why") as caught:
        client.predict("x")
    assert type(caught.value) is expected


def test_live_and_ready_return_false_instead_of_raising() -> None:
    assert {kind: cls.kind for kind, cls in ERRORS_BY_KIND.items()} == {kind: kind for kind in ERRORS_BY_KIND}

    def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200 if request.url.path == "/v2/health/live" else 503)

    client, _ = client_of(handler)
    assert client.live()
    assert not client.ready()
    assert not client_of(Script(httpx.ConnectError("refused")))[0].live()


NO_PREDICTIONS = "<html>", '{"label": "a"}', '{"outputs": []}', '{"outputs": 3}', "null", "[1]", "[" * 100_000


@pytest.mark.parametrize("text", [*NO_PREDICTIONS, '{"label": "a", "exit": Infinity}'], ids=lambda text: text[:20])
def test_an_answer_that_is_not_a_prediction_is_an_error(text: str) -> None:
    client, _ = client_of(Script(httpx.Response(200, text=text)))
    with pytest.raises(OfframpError, match="http://server does not answer as Offramp does: "):
        client.predict_many(["x"])


@pytest.mark.parametrize("payload", ["<html>", None, [1], {}, {"choices": []}, {"choices": [{"text": "a"}]}])
def test_an_answer_that_is_not_a_generated_text_is_an_error(payload: object) -> None:
    server = Script(httpx.Response(200, json={"models": ["tales"]}), httpx.Response(200, json=payload))
    with pytest.raises(OfframpError, match="does not answer as Offramp does"):
        client_of(server)[0].generate("Once")


@pytest.mark.parametrize(
    ("status", "body", "error", "words"),
    [
        (200, 'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n', OfframpError, "before its end"),
        (200, 'data: {"choices"\n', OfframpError, "server/v1/completions does not answer as Offramp does: "),
        (404, "{}", UnknownModelError, "HTTP 404 from the server"),
    ],
)
def test_a_stream_that_ends_early_is_an_error(status: int, body: str, error: type[Exception], words: str) -> None:
    server = Script(httpx.Response(200, json={"models": ["tales"]}), httpx.Response(status, text=body))
    with pytest.raises(error, match=words):
        list(client_of(server)[0].stream("Once"))


def test_errors_name_an_unreachable_server_unless_it_starts_in_time() -> None:
    with pytest.raises(InputError, match=r"must be like http://host:port or https://host, not 'http://\[::1'"):
        Client("http://[::1")
    server = Script(httpx.ConnectError("connection refused"))
    with pytest.raises(OfframpError, match=r"http://server: connection refused"):
        client_of(server)[0].predict("x")
    assert len(server.requests) == 4
    server = Script(httpx.ConnectError("refused"), httpx.Response(503), httpx.Response(200))
    client, sleeper = client_of(server)
    client.wait_until_ready(math.inf)
    assert server.requests[1].extensions["timeout"]["read"] == LONGEST_S
    assert sleeper.waits_s == [0.2, 0.2]
    client, sleeper = client_of(Script(httpx.Response(503)))
    with pytest.raises(DeadlineError, match=r"not ready within 0.5 s"):
        client.wait_until_ready(0.5)
    assert sleeper.waits_s == [0.2, 0.2]


@pytest.mark.parametrize("server", [{"name": "film"}, {"name": "offramp", "models": ["film"]}])
def test_metadata_asks_the_server_which_model_it_serves(server: dict[str, object]) -> None:
    def handler(request: httpx.Request) -> httpx.Response:
        of_path = {"name": request.url.path, "inputs": [{"name": "x", "datatype": "FP32"}], "outputs": []}
        return httpx.Response(200, json=server if request.url.path == "/v2" else of_path)

    client, _ = client_of(handler)
    assert client.metadata()["name"] == "/v2/models/film"
    assert client.metadata("../a?b")["name"] == "/v2/models/../a?b"


async def test_the_asynchronous_client_gives_the_same_answers() -> None:
    server = Script(failure(503, "overloaded"), answer())
    clock = ManualClock()
    sleeper = Sleeper(clock)
    transport = httpx.MockTransport(server)
    async with AsyncClient(
        "http://server", transport=transport, clock=clock, rng=HalfwayRandom(), sleep=sleeper
    ) as client:
        assert (await client.predict("x", request_id="mine")).exit == 2
        assert await client.live()
        assert await client.ready()
        await client.wait_until_ready(1.0)
    assert server.request_ids[:2] == ["mine", "mine"]
    assert sleeper.waits_s == [0.05]


def test_the_key_is_found_sent_with_every_request_and_never_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Script(answer())
    client = Client("http://server", transport=httpx.MockTransport(server), api_key="alice-0123456789")
    client.predict("x")
    client_of(server)[0].predict("x")
    assert server.requests[0].headers["authorization"] == "Bearer alice-0123456789"
    assert "authorization" not in server.requests[1].headers
    assert "alice-0123456789" not in repr(vars(client))
    path = tmp_path / "key"
    path.write_text("alice-0123456789\n")
    path.chmod(0o600)
    monkeypatch.setenv("OFFRAMP_API_KEY", "bob-012345678901")
    assert ApiKeyOption().api_key == "bob-012345678901"
    assert ApiKeyOption(api_key_file=path).api_key == "alice-0123456789"
    path.chmod(0o604)
    with pytest.raises(InputError, match="all users of this machine may read it"):
        _ = ApiKeyOption(api_key_file=path).api_key


def test_a_proxy_of_the_environment_is_not_used_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "ftp://proxy")
    assert not Client("http://127.0.0.1:9").live()
    with pytest.raises(InputError, match="the proxy that the environment names cannot be used: Unknown scheme"):
        Client("http://server")


def test_a_request_that_json_cannot_hold_is_refused() -> None:
    with pytest.raises(InputError, match=r"the request cannot be sent as JSON: .* surrogates not allowed"):
        client_of(Script(answer()))[0].predict("hi\udcff")
    with pytest.raises(InputError, match="the request cannot be sent as JSON: Object of type float32 is not"):
        client_of(FakeServer("READY"))[0].generate("hi", temperature=np.float32(0.5))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="the address cannot be requested: URL too long"):
        client_of(FakeServer("READY"))[0].metadata("a" * 2**16)


@pytest.mark.parametrize("call", ["generates", "versions", "metadata", "canary"])
def test_another_server_at_the_address_is_an_error(call: str) -> None:
    with pytest.raises(OfframpError, match="http://server does not answer as Offramp does: '<html>"):
        getattr(client_of(Script(httpx.Response(200, text="<html>")))[0], call)()
    other, _ = client_of(Script(httpx.Response(200, json={"name": "llama", "inputs": [], "data": [{"id": "llama"}]})))
    with pytest.raises(OfframpError, match=r"Offramp does: .*; data.0.offramp: Field required"):
        other.generates()
    with pytest.raises(OfframpError, match=r"Offramp does: .'name': 'llama'.*; inputs: List should have at least 1"):
        other.predict(np.zeros(3))


@pytest.mark.parametrize("value", [" ", "é" * 16, "a\r\nX-Evil: 1"])
def test_a_key_or_request_id_that_no_header_can_hold_is_refused_without_quoting_it(value: str) -> None:
    with pytest.raises(InputError, match="the API key is empty or has characters that an HTTP header cannot hold"):
        Client("http://server", api_key=value)
    with pytest.raises(InputError, match="the request id is empty or has characters that an HTTP header cannot hold"):
        client_of(Script(answer()))[0].predict("x", request_id=value)


SIDES = {"model": "intents", "default": "1"}
ROW = {"name": "intents", "version": "2"}


class FakeServer:
    """A server that gives indexes in order, repeats the last one, and records requests."""

    def __init__(self, *states: str | None) -> None:
        self.states = list(states)
        self.under_its_path = [HTTPStatus.OK]
        self.orders: list[tuple[str, str, Any]] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v2":
            return httpx.Response(200, json={"name": "offramp", "models": ["intents"]})
        if request.url.path == "/v2/repository/index":
            state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
            return httpx.Response(200, json=[] if state is None else [ROW | {"state": state, "reason": "why"}])
        if request.url.path == "/v2/models/intents/versions/2/ready":
            status = self.under_its_path.pop(0) if len(self.under_its_path) > 1 else self.under_its_path[0]
            return httpx.Response(status, json={})
        body = json.loads(request.content) if request.content else None
        self.orders.append((request.method, request.url.path, body))
        return httpx.Response(200, json=SIDES)


def test_loading_waits_until_the_version_is_ready_or_did_not_start() -> None:
    server = FakeServer(None, "LOADING", "LOADING", "READY")
    client, sleeper = client_of(server)
    client.load("intents", "2", settings="{}", timeout_s=10.0)
    body = {"parameters": {"version": "2", "config": "{}"}}
    assert server.orders == [("POST", "/v2/repository/models/intents/load", body)]
    assert sleeper.clock.now_s() == 1.5  # three polls of half a second
    client, _ = client_of(FakeServer("LOADING", "UNAVAILABLE"))
    with pytest.raises(OfframpError, match="version '2' of 'intents' did not start: why"):
        client.load("intents", "2")
    silent = Script(httpx.Response(200, json={}), httpx.Response(200, json=[ROW | {"state": "UNAVAILABLE"}]))
    with pytest.raises(OfframpError, match="did not start: no reason told"):
        client_of(silent)[0].load("intents", "2")
    client, _ = client_of(lambda request: httpx.Response(403, json={"error": "not by HTTP"}))
    with pytest.raises(InputError, match=r"^not by HTTP"):
        client.versions()


@pytest.mark.parametrize("last", [HTTPStatus.OK, HTTPStatus.NOT_FOUND])
def test_loading_waits_until_the_path_of_the_version_answers(last: HTTPStatus) -> None:
    server = FakeServer("READY")
    server.under_its_path = [HTTPStatus.SERVICE_UNAVAILABLE, HTTPStatus.SERVICE_UNAVAILABLE, last]
    client, sleeper = client_of(server)
    client.load("intents", "2", timeout_s=10.0)
    assert sleeper.clock.now_s() == 1.0


def test_waiting_for_a_version_ends_at_the_timeout() -> None:
    server = FakeServer("READY")
    server.under_its_path = [HTTPStatus.SERVICE_UNAVAILABLE]
    client, sleeper = client_of(server)
    with pytest.raises(DeadlineError, match="version '2' of 'intents' runs but was not ready in time"):
        client.load("intents", "2", timeout_s=3.0)
    assert sleeper.clock.now_s() <= 3.0
    client, sleeper = client_of(FakeServer("LOADING"))
    with pytest.raises(DeadlineError, match="version '2' of 'intents' is LOADING after 3 s"):
        client.load("intents", "2", timeout_s=3.0)
    assert sleeper.clock.now_s() <= 3.0


@pytest.mark.parametrize("state", [None, "UNAVAILABLE"])
def test_unloading_waits_until_the_version_is_gone(state: str | None) -> None:
    server = FakeServer("READY", "UNLOADING", state)
    client, sleeper = client_of(server)
    client.unload("intents", "2")
    assert server.orders == [("POST", "/v2/repository/models/intents/unload", {"parameters": {"version": "2"}})]
    assert sleeper.clock.now_s() == 1.0
