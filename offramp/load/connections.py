"""HTTP/1.1 for a load generator that shares its processors with the server: kept connections, parsed by httptools.

A connection carries one request at a time; a request that finds none free opens one. Redirects are not followed.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TypeAlias, cast
from urllib.parse import SplitResult, quote, urlsplit

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from deployments.api.operations import path_of
from earlyexit.errors import InputError
from offramp.client.inputs import TensorBody
from offramp.client.protocol import JSON_LENGTH_HEADER, REQUEST_ID_HEADER, NoReply, Outcome, key_header, read_reply

Body: TypeAlias = dict[str, object] | TensorBody
Post: TypeAlias = Callable[[str, Body, float], Awaitable[Outcome]]
"""The seam to the network: sends a body under a request's id, and waits so many seconds for what comes of it; raises
nothing."""

KEEP_ALIVE_S = 4.0
"""Below the 5 s after which uvicorn and Ray Serve close an idle connection: never send on one that is closing."""
SWITCHING_PROTOCOLS = 101
JSON = "Content-Type: application/json\r\n"
JSON_LENGTH = JSON_LENGTH_HEADER.lower().encode()
WITH_LENGTH = (b"content-length", b"transfer-encoding")
"""Headers of an answer that does not end with its connection."""


@asynccontextmanager
async def connected(url: str, *, api_key: str | None = None) -> AsyncIterator[Post]:
    """The network, as a generator sees it: predictions of a service. Raises InputError for what is no address."""
    connections = Connections(url, key_header(api_key))
    try:
        yield connections.post
    finally:
        await connections.close()


class Connections:
    """To one server. Free ones take turns, so that a server of several processes has work for all of them."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        parts = _split(url)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host = parts.hostname or ""
        self._port = parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        self._head = _lines({"Host": parts.netloc, "User-Agent": "offramp", "Accept": "*/*", **headers})
        self._free: deque[Connection] = deque()

    async def post(self, request_id: str, body: Body, timeout_s: float) -> Outcome:
        """Send once and wait at most `timeout_s` for the answer; its connection is closed where there is none."""
        if isinstance(body, TensorBody):
            path, (content, more) = body.path, body.content(timeout_s)
            headers = _lines(more)
        else:
            path, content, headers = path_of("predict"), json.dumps(body).encode(), JSON
        head = (
            f"POST {self._prefix}{path} HTTP/1.1\r\n{self._head}{headers}{REQUEST_ID_HEADER}: {request_id}\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        loop = asyncio.get_running_loop()
        now_s = loop.time()
        try:
            connection = self._take(now_s) or await self._connect(loop, now_s + timeout_s)
        except TimeoutError:
            return _timeout(timeout_s)
        except OSError as error:
            return NoReply(kind="connection", message=str(error) or type(error).__name__)
        outcome = await connection.ask(head.encode("latin-1") + content, now_s + timeout_s)
        return _timeout(timeout_s) if outcome is None else outcome

    async def close(self) -> None:
        """Close every connection; none carries a request."""
        for connection in self._free:
            connection.close()
        await asyncio.sleep(0)

    def _take(self, now_s: float) -> Connection | None:
        while self._free:
            connection = self._free.popleft()
            if connection.is_open and now_s - connection.free_since_s < KEEP_ALIVE_S:
                return connection
            connection.close()
        return None

    async def _connect(self, loop: asyncio.AbstractEventLoop, until_s: float) -> Connection:
        server_name = self._host if self._tls else None
        async with asyncio.timeout_at(until_s):
            _, connection = await loop.create_connection(
                lambda: Connection(self._free), self._host, self._port, ssl=self._tls, server_hostname=server_name
            )
        return connection


class Connection(asyncio.Protocol):
    """One connection, and the answer that it is waiting for."""

    def __init__(self, free: deque[Connection]) -> None:
        self.is_open = False
        self.free_since_s = 0.0
        self._free = free
        self._loop = asyncio.get_running_loop()
        self._parser = HttpResponseParser(self)
        self._outcome: asyncio.Future[Outcome | None] | None = None
        self._transport: asyncio.Transport
        self._body: list[bytes]
        self._retry_after: str | None
        self._json_length: str | None
        self._begin()

    async def ask(self, data: bytes, until_s: float) -> Outcome | None:
        """Send a request; None where it is not answered by then. The connection is free again afterwards, or closed."""
        outcome: asyncio.Future[Outcome | None] = self._loop.create_future()
        self._outcome = outcome
        self._begin()
        timer = self._loop.call_at(until_s, self._end, None)
        self._transport.write(data)
        try:
            return await outcome
        finally:
            timer.cancel()
            if outcome.cancelled() or outcome.result() is None:
                self.close()

    def close(self) -> None:
        """Carry nothing more."""
        self.is_open = False
        self._transport.abort()

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has the methods, but not the class
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self._end(NoReply(kind="connection", message=f"the answer is not HTTP: {error}"))
            self.close()

    def eof_received(self) -> None:
        self.is_open = False  # it is closed only after this round of the loop; nothing may be sent meanwhile

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        if exc is None and self._has_headers and not self._has_length:
            self._end(self._reply())
        self._end(NoReply(kind="connection", message=str(exc or "the server closed the connection")))

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        """Note what matters here."""
        lower = name.lower()
        if lower == b"retry-after":
            self._retry_after = value.decode("latin-1")
        elif lower == JSON_LENGTH:
            self._json_length = value.decode("latin-1")
        elif lower in WITH_LENGTH:
            self._has_length = True

    def on_headers_complete(self) -> None:
        """Note that an answer may end with its connection from here on."""
        self._has_headers = True

    def on_body(self, body: bytes) -> None:
        """Note a piece of the body."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """Tell the answer, unless it is an interim one (RFC 9110, section 15.2): the real one follows."""
        status = self._parser.get_status_code()
        if status == SWITCHING_PROTOCOLS:
            self._end(NoReply(kind="connection", message="the server wants to go on in another protocol (101)"))
            self.close()
        elif status < 200:
            self._begin()
        else:
            # Done: given up in this round of the loop.
            is_awaited = self._outcome is not None and not self._outcome.done()
            if self._parser.should_keep_alive() and self.is_open and is_awaited:
                self.free_since_s = self._loop.time()
                self._free.append(self)
            else:
                self.close()
            self._end(self._reply())

    def _begin(self) -> None:
        self._body, self._retry_after, self._json_length = [], None, None
        self._has_headers = self._has_length = False

    def _reply(self) -> Outcome:
        return read_reply(self._parser.get_status_code(), b"".join(self._body), self._retry_after, self._json_length)

    def _end(self, outcome: Outcome | None) -> None:
        if self._outcome is not None and not self._outcome.done():
            self._outcome.set_result(outcome)
        self._outcome = None


def _split(url: str) -> SplitResult:
    """The parts of a server's address, in ASCII and without a user. Raises InputError for any other."""
    wrong = InputError(f"a server's address is http://host:port or https://host, in ASCII, not {url!r}")
    try:
        parts = urlsplit(url)
        if "@" in parts.netloc:
            raise InputError("a server's address has no user or password in it: a key is given as api_key")
        parts.netloc.encode("ascii")
        (parts.hostname or "").encode("idna")  # as a look-up does: its parts are neither empty nor longer than 63
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and not parts.query
        parts = parts._replace(path=quote(parts.path, safe="/%"))
    except ValueError:  # of a port, brackets or letters that no address has
        raise wrong from None
    if not is_address:
        raise wrong
    return parts


def _timeout(timeout_s: float) -> NoReply:
    return NoReply(kind="timeout", message=f"no answer within {timeout_s:g} s")


def _lines(headers: Mapping[str, str]) -> str:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())
