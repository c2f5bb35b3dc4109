"""Clients for a running Offramp server, asynchronous and blocking.

Every call is written once, as a coroutine of `Calls` that waits for httpx and for sleep, and for nothing else. With
httpx's blocking client these return at once what they return, so a coroutine never suspends and ends in a single step.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from http import HTTPStatus
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Self, TypeAlias, TypeVar, Unpack

import httpx

from deployments.api.operations import OPERATION_BY_NAME, path_of
from earlyexit.clock import Clock, MonotonicClock
from earlyexit.errors import DeadlineError, InputError, OfframpError
from offramp.client.generation import Generation, Options, Piece, Prompt, Reading, generate_body, read_generation
from offramp.client.inputs import Input, TensorBody, answers_are_large, files_as_json, tensor_body, travel_as_json
from offramp.client.protocol import (
    JSON_LENGTH_HEADER,
    REQUEST_ID_HEADER,
    NoReply,
    Outcome,
    Prediction,
    Reply,
    error_kind,
    error_of,
    key_header,
    predict_body,
    read_predictions,
    read_reply,
    retry_wait_s,
)

__all__ = ["AsyncClient", "Client", "Generation", "Piece", "Prediction"]

DEFAULT_URL = "http://127.0.0.1:8000"
BROKEN = "the server's stream broke off"
READY_POLL_S = 0.2
"""Interval in seconds; much shorter than loading a model, and no load for the server."""
POLL_S = 0.5
"""Interval in seconds; shorter than the start or the end of a version."""

T = TypeVar("T")
P = ParamSpec("P")
Row: TypeAlias = dict[str, str]


async def _result(given: Awaitable[T] | T) -> T:
    """Returns what httpx returns, after waiting for it if it is the asynchronous client's."""
    return await given if isinstance(given, Awaitable) else given


class Pieces(Reading):
    """The pieces of a text as they come, from either client; an iterator, and a context manager that closes it."""

    def __init__(self, response: httpx.Response, request_id: str) -> None:
        super().__init__(request_id)
        self._response = response
        self._now, self._awaited = self._read(), self._read_async()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.aclose()

    def __iter__(self) -> Iterator[Piece]:
        return self._now

    def __next__(self) -> Piece:
        return next(self._now)

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self._awaited

    def close(self) -> None:
        """Closes the stream, which ends the sequence on the server."""
        self._response.close()

    async def aclose(self) -> None:
        """Closes the stream of the asynchronous client."""
        await self._response.aclose()

    def _read(self) -> Iterator[Piece]:
        with self, self._until_the_end():
            yield from filter(None, map(self.line, self._response.iter_lines()))

    async def _read_async(self) -> AsyncIterator[Piece]:
        async with self:
            with self._until_the_end():
                async for line in self._response.aiter_lines():
                    if (piece := self.line(line)) is not None:
                        yield piece

    @contextmanager
    def _until_the_end(self) -> Iterator[None]:
        """Raises OfframpError if the stream is broken, or ends before the text does."""
        try:
            yield
        except httpx.RequestError as error:
            raise OfframpError(f"{BROKEN}: {error or type(error).__name__}") from error
        self.whole()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Request:
    """The request of a call, which may be sent several times."""

    method: str
    path: str
    request_id: str
    body: dict[str, object] | TensorBody | None = None
    tells_timeout: bool = True
    """Whether the body contains the timeout."""
    streams: bool = False
    """Whether the caller reads an answer of status 200: the reply's payload is then the open response."""

    def arguments(self, timeout_s: float) -> dict[str, Any]:
        """Returns the arguments of `httpx.Client.build_request`."""
        body, headers = self.body, {REQUEST_ID_HEADER: self.request_id}
        arguments = {"method": self.method, "url": self.path, "headers": headers, "timeout": timeout_s}
        if isinstance(body, TensorBody):
            content, more = body.content(timeout_s if self.tells_timeout else None)
            return arguments | {"content": content, "headers": headers | more}
        if body is not None and self.tells_timeout:
            body = body | {"timeout_s": timeout_s}
        return arguments | {"json": body}


