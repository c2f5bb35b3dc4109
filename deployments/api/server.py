"""The HTTP server of an ingress: uvicorn with connections of its own, and fast paths to the most frequent endpoints.

A connection is uvicorn's, with bounds on all that a caller may send, and with refusals in JSON.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import socket
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import httptools
import uvicorn
from pydantic_core import to_json
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from deployments.local_ray.private import with_middlewares
from deployments.process_setup import HideExceptionMessages

if TYPE_CHECKING:
    from ray.serve.config import HTTPOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a server. Times are in seconds of its event loop, and kept to within two seconds."""

    head_bytes: int = 65_536
    """Most bytes of request line and headers, else 431; and of trailers, which are ignored, else 400."""
    kept_bytes: int = 65_536
    """The timeout `body_s` restarts after each so many bytes of a body."""
    waiting: int = 128
    """Most pipelined requests that wait for the one before; then 503, and the connection ends. A request takes more
    memory than its bytes."""
    connections: int = 20_000
    """Most open connections; the next one is answered 503."""
    idle_s: float = 90.0
    """Timeout between requests, and before the first."""
    head_s: float = 10.0
    """Timeout for a head, from its first byte; then 408."""
    body_s: float = 30.0
    """Timeout for a body, or each `kept_bytes` of it; then 408."""
    linger_s: float = 5.0
    """How long a refused connection stays open for a caller that still sends: it might lose its answer otherwise."""
    left_s: float = 5.0
    """Timeout for the answer to a caller that has closed its half of the connection, and may have left."""
    stuck_s: float = 60.0
    """Timeout for a caller that does not read."""
    sweep_s: float = 1.0
    """Interval between checks of these timeouts."""


Header = tuple[bytes, bytes]
REQUEST_ID = b"x-request-id"
SERVES_TIMEOUT = b"x-request-timeout-seconds"
"""A header that Serve interprets."""
OF_UPGRADES = (b"upgrade", b"connection", b"http2-settings")
_ids = random.Random()  # ids are no secrets; each process has its own sequence


class RefusedHeadError(Exception):
    """A head that is refused; its arguments are status, kind and message."""


def check_head(headers: Sequence[Header], version: str) -> tuple[bytes, bool]:
    """Returns the request's id, empty if it has none, and whether it sets Serve's timeout; names are in lower case.

    Raises RefusedHeadError.
    """
    name, has_serves_timeout, num_hosts, codings = b"", False, 0, list[bytes]()
    for key, value in headers:
        if key == b"host":
            num_hosts += 1
        elif key == b"transfer-encoding":
            codings.append(value.strip().lower())
        elif key == REQUEST_ID:
            name = name or value
        elif key == SERVES_TIMEOUT:
            has_serves_timeout = True
    if version not in ("1.1", "1.0"):
        raise RefusedHeadError(400, "input", "the protocol is not HTTP/1.1 or HTTP/1.0")
    if num_hosts > 1 or (not num_hosts and version == "1.1"):
        raise RefusedHeadError(400, "input", f"{num_hosts} Host headers; HTTP/1.1 needs exactly one")
    if codings and codings != [b"chunked"]:
        coding = b", ".join(codings)[:80].decode("latin-1")
        raise RefusedHeadError(501, "input", f"transfer-encoding {coding!r}; only chunked is supported")
    return name, has_serves_timeout


def without_upgrade(method: bytes, target: bytes, headers: Sequence[Header]) -> bytes:
    """Returns the bytes of a head without its Upgrade, which a server may ignore (RFC 9110, 7.8)."""
    options = b",".join(value for name, value in headers if name == b"connection").lower()
    kept = [each for each in headers if each[0] not in OF_UPGRADES]
    if b"close" in options:
        kept.append((b"connection", b"close"))
    return b"%b %b HTTP/1.1\r\n%b\r\n" % (method, target, b"".join(b"%b: %b\r\n" % each for each in kept))


def origin_form(target: bytes) -> bytes:
    """Returns path and query of a target that is a URL or `*`; raises httptools' error for others."""
    if target.startswith(b"/"):
        return target
    if target == b"*":
        return b"/*"
    url = httptools.parse_url(target)
    return (url.path or b"/") + (b"?" + url.query if url.query else b"")


def error_of(kind: str, message: str) -> tuple[list[Header], bytes]:
    """Returns the headers and the body of an error as JSON."""
    body = to_json({"error": {"kind": kind, "message": message}})
    return [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))], body


def size_of(target: bytes, headers: Sequence[Header]) -> int:
    """Returns about how many bytes a head has."""
    return len(target) + sum(len(name) + len(value) + 4 for name, value in headers)


