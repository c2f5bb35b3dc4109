"""uvicorn with Offramp's connections, and with fast paths to the most frequent endpoints."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.api.server.connection import Connection, Lane, Limits, Serving

logger = logging.getLogger(f"ray.serve.{__name__}")

BACKLOG = 2048
"""Connections that wait to be accepted; uvicorn's default."""
HEALTH, ROUTES = "/-/healthz", "/-/routes"
"""Serve's own paths, which its proxies answer."""


class HttpServer(uvicorn.Server):
    """An HTTP/1.1 and 1.0 server on bound sockets, on one event loop."""

    def __init__(
        self, app: ASGIApp, *, lane: Lane | None = None, limits: Limits | None = None, outright: bool = False
    ) -> None:
        """The parameters are the fields of `Serving`."""
        self.limits = limits or Limits()
        http: Any = partial(Connection, Serving(app=app, lane=lane or {}, limits=self.limits, outright=outright))
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

    @property
    def num_connections(self) -> int:
        return len(self.server_state.connections)

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
            await _say(send, 200, b"success", b"text/plain; charset=utf-8")
        elif path == ROUTES:
            await _say(send, 200, json.dumps({self.prefix: self.name}).encode(), b"application/json")
        elif path == root or path.startswith(root + "/"):
            await self.router({**scope, "root_path": root}, receive, send)
        else:
            words = f"Path '{path}' not found. Ping http://.../-/routes for available routes."
            await _say(send, 404, words.encode(), b"text/plain; charset=utf-8")


class StandaloneServer:
    """A server on a socket, with nothing of Serve between it and the application."""

    def __init__(self, site: Site, lane: Lane, *, access_log: bool, limits: Limits | None = None) -> None:
        app: ASGIApp = site
        if access_log:
            app = logged(app)
            lane = {path: replace(each, app=logged(each.app)) for path, each in lane.items()}
        self._server = HttpServer(app, lane=lane, limits=limits, outright=True)
        self._task: asyncio.Task[None] | None = None

    async def start(self, bound: socket.socket) -> None:
        """Starts to accept connections."""
        bound.listen(BACKLOG)
        self._task = asyncio.get_running_loop().create_task(self._server.serve([bound]))

    async def close(self) -> None:
        """Stops accepting connections, and waits for the answers to all accepted requests."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task


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


async def _say(send: Send, status: int, body: bytes, kind: bytes) -> None:
    headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