class Calls:
    """Every call of both clients.

    Calls raise the errors of `earlyexit.errors`, with the request id as a note. `timeout_s` bounds a whole call, its
    attempts and the waits between them; a server that stalls within an attempt (connect, send, receive) can stretch
    it. A prediction may be computed twice when an attempt is repeated.
    """

    def __init__(
        self,
        http: httpx.AsyncClient | httpx.Client,
        sleep: Callable[[float], object],
        timeout_s: float,
        max_attempts: int,
        clock: Clock | None,
        rng: random.Random | None,
    ) -> None:
        self._http = http
        self._sleep = sleep
        self._timeout_s = timeout_s
        self._max_attempts = max_attempts
        self._clock = clock or MonotonicClock()
        self._rng = rng or random.Random()
        self._known: dict[str, Any] = {}
        """The model's metadata, after it was requested."""
        self._known_name: str | None = None
        """The model's name, after it was requested."""

    async def predict(
        self,
        given: Input,
        *,
        truncate: bool = False,
        timeout_s: float | None = None,
        request_id: str | None = None,
        in_words: bool = False,
    ) -> Prediction:
        """Returns the answer to one input: a text, a pair of texts, an image (bytes or path), or arrays.

        `truncate` cuts a text beyond the model's length instead of refusing it. Answers of many numbers are arrays;
        `in_words`, those to image files are what `POST /predict` says in JSON: a class map is a PNG file in base64,
        with the classes that are there, and keypoints have their joints' names.
        """
        body = await self._body([given], given, truncate=truncate, in_words=in_words)
        [prediction] = await self._predictions(body, 1, timeout_s, request_id)
        return prediction

    async def predict_many(
        self,
        given: Sequence[Input],
        *,
        truncate: bool = False,
        timeout_s: float | None = None,
        request_id: str | None = None,
        in_words: bool = False,
    ) -> list[Prediction]:
        """Returns the answers to several inputs of one kind, in order, from one request that fails as a whole."""
        if isinstance(given, str | bytes | Path | Mapping):
            raise InputError("predict_many takes a list of inputs; predict takes one")
        rows = list(given)
        if not rows:
            return []
        body = await self._body(rows, rows, truncate=truncate, in_words=in_words)
        return await self._predictions(body, len(rows), timeout_s, request_id)

    async def live(self) -> bool:
        """Returns whether the server runs and can be reached."""
        return _is_ok(await self._ask("live", self._timeout_s))

    async def ready(self) -> bool:
        """Returns whether the server is ready for predictions."""
        return _is_ok(await self._ask("ready", self._timeout_s))

    async def metadata(self, name: str | None = None) -> dict[str, Any]:
        """Returns the metadata of the model `name`, or of the served model."""
        return dict(await self._order("model_metadata", model=name or await self._served_model()))

    async def wait_until_ready(self, timeout_s: float) -> None:
        """Returns as soon as the server is ready; raises DeadlineError after `timeout_s`."""
        if not await self._asked_until(_is_ok, "ready", self._clock.now_s() + timeout_s, READY_POLL_S):
            raise DeadlineError(f"the server was not ready within {timeout_s:g} s")

    async def generates(self) -> dict[str, Any]:
        """Returns facts about a model that generates, such as `max_model_len`, and its `ramps` in `offramp`."""
        return dict((await self._order("models"))["data"][0])

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation:
        """Continues a text, or answers messages; see `Options` for the options."""
        request_id = options.get("request_id") or _new_id()
        return read_generation(await self._generated(prompt, options, request_id, streams=False), request_id)

    async def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Pieces:
        """Streams the answer in pieces: `with client.stream("Once") as pieces: for piece in pieces: ...`."""
        request_id = options.get("request_id") or _new_id()
        return Pieces(await self._generated(prompt, options, request_id, streams=True), request_id)

    async def versions(self) -> list[Row]:
        """Returns all models and versions on the server's cluster, with their states."""
        return list(await self._order("index", {}))

    async def canary(self) -> dict[str, Any]:
        """Returns the figures of the default version and the canary."""
        return await self._order_of_model("canary")

    async def set_canary(self, version: str, *, share: float, compare_share: float = 0.0) -> dict[str, Any]:
        """Lets a version answer a share of the requests that name none; both answer `compare_share` of them."""
        body: dict[str, object] = {"version": version, "share": share, "compare_share": compare_share}
        return await self._order_of_model("set_canary", body)

    async def end_canary(self) -> dict[str, Any]:
        """Lets the default version answer all requests that name none."""
        return await self._order_of_model("end_canary")

    async def promote(self, version: str) -> dict[str, Any]:
        """Makes a version the default."""
        return await self._order_of_model("set_default", {"version": version})

    async def load(self, model: str, version: str, *, settings: str | None = None, timeout_s: float = 600.0) -> None:
        """Starts a version, by settings as JSON or from the server's folder, and waits until it is ready."""
        parameters = {"version": version} if settings is None else {"version": version, "config": settings}
        await self._order("load", {"parameters": parameters}, model=model)

        def is_ready(row: Row | None) -> bool:
            if row is not None and row["state"] == "UNAVAILABLE":
                raise OfframpError(f"version {version!r} of {model!r} did not start: {row['reason']}")
            return row is not None and row["state"] == "READY"

        until_s = self._clock.now_s() + timeout_s
        await self._wait(model, version, is_ready, timeout_s)
        if not await self._asked_until(_is_served, "model_ready", until_s, POLL_S, model=model, version=version):
            raise DeadlineError(f"version {version!r} of {model!r} runs but was not ready in time")

    async def unload(self, model: str, version: str, *, timeout_s: float = 600.0) -> None:
        """Ends a version, and waits until it is gone."""
        await self._order("unload", {"parameters": {"version": version}}, model=model)
        await self._wait(model, version, lambda row: row is None or row["state"] == "UNAVAILABLE", timeout_s)

    async def _wait(self, model: str, version: str, is_so: Callable[[Row | None], bool], timeout_s: float) -> None:
        """Waits until the index shows the wanted state; raises DeadlineError."""
        until_s = self._clock.now_s() + timeout_s
        while True:
            rows = await self.versions()
            row = next((each for each in rows if (each["name"], each["version"]) == (model, version)), None)
            if is_so(row):
                return
            if self._clock.now_s() + POLL_S >= until_s:
                state = "not there" if row is None else row["state"]
                raise DeadlineError(f"version {version!r} of {model!r} is {state} after {timeout_s:g} s")
            await _result(self._sleep(POLL_S))

    async def _body(
        self, rows: Sequence[Input], as_json: object, *, truncate: bool, in_words: bool
    ) -> dict[str, object] | TensorBody:
        """`as_json`: the same inputs in JSON, if they are texts."""
        if travel_as_json(rows):
            return predict_body(as_json, truncate=truncate)
        if not self._known:
            self._known.update(await self.metadata())
        if in_words and answers_are_large(self._known) and (files := files_as_json(rows)) is not None:
            return predict_body(files, truncate=truncate)
        return tensor_body(rows, self._known, {"truncate": True} if truncate else {})

    async def _predictions(
        self, body: dict[str, object] | TensorBody, num_inputs: int, timeout_s: float | None, request_id: str | None
    ) -> list[Prediction]:
        path = body.path if isinstance(body, TensorBody) else path_of("predict")
        request = _Request(method="POST", path=path, request_id=request_id or _new_id(), body=body)
        payload = await self._exchange(request, self._timeout_s if timeout_s is None else timeout_s)
        return read_predictions(payload, num_inputs=num_inputs, request_id=request.request_id)

    async def _generated(self, prompt: Prompt, options: Options, request_id: str, *, streams: bool) -> Any:
        if self._known_name is None:
            self._known_name = await self._served_model()
        request = _Request(
            method="POST",
            path=path_of("completions" if isinstance(prompt, str) else "chat"),
            request_id=request_id,
            body=generate_body(prompt, self._known_name, options, streams=streams),
            streams=streams,
            # Of a stream the limit is on each wait for a part, which is the client's own affair.
            tells_timeout=not streams or "timeout_s" in options,
        )
        return await self._exchange(request, options.get("timeout_s", self._timeout_s))

    async def _served_model(self) -> str:
        """Returns the model's name from `GET /v2`: the first of its `models`, else the server's own name."""
        match server := await self._order("server_metadata"):
            case {"models": [str(name), *_]} | {"models": [{"name": str(name)}, *_]} | {"name": str(name)}:
                return name
        raise OfframpError(f"the server names no model: {server!r:.200}")

    async def _order_of_model(self, operation: str, body: dict[str, object] | None = None) -> dict[str, Any]:
        return dict(await self._order(operation, body, model=await self._served_model()))

    async def _order(self, operation: str, body: dict[str, object] | None = None, **named: str) -> Any:
        """Returns the server's answer to an operation that may be repeated; `named`: the parameters of its path."""
        return await self._exchange(_request(operation, body, **named), self._timeout_s)

    async def _exchange(self, request: _Request, timeout_s: float) -> Any:
        """Sends a request, with retries under the same id; returns the answer's JSON, or raises its error."""
        until_s, left_s, attempt = self._clock.now_s() + timeout_s, timeout_s, 0
        while True:
            attempt += 1
            outcome = await self._attempt(request, left_s)
            left_s = until_s - self._clock.now_s()
            wait_s = retry_wait_s(
                outcome, attempt=attempt, max_attempts=self._max_attempts, left_s=left_s, jitter=self._rng.random()
            )
            if wait_s is None:
                break
            left_s -= wait_s
            await _result(self._sleep(wait_s))
        if isinstance(outcome, Reply) and error_kind(outcome) is None:
            return outcome.payload
        error = error_of(outcome)
        error.add_note(f"request id {request.request_id}")
        raise error

    async def _asked_until(
        self, is_so: Callable[[Outcome], bool], operation: str, until_s: float, poll_s: float, **named: str
    ) -> bool:
        """Repeats a request until the answer is as wanted; returns False after the time limit."""
        left_s = until_s - self._clock.now_s()
        while left_s > 0:
            if is_so(await self._ask(operation, left_s, **named)):
                return True
            left_s = until_s - self._clock.now_s() - poll_s
            if left_s > 0:
                await _result(self._sleep(poll_s))
        return False

    async def _ask(self, operation: str, timeout_s: float, **named: str) -> Outcome:
        """Sends an operation once, and returns its outcome."""
        return await self._attempt(_request(operation, None, **named), timeout_s)

    async def _attempt(self, request: _Request, timeout_s: float) -> Outcome:
        http = self._http
        try:
            built = http.build_request(**request.arguments(timeout_s))
            response: httpx.Response = await _result(http.send(built, stream=request.streams))
            if request.streams and response.status_code != HTTPStatus.OK:
                await _result(response.aread() if isinstance(http, httpx.AsyncClient) else response.read())
        except UnicodeEncodeError as error:  # bytes of an argument or a pipe that were no UTF-8
            raise InputError(f"the text is not Unicode: {error.reason}") from error
        except httpx.TimeoutException:
            return NoReply(kind="timeout", message=f"no answer from {http.base_url} within {timeout_s:g} s")
        except httpx.RequestError as error:
            words = error or type(error).__name__
            return NoReply(kind="connection", message=f"no connection to {http.base_url}: {words}")
        if request.streams and response.status_code == HTTPStatus.OK:
            return Reply(status=HTTPStatus.OK, payload=response)
        retry_after, json_length = map(response.headers.get, ("Retry-After", JSON_LENGTH_HEADER))
        return read_reply(response.status_code, response.content, retry_after, json_length)


