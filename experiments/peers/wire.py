"""HTTP/1.1 for a client that has little of a processor: requests made beforehand, answers parsed for their status.

One protocol per connection, one request on it at a time. Answers need a length or chunks: one that ends with its
connection is taken for cut off, save for its status where that is not 200.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import cast
from urllib.parse import urlsplit

from httptools import HttpParserCallbackError, HttpParserError, HttpResponseParser

from earlyexit.errors import InputError
from experiments.peers.tally import ANSWERED, Ledger, Outcome


def host_and_port(url: str) -> tuple[str, int]:
    """Where to connect; raises InputError for anything but `http://host[:port]`."""
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname or parts.path.strip("/") or parts.query:
        raise InputError(f"a server's address is http://host:port, without a path, not {url!r}")
    return parts.hostname, parts.port or 80


def prepare(url: str, path: str, bodies: Sequence[bytes]) -> list[bytes]:
    """One request per body, as it goes over the wire."""
    host, port = host_and_port(url)
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nAccept: */*\r\nConnection: keep-alive\r\n"
        "Content-Type: application/json\r\nContent-Length: "
    ).encode()
    return [head + str(len(body)).encode() + b"\r\n\r\n" + body for body in bodies]


class Connection(asyncio.Protocol):
    """A connection of a pool, and the request that it carries."""

    __slots__ = ("_parser", "_pool", "_status", "_transport", "answering", "is_open", "request")

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._parser = HttpResponseParser(self)
        self._status = 0
        self._transport: asyncio.Transport | None = None
        self.request: int | None = None
        self.answering = False
        """Bytes of an answer to the present request have come."""
        self.is_open = False

    def send(self, request: int, data: bytes) -> None:
        """Send one request; the connection carries none."""
        assert self._transport is not None
        self.request = request
        self.answering = False
        self._status = 0
        self._transport.write(data)

    def close(self) -> None:
        """Carry nothing more; `connection_lost` follows."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    @property
    def last_status(self) -> int | None:
        """Of an answer that ends with its connection: its status where that is not 200, else None."""
        return self._status if self._status not in (0, ANSWERED) else None

    # asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has the methods, but not the class
        self.is_open = True
        self._pool.connected(self)

    def data_received(self, data: bytes) -> None:
        self.answering = True
        try:
            self._parser.feed_data(data)
        except HttpParserCallbackError:
            raise  # our own mistake, not the server's
        except HttpParserError:
            if (request := self.request) is not None:
                self.request = None
                self._pool.ended(request, "malformed")
            self.close()

    def eof_received(self) -> bool | None:
        self.is_open = False  # it is closed only after this round of the loop; nothing may be sent meanwhile
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_open = False
        self._pool.lost(self, exc)

    # httptools

    def on_headers_complete(self) -> None:
        """Note the status."""
        self._status = self._parser.get_status_code()

    def on_message_complete(self) -> None:
        """Give the connection back."""
        request, self.request = self.request, None
        if not self._parser.should_keep_alive() or request is None:
            self.close()
        if request is not None:
            self._pool.ended(request, self._status)
        if self.is_open:
            self._pool.free(self)


class KeepingConnection(Connection):
    """Keeps the bodies of answers; httptools spares what has no callback."""

    __slots__ = ("_chunks",)

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self._chunks: list[bytes] = []

    def on_body(self, body: bytes) -> None:
        """Note a piece of the body."""
        self._chunks.append(body)

    def on_message_complete(self) -> None:
        chunks, self._chunks = self._chunks, []
        if self.request is not None and self._status == ANSWERED:
            self._pool.ledger.bodies[self.request] = b"".join(chunks)
        super().on_message_complete()


class Pool:
    """Keep-alive connections to one server; a request that finds none free opens one, up to the limit, or waits.

    Free connections take turns, so that a server with several processes behind one port has work for all of them.
    """

    def __init__(
        self,
        *,
        requests: Sequence[bytes],
        ledger: Ledger,
        clock: Callable[[], float],
        most: int,
        keep_bodies: bool = False,
    ) -> None:
        assert requests
        assert most >= 1
        self.ledger = ledger
        self.num_connections = 0
        """Opened in all."""
        self.num_waited = 0
        self.retried: set[int] = set()
        self._requests = requests
        self._clock = clock
        self._most = most
        self._make = KeepingConnection if keep_bodies else Connection
        self._address = ("", 0)
        self._free: deque[Connection] = deque()
        self._connections: set[Connection] = set()
        self._waiting: deque[int] = deque()
        self._num_opening = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self, host: str, port: int, num: int) -> None:
        """Connect; raises OSError where nobody listens."""
        loop = asyncio.get_running_loop()
        self._num_opening += 1
        transport, _ = await loop.create_connection(lambda: self._make(self), host, port)
        self._address = transport.get_extra_info("peername")[:2]  # spares every later connection the look-up
        self._num_opening += num - 1
        await asyncio.gather(*(self._connect() for _ in range(num - 1)))

    async def close(self) -> None:
        """Close every connection; the requests on them must have ended."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for connection in self._connections:
            connection.close()
        await asyncio.sleep(0)  # no longer: of a connection that was cancelled at its birth uvloop never tells the loss

    def send(self, request: int) -> None:
        """Send a request of the ledger as soon as a connection is free."""
        free = self._free
        while free:
            connection = free.popleft()
            if connection.is_open:
                connection.send(request, self._requests[request % len(self._requests)])
                return
        self.num_waited += 1
        self._waiting.append(request)
        self._grow()

    def time_out(self, due_before_s: float) -> None:
        """End what was due before a time and has no answer; its connections close."""
        due_s = self.ledger.due_s
        for late in [request for request in self._waiting if due_s[request] < due_before_s]:
            self._waiting.remove(late)
            self.ended(late, "timeout")
        for connection in list(self._connections):
            request = connection.request
            if request is not None and due_s[request] < due_before_s:
                connection.request = None
                connection.close()
                self.ended(request, "timeout")

    # told by the connections

    def connected(self, connection: Connection) -> None:
        """A connection is open."""
        self._num_opening -= 1
        self.num_connections += 1
        self._connections.add(connection)
        self.free(connection)

    def ended(self, request: int, outcome: Outcome) -> None:
        """A request has its outcome."""
        self.ledger.end(request, outcome, self._clock())

    def free(self, connection: Connection) -> None:
        """A connection carries no request."""
        if self._waiting:
            request = self._waiting.popleft()
            connection.send(request, self._requests[request % len(self._requests)])
        else:
            self._free.append(connection)

    def lost(self, connection: Connection, error: Exception | None) -> None:
        """A connection is closed; its request, if any, is sent again once if the server had not begun to answer it."""
        self._connections.discard(connection)
        request, connection.request = connection.request, None
        if request is not None and not connection.answering and request not in self.retried:
            self.retried.add(request)
            self._waiting.appendleft(request)
        elif request is not None:
            self.ended(request, (connection.last_status if error is None else None) or "connection")
        self._grow()

    def _grow(self) -> None:
        """One connection on its way per waiting request, up to the limit."""
        while self._num_opening < len(self._waiting) and len(self._connections) + self._num_opening < self._most:
            task = asyncio.get_running_loop().create_task(self._connect_for_waiting())
            self._num_opening += 1
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _connect_for_waiting(self) -> None:
        try:
            await self._connect()
        except OSError:
            self._num_opening -= 1
            if self._waiting:
                self.ended(self._waiting.popleft(), "connection")
            self._grow()

    async def _connect(self) -> None:
        await asyncio.get_running_loop().create_connection(lambda: self._make(self), *self._address)