@dataclass(frozen=True, slots=True)
class FastPath:
    """A path that leads directly to its application, without routing and Serve's layers."""

    app: ASGIApp
    scope: Mapping[str, Any]
    """What routing would add: `path`, `root_path`, `path_params`."""


Lane = Mapping[bytes, FastPath]
"""Fast paths by the path as it is sent; for POST only."""


logger = logging.getLogger(f"ray.serve.{__name__}")
logger.addFilter(HideExceptionMessages())

IDLE, HEAD, BODY = "idle", "head", "body"


class Connection(HttpToolsProtocol):
    """Parses bytes as they arrive; answers one request after the other."""

    def __init__(self, served: HttpServer, **given: Any) -> None:
        super().__init__(**given)
        self._served = served
        self._limits = served.limits
        self._phase = IDLE
        """What the parser reads now: nothing, a `head`, or a `body`."""
        self._num_begun = 0
        """Requests that have begun."""
        self._head_bytes = 0
        """Bytes of the head that is read now."""
        self._body_bytes = 0
        """Bytes of all bodies so far."""
        self._other_bytes = 0
        """Bytes that are not content, since the last byte of content: chunk sizes and trailers."""
        self._seen = b""
        """The bytes of the head, and those before it in the same read."""
        self._running: RequestResponseCycle | None = None
        """The request that is answered now."""
        self._task: asyncio.Task[None] | None = None
        self._last_words = b""
        """A refusal that is sent after the answers to earlier requests."""
        self._is_deaf = False
        """Whether arriving bytes are discarded, because the connection was refused or is closing."""
        self._is_ending = False
        """Whether the server stops."""
        self._has_left = False
        """Whether the caller has closed its half, but may still read."""
        self._state: Hashable = None
        self._since_s = 0.0

    # Called by the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type] # uvloop's has the methods, but not the class
        if len(self.connections) > self._limits.connections:
            self._refuse(503, "overloaded", f"more than {self._limits.connections} connections; try again later")

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_deaf = True
        self._unset_keepalive_if_required()
        running, self._running = self._running, None
        if running is not None:
            self._give_up(running)
        self.pipeline.clear()
        super().connection_lost(exc)
        self.cycle = self.scope = self.headers = None  # type: ignore[assignment] # they refer to the connection

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._is_deaf:
            return
        phase, num_begun, body_bytes = self._phase, self._num_begun, self._body_bytes
        self._seen = self._seen + data if phase is HEAD else data
        try:
            self._feed(data)
        except httptools.HttpParserCallbackError as error:
            reason = error.__context__
            is_ours = isinstance(reason, RefusedHeadError)
            self._refuse(*(reason.args if is_ours else (400, "input", "the target is no path or URL")))
        except httptools.HttpParserError as error:
            self._refuse(400, "input", f"the bytes are no HTTP/1.1 request: {error}")
        if self._phase is HEAD:
            is_whole_read = phase is not BODY and self._num_begun - num_begun == (phase is IDLE)
            self._head_bytes = self._head_bytes + len(data) if is_whole_read else size_of(self.url, self.headers)
            if self._head_bytes > self._limits.head_bytes:
                self._refuse(431, "input", self._too_large())
        elif self._phase is BODY:
            self._other_bytes = self._other_bytes + len(data) if self._body_bytes == body_bytes else 0
            if self._other_bytes > self._limits.head_bytes:
                self._refuse(400, "input", f"more than {self._limits.head_bytes} bytes of trailers or chunk extensions")
        if self._phase is not HEAD:
            self._seen = b""

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keeps answering a caller that has closed its half after its requests."""
        self._has_left = True
        if self._phase is not IDLE:
            self._refuse(400, "input", f"the connection was closed in the middle of the request's {self._phase}")
        running = self._running
        return running is not None and not running.response_started  # else a caller of a stream has gone

    # Called by the parser

    def on_message_begin(self) -> None:
        self._phase = HEAD
        self._num_begun += 1
        self._head_bytes = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase is HEAD:  # else it is a trailer, which is ignored
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # `_feed` reads it again, without its Upgrade
        if len(self._seen) > self._limits.head_bytes and size_of(self.url, self.headers) > self._limits.head_bytes:
            raise RefusedHeadError(431, "input", self._too_large())
        if len(self.pipeline) >= self._limits.waiting:
            raise RefusedHeadError(
                503, "overloaded", f"more than {self._limits.waiting} requests wait on this connection"
            )
        name, has_serves_timeout = check_head(self.headers, self.parser.get_http_version())
        if b" RTSP/" in self._seen and self.url + b" RTSP/" in self._seen:
            raise RefusedHeadError(400, "input", "the protocol is RTSP, not HTTP")
        self._phase = BODY
        self._other_bytes = -len(self._seen)  # of this read, what belongs to the head is not counted
        self.url = origin_form(self.url)
        served = self._served
        is_lane = self.parser.get_method() == b"POST" and (served.outright or not has_serves_timeout)
        path = served.lane.get(self.url.partition(b"?")[0]) if is_lane else None
        self.app = served.app if path is None else path.app
        super().on_headers_complete()
        cycle = self.cycle
        cycle.transport = self  # type: ignore[assignment] # it writes and closes by our methods
        cycle.keep_alive = self.parser.should_keep_alive()
        if path is not None:
            self.scope.update(path.scope)  # type: ignore[typeddict-item]
        if path is not None or served.outright:
            if not name:
                name = b"%032x" % _ids.getrandbits(128)
                self.headers.append((REQUEST_ID, name))
            cycle.default_headers = [*cycle.default_headers, (REQUEST_ID, name)]

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._phase = IDLE
        super().on_message_complete()
        if not self.parser.should_keep_alive():  # a trailer may have said so: the parser reads nothing behind it
            self.cycle.keep_alive = False
            if self.cycle.response_complete:
                self.close()

    def _feed(self, data: bytes) -> None:
        """Parses bytes; a request to upgrade is parsed again without its Upgrade, or its body would be lost."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            method, [offset] = self.parser.get_method(), upgrade.args
            if method == b"CONNECT":
                self._refuse(501, "input", "CONNECT is not supported: this is no proxy")
                return
            self.parser = httptools.HttpRequestParser(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            self._num_begun -= 1
            self._feed(without_upgrade(method, self.url, self.headers) + data[offset:])

    def _too_large(self) -> str:
        return f"request line and headers are larger than {self._limits.head_bytes} bytes"

    # Answers

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:  # type: ignore[override]
        self._running = cycle
        self._task = task = self.loop.create_task(self._answer(cycle, app))
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def _answer(self, cycle: RequestResponseCycle, app: ASGIApp) -> None:
        send = partial(self._send, cycle)
        try:
            await app(cycle.scope, cycle.receive, send)  # type: ignore[arg-type]
        except asyncio.CancelledError:
            if not cycle.disconnected:
                raise
        except Exception:
            logger.exception("a request failed in the HTTP server")
        if cycle.response_started and not cycle.response_complete:
            self.transport.abort()
        elif not (cycle.response_started or cycle.disconnected):
            headers, body = error_of("internal", "the request failed; the service's log says why")
            cycle.keep_alive = False
            await send({"type": "http.response.start", "status": 500, "headers": headers})
            await send({"type": "http.response.body", "body": body})
        cycle.on_response = lambda: None  # the bound method would keep its object alive

    async def _send(self, cycle: RequestResponseCycle, message: Any) -> None:
        """ASGI's `send`: uvicorn's, except for bodies that were not read, and for callers of HTTP/1.0."""
        is_old = cycle.scope["http_version"] == "1.0"
        if message["type"] == "http.response.start":
            if cycle.more_body or (self._is_ending and not self.pipeline):
                cycle.keep_alive = False  # the rest of a body would be taken for a request
            if is_old and not any(name == b"content-length" for name, _ in message["headers"]):
                cycle.keep_alive = cycle.chunked_encoding = False  # its end is the connection's
            elif is_old and cycle.keep_alive:
                message["headers"] = [*message["headers"], (b"connection", b"keep-alive")]
        elif is_old:
            cycle.expected_content_length = max(cycle.expected_content_length, len(message.get("body", b"")))
        await cycle.send(message)

    def on_response_complete(self) -> None:
        self._running = None
        super().on_response_complete()
        if self._running is None and not self.transport.is_closing():
            if self._last_words:
                self._linger(self._last_words)
            elif self._has_left:
                self.transport.close()

    def shutdown(self) -> None:
        """Stops the connection after the answers to accepted requests."""
        self._is_ending = True
        super().shutdown()

    def write(self, data: bytes) -> None:
        """Sends bytes of an answer."""
        self.transport.write(data)

    def is_closing(self) -> bool:
        """Returns whether nothing can be sent any more."""
        return self.transport.is_closing()

    def close(self) -> None:
        """Closes the connection after an answer."""
        if self._phase is IDLE:
            self.transport.close()
        else:
            self._linger(b"")

    def abort(self) -> None:
        """Closes the connection at once."""
        self.transport.abort()

    def _refuse(self, status: int, kind: str, message: str) -> None:
        """Sends the last answer of a connection, after the answers to earlier requests."""
        if self._is_deaf:
            return
        headers, body = error_of(kind, message)
        headers += [(b"connection", b"close"), *self.server_state.default_headers]
        if status == 503:
            headers.append((b"retry-after", b"1"))
        head = b"".join(b"%b: %b\r\n" % each for each in headers)
        words = STATUS_LINE[status] + head + b"\r\n" + body
        if self._phase is BODY and self.pipeline:
            self.pipeline.popleft()  # the request that is read
        elif self._phase is BODY and self._running is not None:
            running, self._running = self._running, None
            self._give_up(running)
            if running.response_started:
                self.transport.abort()
        self._is_deaf = True
        self.headers, self._seen = [], b""
        if self._running is None:
            self._linger(words)
        else:
            self._last_words = words

    def _give_up(self, cycle: RequestResponseCycle) -> None:
        """Cancels a request whose answer nothing reads."""
        cycle.disconnected = True
        cycle.message_event.set()
        if self._task is not None and any(name == REQUEST_ID for name, _ in cycle.default_headers):
            self._task.cancel()  # Serve notifies its own applications

    def _linger(self, words: bytes) -> None:
        """Closes once the caller does, or soon: at once, a caller that still sends might lose its answer."""
        self._is_deaf = True
        self.pipeline.clear()
        if not self.transport.is_closing():
            self.transport.write(words)
            if self._has_left:
                self.transport.close()
            else:
                self.transport.write_eof()
                self.flow.resume_reading()

    # Deadlines

    def sweep(self, now_s: float) -> None:
        """Ends a connection that has been in the same state for too long; called about every second."""
        state = self._state_now()
        if state != self._state:
            self._state, self._since_s = state, now_s
            return
        kind, limits, waited_s = state[0], self._limits, now_s - self._since_s
        if (kind == "stuck" and waited_s >= limits.stuck_s) or (kind == "left" and waited_s >= limits.left_s):
            self.transport.abort()
        elif (kind == "linger" and waited_s >= limits.linger_s) or (kind == IDLE and waited_s >= limits.idle_s):
            self.transport.close()
        elif (kind == HEAD and waited_s >= limits.head_s) or (kind == BODY and waited_s >= limits.body_s):
            self._refuse(408, "timeout", f"the request's {kind} did not arrive in {waited_s:.0f} s")

    def _state_now(self) -> tuple[object, ...]:
        """Returns what the connection waits for, and values that change with progress."""
        if self.flow.write_paused:
            return ("stuck", self.transport.get_write_buffer_size())
        if self._is_deaf and self._running is None:
            return ("linger",)
        if self._has_left and self._running is not None and not self._running.response_started:
            return ("left", self._num_begun)
        if self._is_deaf or self.flow.read_paused:
            return ("busy",)
        if self._phase is not IDLE:
            return (self._phase, self._num_begun, self._body_bytes // self._limits.kept_bytes)
        return (IDLE, self._num_begun) if self._running is None else ("busy",)


BACKLOG = 2048
"""Connections that wait to be accepted; uvicorn's default."""
HEALTH, ROUTES = "/-/healthz", "/-/routes"
"""Serve's own paths, which its proxies answer."""


class HttpServer(uvicorn.Server):
    """An HTTP/1.1 and 1.0 server on bound sockets, on one event loop."""

    def __init__(
        self, app: ASGIApp, *, lane: Lane | None = None, limits: Limits | None = None, outright: bool = False
    ) -> None:
        """`app`: for all paths that are not in the `lane`.

        `outright`: whether `app` is Offramp's. Otherwise it is Serve's, which assigns request ids, and is notified
        instead of cancelled when a caller leaves.
        """
        self.app = app
        self.lane: Lane = lane or {}
        self.limits = limits or Limits()
        self.outright = outright
        http: Any = partial(Connection, self)
        whole: Any = app  # uvicorn's types are narrower
        config = uvicorn.Config(
            whole,
            http=http,
            ws="none",
            lifespan="off",
            interface="asgi3",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            backlog=BACKLOG,
            timeout_keep_alive=self.limits.idle_s,  # type: ignore[arg-type] # of a timer, which takes any number
        )
        super().__init__(config)
        self.servers: list[Any] = []
        self._ended = asyncio.Event()

    async def serve(self, sockets: Sequence[socket.socket] | None = None) -> None:
        """Serves until `should_exit` and the last answer; if it is cancelled, it stops at once."""
        sweeping = asyncio.get_running_loop().create_task(self._keep_sweeping())
        try:
            await super().serve(None if sockets is None else list(sockets))
        finally:
            sweeping.cancel()
            for listener in self.servers:
                listener.close()
            for connection in list(self.server_state.connections):
                connection.abort()  # type: ignore[union-attr] # they are all ours
            self._ended.set()

    async def close(self) -> None:
        """Stops accepting connections, and waits for the answers to all accepted requests."""
        self.should_exit = True
        await self._ended.wait()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the process."""
        yield

    def sweep(self, now_s: float) -> None:
        """Ends connections that have waited for too long; `now_s`: time of the event loop."""
        for connection in list(self.server_state.connections):
            connection.sweep(now_s)  # type: ignore[union-attr]

    async def _keep_sweeping(self) -> None:
        while True:
            await asyncio.sleep(self.limits.sweep_s)
            self.sweep(asyncio.get_running_loop().time())


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """An application below a prefix, and Serve's own paths."""

    router: ASGIApp
    prefix: str
    """The prefix of its paths."""
    name: str
    """The name of the application in Serve."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes paths below the prefix to the application, as Serve's proxies do."""
        path: str = scope["path"]
        root = self.prefix.rstrip("/")
        if path == HEALTH:
            answer: ASGIApp = PlainTextResponse("success")
        elif path == ROUTES:
            answer = Response(json.dumps({self.prefix: self.name}), media_type="application/json")
        elif path == root or path.startswith(root + "/"):
            answer, scope = self.router, {**scope, "root_path": root}
        else:
            words = f"Path '{path}' not found. Ping http://.../-/routes for available routes."
            answer = PlainTextResponse(words, 404)
        await answer(scope, receive, send)


def standalone(site: Site, lane: Lane, *, access_log: bool) -> HttpServer:
    """Returns a server with nothing of Serve between it and the application."""
    if not access_log:
        return HttpServer(site, lane=lane, outright=True)
    lane = {path: replace(each, app=logged(each.app)) for path, each in lane.items()}
    return HttpServer(logged(site), lane=lane, outright=True)


def logged(app: ASGIApp) -> ASGIApp:
    """Returns the application with an access log, in Serve's format."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        began_s, status = time.perf_counter(), "499"

        async def sent(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = str(message["status"])
            await send(message)

        try:
            await app(scope, receive, sent)
        finally:
            took_ms = 1000 * (time.perf_counter() - began_s)
            request_id = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
            said = {"serve_access_log": True, "request_id": request_id.decode("latin-1"), "route": scope["path"]}
            logger.info("%s %s %s %.1fms", scope["method"], scope["path"], status, took_ms, extra=said)

    return answer


async def start_in_serve(
    lane: Lane,
    serves_own: Any,
    app: Any,
    http_options: HTTPOptions,
    *,
    event_loop: asyncio.AbstractEventLoop,
    enable_so_reuseport: bool = False,
) -> tuple[asyncio.Task[None], Any]:
    """Starts a server in the place of Serve's, as Serve's function does: returns its task, and what has `should_exit`.

    Serve 2.60 has no setting for this. It starts the server of an ingress replica once the application is built, passes
    the port, watches the server and ends it.

    Paths outside the `lane` pass through Serve's layers, and so do all if requests have a timeout. TLS and a root path
    are left to Serve's own server. Raises RuntimeError, caused by an OSError, if the port is taken.
    """
    if http_options.ssl_certfile or http_options.root_path:
        options = {"event_loop": event_loop, "enable_so_reuseport": enable_so_reuseport}
        started: tuple[asyncio.Task[None], Any] = await serves_own(app, http_options, **options)
        return started
    bound = _bound(http_options.host or "127.0.0.1", http_options.port, reuse_port=enable_so_reuseport)
    # Serve's server trusts the headers of a proxy on this machine, as uvicorn does by default.
    whole: Any = ProxyHeadersMiddleware(with_middlewares(app, http_options.middlewares), "127.0.0.1")
    server = HttpServer(
        whole,
        lane={} if http_options.request_timeout_s or http_options.middlewares else lane,
        limits=Limits(idle_s=http_options.keep_alive_timeout_s),
    )
    return event_loop.create_task(server.serve([bound])), server


def _bound(host: str, port: int, *, reuse_port: bool) -> socket.socket:
    family, is_ipv6 = (socket.AF_INET6, True) if ":" in host else (socket.AF_INET, False)
    options: dict[str, bool] = {"reuse_port": reuse_port, "dualstack_ipv6": is_ipv6}
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG, **options)
    except OSError as error:
        raise RuntimeError(f"Failed to bind to address '{host}:{port}'.") from error
