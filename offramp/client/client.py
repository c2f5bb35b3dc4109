"""Clients for a running Offramp server, blocking and asynchronous: they send and sleep, `flows` decides."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import httpx

from earlyexit.clock import Clock, MonotonicClock
from offramp.client.credentials import key_header
from offramp.client.flows import LIVE_PATH, READY_PATH, Asked, Flow, Flows, Row, Send, T, VersionFlows
from offramp.client.generation import Generation, Options, Piece, Prompt
from offramp.client.inputs import Input
from offramp.client.protocol import JSON_LENGTH_HEADER, NoReply, Prediction, Reply, read_reply
from offramp.client.streams import AsyncPieces, Pieces

__all__ = ["AsyncClient", "Client", "Generation", "Piece", "Prediction"]

OPEN = 200
"""The status of a stream that has begun."""
DEFAULT_URL = "http://127.0.0.1:8000"


class Client:
    """A blocking client; a context manager, safe to share between threads.

    Calls raise the errors of `earlyexit.errors`, with the request id as a note. `timeout_s` bounds a whole call, its
    attempts and the waits between them; a server that stalls within an attempt (connect, send, receive) can stretch
    it. A prediction may be computed twice when an attempt is repeated. `api_key` is sent with every request: over plain
    http every machine on the way can read it. `compressed`: have large answers
    compressed, which costs both sides more than it saves on a fast network.
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
        self._flows = _flows(timeout_s, max_attempts, clock, rng)
        self._versions = VersionFlows(flows=self._flows)
        self._http = httpx.Client(base_url=url, transport=transport, headers=_headers(api_key, compressed=compressed))
        self._sleep = sleep

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def predict(
        self,
        given: Input,
        *,
        truncate: bool = False,
        timeout_s: float | None = None,
        request_id: str | None = None,
        in_words: bool = False,
    ) -> Prediction:
        """Answer one input: a text, a pair of texts, an image file's bytes or path, an array, or several by name.

        `truncate` cuts a text beyond the model's length instead of refusing it. Answers of many numbers are arrays;
        `in_words`, those to image files are what `POST /predict` says in JSON: a class map is a PNG file in base64,
        with the classes that are there, and keypoints have their joints' names.
        """
        asked = Asked(truncate=truncate, timeout_s=timeout_s, request_id=request_id, in_words=in_words)
        return self._run(self._flows.predict(given, asked))

    def predict_many(
        self,
        given: Sequence[Input],
        *,
        truncate: bool = False,
        timeout_s: float | None = None,
        request_id: str | None = None,
        in_words: bool = False,
    ) -> list[Prediction]:
        """Answer several inputs of one kind, in their order, as one request; they are answered, or fail, together."""
        asked = Asked(truncate=truncate, timeout_s=timeout_s, request_id=request_id, in_words=in_words)
        return self._run(self._flows.predict_many(given, asked))

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation:
        """Go on with a text, or answer messages; `Options` says what may be asked."""
        return self._run(self._flows.generate(prompt, options))

    def generates(self) -> dict[str, Any]:
        """What the server says of a model that generates: its `max_model_len`, and in `offramp` its `ramps`."""
        return self._run(self._flows.generates())

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Pieces:
        """The same, piece by piece: `with client.stream("Once") as pieces: for piece in pieces: ...`."""
        return Pieces(*self._run(self._flows.stream(prompt, options)))

    def live(self) -> bool:
        """Whether the server runs; a server that cannot be reached does not."""
        return self._run(self._flows.probe(LIVE_PATH))

    def ready(self) -> bool:
        """Whether the server would take a prediction now."""
        return self._run(self._flows.probe(READY_PATH))

    def metadata(self, name: str | None = None) -> dict[str, Any]:
        """Ask what the server knows of the model `name`, or about the one it serves."""
        return self._run(self._flows.metadata(name))

    def versions(self) -> list[Row]:
        """Every model and version on the server's cluster, and its state."""
        return self._run(self._versions.index())

    def canary(self) -> dict[str, Any]:
        """The default version and the canary, side by side."""
        return self._run(self._versions.canary())

    def set_canary(self, version: str, *, share: float, compare_share: float = 0.0) -> dict[str, Any]:
        """Let a version answer a share of the requests that name none; ask both for `compare_share` of them."""
        return self._run(self._versions.set_canary(version, share, compare_share))

    def end_canary(self) -> dict[str, Any]:
        """Let the default version answer all requests that name none."""
        return self._run(self._versions.end_canary())

    def promote(self, version: str) -> dict[str, Any]:
        """Make a version the default one."""
        return self._run(self._versions.promote(version))

    def load(self, model: str, version: str, *, settings: str | None = None, timeout_s: float = 600.0) -> None:
        """Start a version, by its settings as JSON or from the server's folder, and wait until it is ready."""
        self._run(self._versions.load(model, version, settings, timeout_s))

    def unload(self, model: str, version: str, *, timeout_s: float = 600.0) -> None:
        """End a version, and wait until it is gone."""
        self._run(self._versions.unload(model, version, timeout_s))

    def wait_until_ready(self, timeout_s: float) -> None:
        """Return as soon as the server is ready; raises DeadlineError after `timeout_s`."""
        self._run(self._flows.wait_until_ready(timeout_s))

    def _run(self, flow: Flow[T]) -> T:
        try:
            send = next(flow)
            while True:
                send = flow.send(self._perform(send))
        except StopIteration as done:
            result: T = done.value
            return result

    def _perform(self, send: Send) -> Reply | NoReply:
        if send.after_s > 0:
            self._sleep(send.after_s)
        request = self._http.build_request(**send.arguments())
        try:
            response = self._http.send(request, stream=send.streams)
            if send.streams and response.status_code == OPEN:
                return Reply(status=OPEN, payload=response)
            response.read()
            return _reply(response)
        except httpx.RequestError as error:
            return _no_reply(error, self._http.base_url, send)


