"""The HTTP server of an ingress: uvicorn with our own connection class, and a fast path past Serve's layers.

Our connection extends uvicorn's with limits on everything that a caller may send, and with refusals in JSON.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Awaitable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from resource import RLIMIT_NOFILE, getrlimit
from typing import TYPE_CHECKING, Any, cast

import httptools
import uvicorn
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from deployments.api.endpoint import InternalError
from deployments.api.exchange import error_response, first_header
from deployments.api.operations import new_id
from deployments.local_ray.private import with_middlewares
from deployments.process_setup import HideExceptionMessages
from earlyexit.errors import InputError, MethodNotAllowedError, OfframpError, OverloadedError

if TYPE_CHECKING:
    from ray.serve.config import HTTPOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a server. Timeouts are in seconds of its event loop, and are precise to two seconds."""

    head_bytes: int = 65_536
    """Most bytes of request line and headers, and of trailers; beyond them the status is 431."""
    progress_bytes: int = 65_536
    """The timeout `body_s` restarts each time that this number of bytes of a body arrived."""
    connections: int = min(20_000, getrlimit(RLIMIT_NOFILE)[0] % 2**63 // 2)  # -1, which is no limit, stays large
    """Most open connections, which leave half of the files. Others get 503 or, beyond a quarter more, are closed."""
    pipelined: int = 1000
    """Most requests of a connection that wait for earlier answers. With more, it is closed after their answers."""
    idle_s: float = 90.0
    """Timeout before the first request and between requests."""
    head_s: float = 10.0
    """Timeout for request line and headers, from the first byte; then the status is 408."""
    body_s: float = 30.0
    """Timeout for a body, or for each `progress_bytes` of it; then the status is 408."""
    linger_s: float = 5.0
    """Time for which a refused connection stays open: a caller that still sends might otherwise lose the answer."""
    stalled_s: float = 60.0
    """Timeout for a caller that does not read its answer."""


SWEEP_S = 1.0
"""Interval between checks of the timeouts."""
REQUEST_ID = b"x-request-id"


def without_upgrade(method: bytes, target: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Returns request line and headers without Upgrade, which a server may ignore (RFC 9110, section 7.8)."""
    kept = b"".join(b"%b: %b\r\n" % each for each in headers if each[0] != b"upgrade")
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, target, version.encode(), kept)


class RequestTimeoutError(InputError, http_status=408):
    """A request did not arrive in time."""


class HeadTooLargeError(InputError, http_status=431):
    """Request line and headers are larger than the limit."""


def refusal(path: str, headers: Iterable[tuple[bytes, bytes]], error: OfframpError) -> Response:
    """Returns an error in the format of the path's protocol, after which the connection is closed."""
    response = error_response(path, first_header(headers, REQUEST_ID) or new_id(), error)
    response.headers["connection"] = "close"
    return response


def without_chunks(cycle: RequestResponseCycle) -> Send:
    """Returns a function that sends a response without chunks, which HTTP/1.0 does not have: it ends the connection."""
    cycle.chunked_encoding = False

    async def send(message: Message) -> None:
        cycle.expected_content_length = len(message.get("body", b""))
        await cycle.send(cast("Any", message))  # uvicorn's types are narrower

    return send


logger = logging.getLogger(f"ray.serve.{__name__}")
logger.addFilter(HideExceptionMessages())

IDLE, HEAD, BODY = "idle", "head", "body"


class Connection(HttpToolsProtocol):
    """Parses bytes as they arrive, and answers one request after another."""

    def __init__(self, server: HttpServer, **options: Any) -> None:
        super().__init__(**options)
        self._server = server
        self._limits = server.limits
        self.url, self.headers = b"", []  # uvicorn sets them when a request begins
        self._phase = IDLE
        """What the parser is reading: nothing (`idle`), a `head`, or a `body`."""
        self._num_begun = 0
        """Number of heads whose first byte was parsed."""
        self._unfinished_bytes = 0
        """Bytes since the last end of a head, part of a body, or end of a request. The parser keeps them in memory."""
        self._body_bytes = 0
        """Bytes of all bodies so far."""
        self._current_cycle: RequestResponseCycle | None = None
        """The request that is being answered; uvicorn's `cycle` is the one that is being read."""
        self._task: asyncio.Task[None] | None = None
        self._discards_input = False
        """Whether arriving bytes are discarded, because a request was refused or the connection is closing."""
        self._wait_state: tuple[object, ...] = ()
        self._wait_since_s = 0.0

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type] # uvloop's has the methods, not the class
        self.write, self.is_closing = self.transport.write, self.transport.is_closing
        self._is_surplus = len(self.connections) > self._limits.connections
        """Whether there are too many connections for this one."""
        if len(self.connections) > 1.25 * self._limits.connections:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._discards_input = True
        cycle, self._current_cycle = self._current_cycle, None
        if cycle is not None:
            self._give_up(cycle)
        self.pipeline.clear()
        super().connection_lost(exc)
        self.cycle = self.scope = self.headers = None  # type: ignore[assignment] # they refer to the connection

    def data_received(self, data: bytes) -> None:
        if self._discards_input:
            return
        self._unfinished_bytes += len(data)
        left = memoryview(data)
        try:
            while left:
                left = self._feed(left)
        except httptools.HttpParserError as error:
            is_long = self._head_size() > self._limits.head_bytes  # uvicorn fails for URLs of 64 KiB
            what = f"the bytes are not an HTTP/1.1 request: {error}"
            self._refuse(self._too_large() if is_long else InputError(what))
        if self._unfinished_bytes > self._limits.head_bytes or len(self.pipeline) > self._limits.pipelined:
            self._refuse(self._too_large())  # if requests wait, it closes the connection after their answers

    # Called by the parser

    def on_message_begin(self) -> None:
        self._phase = HEAD
        self._num_begun += 1
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase is HEAD:  # else it is a trailer, which is ignored
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # `_feed` parses it again without Upgrade
        server, names = self._server, [name for name, _ in self.headers]
        error: OfframpError | None = None
        if self._is_surplus:
            error = OverloadedError(f"more than {self._limits.connections} connections; try again later")
        elif self._head_size() > self._limits.head_bytes:
            error = self._too_large()
        elif names.count(b"host") != 1 and self.parser.get_http_version() != "1.0":
            error = InputError(f"a request must have one header Host (got {names.count(b'host')})")
        elif any(value.lower() != b"chunked" for name, value in self.headers if name == b"transfer-encoding"):
            error = InputError("transfer-encoding must be chunked; compressed bodies have a content-encoding")
        is_fast = (
            self.parser.get_method() == b"POST"
            and server.app is not server.serve_app  # otherwise Serve's layers handle all requests
            and b"x-request-timeout-seconds" not in names  # Serve interprets it
        )
        app = server.app if is_fast or server.serve_app is None else server.serve_app
        adds_id = app is not server.serve_app or error is not None  # otherwise Serve adds it
        id_headers = [self._add_id_header()] if adds_id else []
        self.app = app if error is None else refusal(self.url.decode("latin-1"), self.headers, error)
        super().on_headers_complete()  # fails for some URLs
        self._phase, self._unfinished_bytes = BODY, 0
        self.cycle.transport = self  # type: ignore[assignment] # it uses our `write` and `close`
        self.cycle.default_headers = [*self.cycle.default_headers, *id_headers]

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        self._unfinished_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._phase, self._unfinished_bytes = IDLE, 0
        super().on_message_complete()

    def _feed(self, data: memoryview) -> memoryview:
        """Parses bytes, and returns those behind a request to upgrade, which is parsed again without Upgrade.

        Otherwise its body would be lost.
        """
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            method, version, [offset] = self.parser.get_method(), self.parser.get_http_version(), upgrade.args
            if method != b"CONNECT":
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
                self.parser.feed_data(without_upgrade(method, self.url, version, self.headers))
                return data[offset:]
            self._refuse(MethodNotAllowedError("CONNECT is not allowed, because this is not a proxy"))
        return data[:0]

    def _head_size(self) -> int:
        """Returns the approximate number of bytes of request line and headers so far."""
        return len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)

    def _too_large(self) -> HeadTooLargeError:
        return HeadTooLargeError(f"request line and headers, or trailers, exceed {self._limits.head_bytes} bytes")

    def _add_id_header(self) -> tuple[bytes, bytes]:
        """Returns the header with the request's id, which is the caller's or a new one, and puts it in front."""
        sent = (value for name, value in self.headers if name == REQUEST_ID and value)
        header = REQUEST_ID, next(sent, b"") or new_id().encode()
        self.headers.insert(0, header)  # the first one counts, but a caller's may be empty
        return header

    # Answers

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        self._current_cycle = cycle
        self._task = task = self.loop.create_task(self._answer(cycle, app))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _answer(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:
        send = cycle.send if cycle.scope["http_version"] != "1.0" else without_chunks(cycle)
        call: Any = cycle.scope, cycle.receive, send  # uvicorn's types are narrower
        try:
            await app(*call)
        except asyncio.CancelledError:
            if not cycle.disconnected:
                raise
        except Exception:
            logger.exception("a request failed in the HTTP server")
        if cycle.response_started and not cycle.response_complete:
            self.transport.abort()
        elif not (cycle.response_started or cycle.disconnected):
            error = InternalError("the request failed; the service's log says why")
            await refusal(cycle.scope["path"], cycle.scope["headers"], error)(*call)
        cycle.on_response = lambda: None  # the bound method would keep its object alive

    def on_response_complete(self) -> None:
        """Starts the next request. It sets no timer as uvicorn does, because `sweep` closes idle connections."""
        self._current_cycle = None
        self.server_state.total_requests += 1
        if not self.transport.is_closing():
            self.flow.resume_reading()
            if self.pipeline:
                cycle, app = self.pipeline.pop()
                self._start_asgi_task(cycle, cast("Any", app))  # uvicorn's types are narrower

    def close(self) -> None:
        """Closes the connection after an answer. If it closed at once, a caller that still sends might lose it."""
        if self._phase is IDLE and not self._discards_input:
            self.transport.close()
        elif not self.transport.is_closing():
            self._discards_input = True
            self.pipeline.clear()
            self.transport.write_eof()
            self.flow.resume_reading()

    def _refuse(self, error: OfframpError) -> None:
        """Refuses the request that is being read, or closes the connection after the answers to earlier requests."""
        if self._discards_input:
            return
        self._discards_input = True
        cycle = self.cycle if self._phase is BODY else None
        if self.pipeline and self.pipeline[0][0] is cycle:
            self.pipeline.popleft()
        current = self._current_cycle
        if current is not None and current is not cycle:
            (self.pipeline[0][0] if self.pipeline else current).keep_alive = False
            return
        if cycle is not None:
            self._current_cycle = None
            self._give_up(cycle)
            if cycle.response_started:
                self.transport.abort()
                return
        id_header = self._add_id_header()
        response = refusal(self.url.decode("latin-1"), self.headers, error)
        headers = *response.raw_headers, *self.server_state.default_headers, id_header
        head = b"".join(b"%b: %b\r\n" % each for each in headers)
        self.transport.write(STATUS_LINE[error.http_status] + head + b"\r\n" + bytes(response.body))
        self.close()

    def _give_up(self, cycle: RequestResponseCycle) -> None:
        """Cancels a request whose answer cannot be delivered any more."""
        cycle.disconnected = True
        cycle.message_event.set()
        if self._task is not None and any(name == REQUEST_ID for name, _ in cycle.default_headers):
            self._task.cancel()  # Serve itself notifies the applications that it wraps

    # Deadlines

    def sweep(self, now_s: float) -> None:
        """Closes a connection that has waited in the same state for too long; called about every second."""
        state = self._current_wait_state()
        if state != self._wait_state:
            self._wait_state, self._wait_since_s = state, now_s
        waited_s = now_s - self._wait_since_s
        if not state or waited_s < getattr(self._limits, f"{state[0]}_s"):
            return
        if state[0] in (HEAD, BODY):
            self._refuse(RequestTimeoutError(f"the request's {state[0]} did not arrive in {waited_s:.0f} s"))
        else:
            self.transport.abort()

    def _current_wait_state(self) -> tuple[object, ...]:
        """Returns the name of the limit that applies, and values that change with progress; empty without a limit."""
        if self.flow.write_paused:
            return ("stalled", self.transport.get_write_buffer_size())
        if self._discards_input and self._current_cycle is None:
            return ("linger",)
        if self._discards_input or self.flow.read_paused:
            return ()
        if self._phase is not IDLE:
            return (self._phase, self._num_begun, self._body_bytes // self._limits.progress_bytes)
        return (IDLE, self._num_begun) if self._current_cycle is None else ()


class HttpServer(uvicorn.Server):
    """An HTTP/1.1 and 1.0 server on bound sockets, on one event loop."""

    def __init__(self, app: ASGIApp, *, serve_app: ASGIApp | None = None, limits: Limits | None = None) -> None:
        """`app`: Offramp's application. It handles all requests or, if there is a `serve_app`, only POST requests.

        `serve_app`: Serve's application, which then handles all other requests. It assigns request ids by itself, and
        is notified instead of cancelled when a caller disconnects. It may be the only application.
        """
        connection: Any = partial(Connection, self)
        options: dict[str, Any] = {"log_config": None, "access_log": False, "proxy_headers": False}
        options |= {"server_header": False, "ws": "none", "lifespan": "off", "interface": "asgi3"}
        super().__init__(uvicorn.Config(cast("Any", app), http=connection, **options))  # uvicorn's types are narrower
        self.app = app
        self.serve_app = serve_app
        self.limits = limits or Limits()
        self.servers: list[asyncio.Server] = []
        self._ended = asyncio.Event()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serves until `should_exit` is set and the last answer is sent; stops at once if it is cancelled."""
        try:
            async with asyncio.TaskGroup() as group:  # an error of the sweeps ends the server
                sweeping = group.create_task(self._keep_sweeping())
                await super().serve(sockets)
                sweeping.cancel()
        finally:
            for server in self.servers:
                server.close()
            for connection in list(self.server_state.connections):
                connection.transport.abort()
            self._ended.set()

    capture_signals = nullcontext  # type: ignore[assignment] # leaves signals to the process

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stops accepting connections, and waits for the answers to all accepted requests."""
        for each in sockets or ():  # other holders of the sockets (`hold_listener`) would let callers wait
            each.shutdown(socket.SHUT_RDWR)
        await super().shutdown(sockets)

    async def close(self) -> None:
        """Stops accepting connections, and waits until the server has ended."""
        self.should_exit = True
        await self._ended.wait()

    def sweep(self, now_s: float) -> None:
        """Closes connections that have waited for too long; `now_s` is the event loop's time."""
        for connection in list(self.server_state.connections):
            connection.sweep(now_s)  # type: ignore[union-attr]

    async def _keep_sweeping(self) -> None:
        while True:
            self.sweep(asyncio.get_running_loop().time())
            await asyncio.sleep(SWEEP_S)


def below_prefix(router: ASGIApp, prefix: str, name: str) -> ASGIApp:
    """Returns an application that passes requests below a prefix to a router, as Serve's proxies do.

    It also answers Serve's own paths, which its proxies answer otherwise. `name`: the application's name in Serve.
    """
    root = prefix.rstrip("/")

    def answer(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        path: str = scope["path"]
        if path == "/-/healthz":
            app: ASGIApp = PlainTextResponse("success")
        elif path == "/-/routes":
            app = Response(json.dumps({prefix: name}), media_type="application/json")
        elif path == root or path.startswith(root + "/"):
            app, scope["root_path"] = router, root
        else:
            app = PlainTextResponse(f"Path '{path}' not found. Ping http://.../-/routes for available routes.", 404)
        return app(scope, receive, send)

    return answer


def with_access_log(app: ASGIApp) -> ASGIApp:
    """Wraps an application with an access log in Serve's format."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        began_s, status = time.perf_counter(), "499"

        async def send_and_note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await app(scope, receive, send_and_note)
        finally:
            took_ms = 1000 * (time.perf_counter() - began_s)
            request_id = first_header(scope["headers"], REQUEST_ID) or ""
            path = scope["raw_path"].decode()  # the decoded path may have line breaks
            fields = {"serve_access_log": True, "request_id": request_id, "route": path}
            logger.info("%s %s %s %.1fms", scope["method"], path, status, took_ms, extra=fields)

    return answer


async def start_in_serve(
    own_app: ASGIApp,
    start_serve_server: Any,
    app: Any,
    http_options: HTTPOptions,
    *,
    event_loop: asyncio.AbstractEventLoop,
    enable_so_reuseport: bool = False,
) -> tuple[asyncio.Task[None], Any]:
    """Starts our server instead of Serve's; returns its task, and the object whose `should_exit` stops it.

    It replaces the function by which Serve starts the server of an ingress replica, because Serve 2.60 has no setting
    for that. Serve passes the port, watches the server and stops it.

    Only `own_app`, which handles POST requests, is called without Serve's layers. If requests have a timeout, all of
    them pass through the layers. With TLS or a root path, Serve's own server is started. Raises RuntimeError, caused by
    an OSError, if the port is taken.
    """
    if http_options.ssl_certfile or http_options.root_path:
        options = {"event_loop": event_loop, "enable_so_reuseport": enable_so_reuseport}
        started: tuple[asyncio.Task[None], Any] = await start_serve_server(app, http_options, **options)
        return started
    listener = _bind(http_options.host or "127.0.0.1", http_options.port, reuse_port=enable_so_reuseport)
    # Like Serve's server, trust the headers of a proxy on this machine.
    serve_app: Any = ProxyHeadersMiddleware(with_middlewares(app, http_options.middlewares), "127.0.0.1")
    needs_layers = http_options.request_timeout_s or http_options.middlewares
    limits = Limits(idle_s=http_options.keep_alive_timeout_s)
    server = HttpServer(serve_app if needs_layers else own_app, serve_app=serve_app, limits=limits)
    return event_loop.create_task(server.serve([listener])), server


def _bind(host: str, port: int, *, reuse_port: bool) -> socket.socket:
    family, is_ipv6 = (socket.AF_INET6, True) if ":" in host else (socket.AF_INET, False)
    try:
        return socket.create_server((host, port), family=family, reuse_port=reuse_port, dualstack_ipv6=is_ipv6)
    except OSError as error:
        raise RuntimeError(f"Failed to bind to address '{host}:{port}'.") from error
