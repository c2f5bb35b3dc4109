"""A small HTTP/1.1 client for the load generator, which may share its cores with the server and must be fast.

Connections are kept alive and carry one request at a time. A request that finds none free opens one.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeAlias, cast
from urllib.parse import quote

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from earlyexit.errors import DeadlineError, InputError
from offramp.client.protocol import (
    REPLY_HEADERS,
    Failure,
    Outcome,
    Request,
    connection_failure,
    key_header,
    read_reply,
    split_address,
)

Post: TypeAlias = Callable[[Request, float], Awaitable[Outcome]]
"""Sends a request, and returns its outcome within a timeout in seconds. Raises InputError for unsuitable inputs."""

KEEP_ALIVE_S = 4.0
"""Below the 5 s after which uvicorn and Ray Serve close an idle connection."""
SWITCHING_PROTOCOLS = 101
WITH_LENGTH = frozenset({"content-length", "transfer-encoding"})
"""Headers which show that the end of the connection is not the end of the body."""
KEPT = WITH_LENGTH.union(REPLY_HEADERS)
"""The headers that are read."""


@asynccontextmanager
async def connected(url: str, *, api_key: str | None = None) -> AsyncIterator[Post]:
    """Yields a function that sends predictions to a service; raises InputError for an invalid address."""
    connections = Connections(url, key_header(api_key))
    try:
        yield connections.post
    finally:
        for connection in connections.free:
            connection.close()
        await asyncio.sleep(0)


class Connections:
    """Connections to one server. Free ones are used in turn, so that all processes of the server get requests."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        """Raises InputError for an address that is invalid, is not ASCII, or has a user."""
        parts = split_address(url)
        if "@" in parts.netloc:
            raise InputError("the server's address must not contain a user or password: keys are passed as api_key")
        if not parts.netloc.isascii():
            raise InputError(f"the server's address must be like http://host:port, in ASCII, not {url!r}")
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = quote(parts.path, safe="/%").rstrip("/")
        self._head = _lines({"Host": parts.netloc, "User-Agent": "offramp", "Accept": "*/*", **headers})
        self.free: deque[Connection] = deque()

    async def post(self, request: Request, timeout_s: float) -> Outcome:
        """Sends a request and waits at most `timeout_s` for the answer. Without one, the connection is closed."""
        content, headers = request.content(timeout_s)
        sized = headers | {"Content-Length": str(len(content))}
        head = f"POST {self._prefix}{request.path} HTTP/1.1\r\n{self._head}{_lines(sized)}\r\n"
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        late = Failure(error=DeadlineError(f"no answer within {timeout_s:g} s"), kind="timeout")
        try:
            connection = self._take_free(now_s)
            if connection is None:
                async with asyncio.timeout_at(now_s + timeout_s):
                    make = partial(Connection, self.free)
                    _, connection = await loop.create_connection(make, self._host, self._port, ssl=self._tls)
        except TimeoutError:
            return late
        except OSError as error:
            return connection_failure(str(error) or type(error).__name__)
        return await connection.send(head.encode("latin-1") + content, now_s + timeout_s, late)

    def _take_free(self, now_s: float) -> Connection | None:
        while self.free:
            connection = self.free.popleft()
            if connection.is_open and now_s - connection.free_since_s < KEEP_ALIVE_S:
                return connection
            connection.close()
        return None


class Connection(asyncio.Protocol):
    """A connection, with the answer that it is waiting for."""

    def __init__(self, free: deque[Connection]) -> None:
        self.is_open = False
        self.free_since_s = 0.0
        self._free = free
        self._loop = asyncio.get_running_loop()
        self._parser = HttpResponseParser(self)
        self._outcome: asyncio.Future[Outcome] | None = None
        self._transport: asyncio.Transport
        self._begin()

    async def send(self, data: bytes, until_s: float, late: Failure) -> Outcome:
        """Sends a request, and returns its outcome, or `late` after its time. The connection is then free or closed."""
        outcome: asyncio.Future[Outcome] = self._loop.create_future()
        self._outcome = outcome
        self._begin()
        timer = self._loop.call_at(until_s, self._end, late)
        self._transport.write(data)
        try:
            return await outcome
        finally:
            timer.cancel()
            if outcome.cancelled() or outcome.result() is late:
                self.close()

    def close(self) -> None:
        """Closes the connection."""
        self.is_open = False
        self._transport.abort()

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport is not a subclass
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self._end(connection_failure(f"the answer is not HTTP: {error}"))
            self.close()

    def eof_received(self) -> None:
        self.is_open = False  # asyncio closes it later in this iteration of the loop

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if exc is None and self._has_headers and not WITH_LENGTH & self._headers.keys():
            self._end(self._reply())
        self._end(connection_failure(str(exc or "the server closed the connection")))

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        lower = name.lower().decode("latin-1")
        if lower in KEPT:
            self._headers[lower] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Stores that the end of the connection may be the end of the body from now on."""
        self._has_headers = True

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        """Finishes the request, unless this is an interim response (RFC 9110, section 15.2)."""
        status = self._parser.get_status_code()
        if status == SWITCHING_PROTOCOLS:
            self._end(connection_failure("the server switched to another protocol (101)"))
            self.close()
        elif status < 200:
            self._begin()
        else:
            # The request may have timed out in this iteration of the loop.
            is_awaited = self._outcome is not None and not self._outcome.done()
            if self._parser.should_keep_alive() and self.is_open and is_awaited:
                self.free_since_s = self._loop.time()
                self._free.append(self)
            else:
                self.close()
            self._end(self._reply())

    def _begin(self) -> None:
        self._body: list[bytes] = []
        self._headers: dict[str, str] = {}
        self._has_headers = False

    def _reply(self) -> Outcome:
        return read_reply(self._parser.get_status_code(), b"".join(self._body), self._headers)

    def _end(self, outcome: Outcome) -> None:
        if self._outcome is not None and not self._outcome.done():
            self._outcome.set_result(outcome)
        self._outcome = None


def _lines(headers: Mapping[str, str]) -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())
