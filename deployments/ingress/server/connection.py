"""A caller's connection: requests out of its bytes, one after the other, and answers in their order."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Protocol, cast

import httptools

from deployments.ingress.server.exchange import App, Exchange
from deployments.ingress.server.heads import address_of, head_of_request, size_of
from deployments.ingress.server.lane import Lane
from deployments.ingress.server.limits import Limits
from deployments.ingress.server.replies import plain
from deployments.ingress.server.timers import Deadlines
from deployments.quiet import WithoutWords

logger = logging.getLogger(f"ray.serve.{__name__}")
logger.addFilter(WithoutWords())

VERSIONS = ("1.1", "1.0")


class Host(Protocol):
    """What connections have of their server."""

    app: App
    lane: Lane
    outright: bool
    limits: Limits
    is_ending: bool
    loop: asyncio.AbstractEventLoop
    deadlines: Deadlines[Connection]

    def admit(self, connection: Connection) -> bool: ...

    def forget(self, connection: Connection) -> None: ...


class Connection(asyncio.Protocol):
    """Parses as bytes come; of the requests that are whole one at a time is answered."""

    def __init__(self, server: Host) -> None:
        self._server = server
        self._limits = server.limits
        self._parser = httptools.HttpRequestParser(self)
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does: it is never looked at
        self._transport: asyncio.Transport
        self._client: tuple[str, int] | None = None
        self._address: tuple[str, int] | None = None
        self._stage: str = "idle"
        """Where the parser is: `idle` between requests, in a `head`, in a `body`."""
        self._armed: str | None = None
        self._num_bytes = 0
        """Read of a head that is not whole, or of a body since its deadline was set."""
        self._target = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._incoming: Exchange | None = None
        """The request whose body is read."""
        self._is_offered = False
        """Whether that one waits, or is being answered, already."""
        self._current: Exchange | None = None
        """The one that is being answered."""
        self._task: asyncio.Task[None] | None = None
        self._waiting: deque[Exchange | bytes] = deque()
        """What comes after it; bytes are the connection's last words."""
        self._is_deaf = False
        """Whether nothing that comes is read as requests any more."""
        self._is_paused = False
        self._room: asyncio.Future[None] | None = None
        """Set while the caller does not take what was written."""
        self._unsent_bytes = 0

    # What a transport calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has the methods, but not the class
        if not self._server.admit(self):
            self._is_deaf = True
            self._transport.write(plain(503, "too many connections"))
            self._transport.close()
            return
        self._client = address_of(transport.get_extra_info("peername"))
        self._address = address_of(transport.get_extra_info("sockname"))
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_deaf = True
        self._arm(None)
        self._waiting.clear()
        if self._room is not None:
            self._room.set_result(None)
            self._room = None
        if self._current is not None:
            self._current.leave()
            if self._current.request_id is not None and self._task is not None:
                self._task.cancel()  # the others are told by Serve
        self._server.forget(self)

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        if self._stage != "body":
            self._num_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:  # is answered as if it had asked for none; nothing behind it is read
            self._is_deaf = True
        except httptools.HttpParserError:
            self._refuse(400, "this is no HTTP request")
        if self._stage == "head" and self._num_bytes > self._limits.head_bytes:
            self._refuse(431, "the request's head is too large")
        self._watch()

    def pause_writing(self) -> None:
        self._room = asyncio.get_running_loop().create_future()
        self._unsent_bytes = self._transport.get_write_buffer_size()
        self._watch()

    def resume_writing(self) -> None:
        if self._room is not None:
            self._room.set_result(None)
            self._room = None
        if self._current is None:
            self._next()
        self._watch()

    # What the parser calls

    def on_message_begin(self) -> None:
        self._stage = "head"
        self._target = b""
        self._headers = []

    def on_url(self, part: bytes) -> None:
        self._target += part

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._stage = "body"
        if self._is_deaf:
            return
        limits, headers = self._limits, self._headers
        if self._num_bytes > limits.head_bytes and size_of(self._target, headers) > limits.head_bytes:
            self._refuse(431, "the request's head is too large")
            return
        self._num_bytes = 0
        if self._parser.get_http_version() not in VERSIONS:
            self._refuse(400, "HTTP/1.1 and 1.0 are spoken here")
            return
        self._incoming, waits = self._exchange()
        self._is_offered = waits
        if waits:
            self._offer(self._incoming)

    def on_body(self, data: bytes) -> None:
        incoming = self._incoming
        if incoming is None or self._is_deaf:
            return
        incoming.feed(data)
        self._num_bytes += len(data)
        if self._num_bytes > self._limits.kept_bytes:
            self._num_bytes = 0
            self._arm(None)  # and set anew
        if incoming.unread_bytes > self._limits.kept_bytes:
            self._pause()

    def on_message_complete(self) -> None:
        self._stage = "idle"
        self._num_bytes = 0
        incoming, self._incoming = self._incoming, None
        if incoming is None or self._is_deaf:
            return
        incoming.end()
        if not self._is_offered:
            self._offer(incoming)

    def _exchange(self) -> tuple[Exchange, bool]:
        """The request whose head is whole, and whether it begins before its body is."""
        server, parser = self._server, self._parser
        method, version = parser.get_method(), parser.get_http_version()
        head = head_of_request(self._target, self._headers)
        is_lane = method == b"POST" and (server.outright or not head.has_serves_timeout)
        path = server.lane.get(head.raw_path) if is_lane else None
        scope = head.scope(method.decode("ascii"), version, self._client, self._address)
        if path is not None:
            scope |= path.scope
        request_id = None
        if path is not None or server.outright:
            request_id = head.name()
        app = server.app if path is None else path.app
        exchange = Exchange(self, app, scope, keep_alive=parser.should_keep_alive(), request_id=request_id)
        exchange.expects = head.expects and version != "1.0"
        return exchange, head.chunked or head.expects or head.length > self._limits.kept_bytes

    # Answers

    @property
    def is_ending(self) -> bool:
        return (self._is_deaf and not self._waiting) or self._server.is_ending

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for an answer here."""
        return self._current is None and not self._waiting

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    async def drained(self) -> None:
        if self._room is not None:
            await self._room

    def want_more(self) -> None:
        if self._is_paused and len(self._waiting) < self._limits.pipelined:
            self._is_paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()
            self._watch()

    def close(self) -> None:
        """End it; what was written is still sent."""
        self._transport.close()

    def abort(self) -> None:
        """End it at once."""
        self._transport.abort()

    def _pause(self) -> None:
        if not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def _offer(self, what: Exchange | bytes) -> None:
        if self._current is not None or self._waiting or self._room is not None:
            self._waiting.append(what)
            if len(self._waiting) >= self._limits.pipelined:
                self._pause()
            if len(self._waiting) > self._limits.waiting:
                self._refuse(503, "too many requests at once on this connection")
        else:
            self._begin(what)

    def _begin(self, what: Exchange | bytes) -> None:
        if isinstance(what, bytes):
            self.write(what)
            self._linger()
            return
        self._current = what
        self._task = self._server.loop.create_task(self._answer(what))

    async def _answer(self, exchange: Exchange) -> None:
        try:
            await exchange.app(exchange.scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:
            if not exchange.gone:
                raise
        except Exception:
            logger.exception("a request failed in the HTTP server")
        finally:
            self._end(exchange)

    def _end(self, exchange: Exchange) -> None:
        """A request is over, one way or the other."""
        self._current = self._task = None
        if self._transport.is_closing():
            return
        goes_on = exchange.answered and exchange.keep_alive and not self._server.is_ending
        if goes_on or (exchange.gone and self._waiting):
            self._next()
        elif exchange.is_whole and (exchange.answered or exchange.gone):
            self.close()
        elif exchange.answered or exchange.gone:
            self._linger()
        elif exchange.started:
            self.abort()
        else:
            self.write(plain(500, "the server failed on this request; its log says why"))
            self._linger()

    def _next(self) -> None:
        if self._room is None and self._waiting and not self._transport.is_closing():
            self._begin(self._waiting.popleft())
        if self._is_paused and len(self._waiting) < self._limits.pipelined:
            self.want_more()
        self._watch()

    def _refuse(self, status: int, words: str) -> None:
        """The last words of a connection, after the answers to what it asked before."""
        if not self._is_deaf:  # what it sent is not kept until it leaves
            self._is_deaf = True
            self._headers, self._target = [], b""
            if self._incoming is not None and self._is_offered:
                self._incoming.leave()
            self._offer(plain(status, words))

    def _linger(self) -> None:
        """Say that this was all, and close when the caller does, or soon: what it still sends is thrown away."""
        self._is_deaf = True
        self._waiting.clear()
        self._transport.write_eof()
        self._arm("linger")
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()

    # Deadlines

    def _watch(self) -> None:
        """Set the deadline that goes with what is waited for."""
        if self._room is not None:
            self._arm("stuck")
        elif self._is_paused or self._transport.is_closing():
            self._arm(None)
        elif self._is_deaf:
            self._arm("linger" if self._armed == "linger" else None)
        elif self._stage != "idle":
            self._arm(self._stage)
        else:
            self._arm("idle" if self._current is None else None)

    def _arm(self, kind: str | None) -> None:
        armed = self._armed
        if kind != armed:
            deadlines = self._server.deadlines
            if armed is not None:
                deadlines.disarm(self, armed)
            if kind is not None:
                deadlines.arm(self, kind)
            self._armed = kind

    def expire(self, kind: str) -> None:
        """A deadline is over."""
        self._armed = None
        if kind in ("idle", "linger"):
            self.close()
        elif kind == "stuck":
            unsent_bytes = self._transport.get_write_buffer_size()
            if unsent_bytes >= self._unsent_bytes:
                self.abort()
            self._unsent_bytes = unsent_bytes
            self._watch()
        else:
            self._refuse(408, f"the request's {kind} did not come")
            self._watch()