class AsyncClient:
    """`Client` for asyncio: the same calls, awaited."""

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
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._flows = _flows(timeout_s, max_attempts, clock, rng)
        self._versions = VersionFlows(flows=self._flows)
        self._http = httpx.AsyncClient(
            base_url=url, transport=transport, headers=_headers(api_key, compressed=compressed)
        )
        self._sleep = sleep

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def predict(
        self,
        given: Input,
        *,
        truncate: bool = False,
        timeout_s: float | None = None,
        request_id: str | None = None,
        in_words: bool = False,
    ) -> Prediction:
        asked = Asked(truncate=truncate, timeout_s=timeout_s, request_id=request_id, in_words=in_words)
        return await self._run(self._flows.predict(given, asked))

    async def predict_many(
        self,
        given: Sequence[Input],
        *,
        truncate: bool = False,
        timeout_s: float | None = None,
        request_id: str | None = None,
        in_words: bool = False,
    ) -> list[Prediction]:
        asked = Asked(truncate=truncate, timeout_s=timeout_s, request_id=request_id, in_words=in_words)
        return await self._run(self._flows.predict_many(given, asked))

    async def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Generation:
        return await self._run(self._flows.generate(prompt, options))

    async def generates(self) -> dict[str, Any]:
        return await self._run(self._flows.generates())

    async def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncPieces:
        return AsyncPieces(*await self._run(self._flows.stream(prompt, options)))

    async def live(self) -> bool:
        return await self._run(self._flows.probe(LIVE_PATH))

    async def ready(self) -> bool:
        return await self._run(self._flows.probe(READY_PATH))

    async def metadata(self, name: str | None = None) -> dict[str, Any]:
        return await self._run(self._flows.metadata(name))

    async def versions(self) -> list[Row]:
        return await self._run(self._versions.index())

    async def canary(self) -> dict[str, Any]:
        return await self._run(self._versions.canary())

    async def set_canary(self, version: str, *, share: float, compare_share: float = 0.0) -> dict[str, Any]:
        return await self._run(self._versions.set_canary(version, share, compare_share))

    async def end_canary(self) -> dict[str, Any]:
        return await self._run(self._versions.end_canary())

    async def promote(self, version: str) -> dict[str, Any]:
        return await self._run(self._versions.promote(version))

    async def load(self, model: str, version: str, *, settings: str | None = None, timeout_s: float = 600.0) -> None:
        await self._run(self._versions.load(model, version, settings, timeout_s))

    async def unload(self, model: str, version: str, *, timeout_s: float = 600.0) -> None:
        await self._run(self._versions.unload(model, version, timeout_s))

    async def wait_until_ready(self, timeout_s: float) -> None:
        await self._run(self._flows.wait_until_ready(timeout_s))

    async def _run(self, flow: Flow[T]) -> T:
        try:
            send = next(flow)
            while True:
                send = flow.send(await self._perform(send))
        except StopIteration as done:
            result: T = done.value
            return result

    async def _perform(self, send: Send) -> Reply | NoReply:
        if send.after_s > 0:
            await self._sleep(send.after_s)
        request = self._http.build_request(**send.arguments())
        try:
            response = await self._http.send(request, stream=send.streams)
            if send.streams and response.status_code == OPEN:
                return Reply(status=OPEN, payload=response)
            await response.aread()
            return _reply(response)
        except httpx.RequestError as error:
            return _no_reply(error, self._http.base_url, send)


def _flows(timeout_s: float, max_attempts: int, clock: Clock | None, rng: random.Random | None) -> Flows:
    return Flows(
        timeout_s=timeout_s,
        max_attempts=max_attempts,
        clock=clock or MonotonicClock(),
        rng=rng or random.Random(),
    )


def _headers(api_key: str | None, *, compressed: bool) -> dict[str, str]:
    return {**key_header(api_key), "Accept-Encoding": "gzip" if compressed else "identity"}


def _reply(response: httpx.Response) -> Reply:
    headers = response.headers
    return read_reply(
        response.status_code, response.content, headers.get("Retry-After"), headers.get(JSON_LENGTH_HEADER)
    )


def _no_reply(error: httpx.RequestError, url: httpx.URL, send: Send) -> NoReply:
    if isinstance(error, httpx.TimeoutException):
        return NoReply(kind="timeout", message=f"no answer from {url} within {send.timeout_s:g} s")
    return NoReply(kind="connection", message=f"no connection to {url}: {error or type(error).__name__}")