class AsyncClient(Calls):
    """The client for asyncio: the calls of `Client`, awaited."""

    def __init__(
        self,
        url: str = DEFAULT_URL,
        timeout_s: float = 30.0,
        max_attempts: int = 4,
        transport: httpx.AsyncBaseTransport | None = None,
        *,
        api_key: str | None = None,
        compressed: bool = False,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        sleep: Callable[[float], Coroutine[Any, Any, object]] = asyncio.sleep,
    ) -> None:
        http = httpx.AsyncClient(base_url=url, transport=transport, headers=_headers(api_key, compressed=compressed))
        super().__init__(http, sleep, timeout_s, max_attempts, clock, rng)
        self._client = http

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()


def _finished(call: Coroutine[Any, Any, T]) -> T:
    """Returns the result of a coroutine that never suspends."""
    try:
        call.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError("a call of the blocking client has suspended")


def _blocking(call: Callable[Concatenate[Calls, P], Coroutine[Any, Any, T]]) -> Callable[Concatenate[Client, P], T]:
    """Returns the call as a method of `Client`."""

    @wraps(call)
    def blocking(client: Client, /, *arguments: P.args, **options: P.kwargs) -> T:
        return _finished(call(client._calls, *arguments, **options))

    return blocking


class Client:
    """A blocking client; a context manager, safe to share between threads.

    Its methods are those of `Calls`, which says what they raise and how long they wait. `api_key` is sent with every
    request: over plain http every machine on the way can read it. `compressed`: have large answers compressed, which
    costs both sides more than it saves on a fast network.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        timeout_s: float = 30.0,
        max_attempts: int = 4,
        transport: httpx.BaseTransport | None = None,
        *,
        api_key: str | None = None,
        compressed: bool = False,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._http = httpx.Client(base_url=url, transport=transport, headers=_headers(api_key, compressed=compressed))
        self._calls = Calls(self._http, sleep, timeout_s, max_attempts, clock, rng)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    predict = _blocking(Calls.predict)
    predict_many = _blocking(Calls.predict_many)
    generate = _blocking(Calls.generate)
    stream = _blocking(Calls.stream)
    generates = _blocking(Calls.generates)
    live = _blocking(Calls.live)
    ready = _blocking(Calls.ready)
    metadata = _blocking(Calls.metadata)
    versions = _blocking(Calls.versions)
    canary = _blocking(Calls.canary)
    set_canary = _blocking(Calls.set_canary)
    end_canary = _blocking(Calls.end_canary)
    promote = _blocking(Calls.promote)
    load = _blocking(Calls.load)
    unload = _blocking(Calls.unload)
    wait_until_ready = _blocking(Calls.wait_until_ready)


def _request(operation: str, body: dict[str, object] | None, **named: str) -> _Request:
    method, path = OPERATION_BY_NAME[operation].method, path_of(operation, **named)
    return _Request(method=method, path=path, request_id=_new_id(), body=body, tells_timeout=False)


def _is_ok(outcome: Outcome) -> bool:
    return isinstance(outcome, Reply) and outcome.status == HTTPStatus.OK


def _is_served(outcome: Outcome) -> bool:
    """Returns whether a version answers under its path; one with its own route prefix is not found there.

    Serve may call an application running before its ingress has seen every stage, or a proxy the ingress.
    """
    return isinstance(outcome, Reply) and outcome.status != HTTPStatus.SERVICE_UNAVAILABLE


def _new_id() -> str:
    return uuid.uuid4().hex


def _headers(api_key: str | None, *, compressed: bool) -> dict[str, str]:
    return {**key_header(api_key), "Accept-Encoding": "gzip" if compressed else "identity"}
