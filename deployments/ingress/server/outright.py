"""Our server alone: callers come straight to it, and nothing of Serve's stands between it and the application."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from deployments.ingress.server.exchange import App, Message, Scope
from deployments.ingress.server.lane import Lane
from deployments.ingress.server.limits import Limits
from deployments.ingress.server.server import HttpServer

logger = logging.getLogger(f"ray.serve.{__name__}")

HEALTH, ROUTES = "/-/healthz", "/-/routes"
"""Paths of Serve's own, which its proxies answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """What is served where."""

    router: App
    prefix: str
    """Of its paths."""
    name: str
    """Of Serve's application."""

    async def __call__(
        self, scope: Scope, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        """As Serve's proxies do: what is below the prefix goes to the application."""
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


class Outright:
    """A server on a socket, from its start to its end."""

    def __init__(self, site: Site, lane: Lane, *, access_log: bool, limits: Limits | None = None) -> None:
        app: App = site
        if access_log:
            app = logged(app)
            lane = {path: replace(each, app=logged(each.app)) for path, each in lane.items()}
        self._server = HttpServer(app, lane=lane, limits=limits, outright=True)
        self._task: asyncio.Task[None] | None = None

    async def start(self, bound: socket.socket) -> None:
        """Take callers from now on."""
        await self._server.listen([bound])
        self._task = asyncio.get_running_loop().create_task(self._server.serve())

    async def close(self) -> None:
        """Take nobody new, and wait until all who are inside have their answers."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task


def logged(app: App) -> App:
    """With a line for every request, as Serve writes it."""

    async def answer(
        scope: Scope, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
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


async def _say(send: Callable[[Message], Awaitable[None]], status: int, body: bytes, kind: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
    await send({"type": "http.response.body", "body": body})
