"""Clients for a running Offramp server, blocking and asynchronous: they send and sleep, `flows` decides."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from functools import wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, Unpack

import httpx

from earlyexit.clock import Clock, MonotonicClock
from earlyexit.errors import OfframpError
from offramp.client.flows import Flow, Flows, Send, T
from offramp.client.generation import Generation, Options, Piece, Prompt, Reading
from offramp.client.protocol import JSON_LENGTH_HEADER, NoReply, Prediction, Reply, key_header, read_reply

# Streams of text on their way from a server.


BROKEN = "the server's stream broke off"


class Pieces:
    """An iterator of pieces of text; a context manager, since closing it early ends the sequence."""

    def __init__(self, response: httpx.Response, reading: Reading) -> None:
        self._response = response
        self._reading = reading
        self._pieces = self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Iterator[Piece]:
        return self._pieces

    def close(self) -> None:
        """Tell the server that the stream is no longer read."""
        self._response.close()

    def whole(self) -> Generation:
        """The answer, once all of it was read; raises OfframpError before."""
        return self._reading.whole()

    def _read(self) -> Iterator[Piece]:
        try:
            for line in self._response.iter_lines():
                piece = self._reading.line(line)
                if piece is not None:
                    yield piece
        except httpx.RequestError as error:
            raise OfframpError(f"{BROKEN}: {error or type(error).__name__}") from error
        finally:
            self._response.close()
        self._reading.whole()  # raises where it came to no end


class AsyncPieces:
    """`Pieces` for asyncio."""

    def __init__(self, response: httpx.Response, reading: Reading) -> None:
        self._response = response
        self._reading = reading
        self._pieces = self._read()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def __aiter__(self) -> AsyncIterator[Piece]:
        return self._pieces

    async def close(self) -> None:
        await self._response.aclose()

    def whole(self) -> Generation:
        return self._reading.whole()

    async def _read(self) -> AsyncIterator[Piece]:
        try:
            async for line in self._response.aiter_lines():
                piece = self._reading.line(line)
                if piece is not None:
                    yield piece
        except httpx.RequestError as error:
            raise OfframpError(f"{BROKEN}: {error or type(error).__name__}") from error
        finally:
            await self._response.aclose()
        self._reading.whole()


# Clients.


__all__ = ["AsyncClient", "Client", "Generation", "Piece", "Prediction"]

OPEN = 200
"""The status of a stream that has begun."""
DEFAULT_URL = "http://127.0.0.1:8000"


P = ParamSpec("P")


def _blocking(flow: Callable[Concatenate[Flows, P], Flow[T]]) -> Callable[Concatenate[Client, P], T]:
    """Returns the flow as a method of `Client`."""

    @wraps(flow)
    def call(client: Client, /, *arguments: P.args, **options: P.kwargs) -> T:
        return client._run(flow(client._flows, *arguments, **options))

    return call


def _awaited(
    flow: Callable[Concatenate[Flows, P], Flow[T]],
) -> Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]:
    """Returns the flow as a method of `AsyncClient`."""

    @wraps(flow)
    async def call(client: AsyncClient, /, *arguments: P.args, **options: P.kwargs) -> T:
        return await client._run(flow(client._flows, *arguments, **options))

    return call


class Client:
    """A blocking client; a context manager, safe to share between threads.

    Calls raise the errors of `earlyexit.errors`, with the request id as a note. `timeout_s` bounds a whole call, its
    attempts and the waits between them; a server that stalls within an attempt (connect, send, receive) can stretch
    it. A prediction may be computed twice when an attempt is repeated. `api_key` is sent with every request: over plain
    http every machine on the way can read it. `compressed`: have large answers compressed, which costs both sides more
    than it saves on a fast network.
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

    predict = _blocking(Flows.predict)
    predict_many = _blocking(Flows.predict_many)
    generate = _blocking(Flows.generate)
    generates = _blocking(Flows.generates)
    live = _blocking(Flows.live)
    ready = _blocking(Flows.ready)
    metadata = _blocking(Flows.metadata)
    versions = _blocking(Flows.versions)
    canary = _blocking(Flows.canary)
    set_canary = _blocking(Flows.set_canary)
    end_canary = _blocking(Flows.end_canary)
    promote = _blocking(Flows.promote)
    load = _blocking(Flows.load)
    unload = _blocking(Flows.unload)
    wait_until_ready = _blocking(Flows.wait_until_ready)

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Pieces:
        """The same, piece by piece: `with client.stream("Once") as pieces: for piece in pieces: ...`."""
        return Pieces(*self._run(self._flows.stream(prompt, options)))

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

    predict = _awaited(Flows.predict)
    predict_many = _awaited(Flows.predict_many)
    generate = _awaited(Flows.generate)
    generates = _awaited(Flows.generates)
    live = _awaited(Flows.live)
    ready = _awaited(Flows.ready)
    metadata = _awaited(Flows.metadata)
    versions = _awaited(Flows.versions)
    canary = _awaited(Flows.canary)
    set_canary = _awaited(Flows.set_canary)
    end_canary = _awaited(Flows.end_canary)
    promote = _awaited(Flows.promote)
    load = _awaited(Flows.load)
    unload = _awaited(Flows.unload)
    wait_until_ready = _awaited(Flows.wait_until_ready)

    async def stream(self, prompt: Prompt, **options: Unpack[Options]) -> AsyncPieces:
        return AsyncPieces(*await self._run(self._flows.stream(prompt, options)))

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
