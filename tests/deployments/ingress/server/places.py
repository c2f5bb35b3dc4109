"""A server in this process, callers that send bytes, and an application that echoes requests."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from deployments.api.access import Gate
from deployments.api.http import build_api
from deployments.api.server import HttpServer, Limits, below_prefix, with_access_log
from tests.deployments.ingress.api.faces import FakeBackend

ORIGIN = "https://page.example"
GET = b"GET /echo HTTP/1.1\r\nHost: here\r\n\r\n"
LIMITS = Limits(head_bytes=2000, progress_bytes=100, connections=8)


def post(body: bytes, *lines: str, path: str = "/echo") -> bytes:
    head = "\r\n".join([f"POST {path} HTTP/1.1", "Host: here", f"Content-Length: {len(body)}", *lines, "", ""])
    return head.encode() + body


class App:
    """Echoes the request body; `gate` delays it."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.asked: list[tuple[str, str]] = []
        self.bodies: list[bytes] = []
        self.parts: list[int] = []
        self.ended: list[str] = []

    async def __call__(self, scope: Any, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Any]) -> None:
        self.asked.append((scope["method"], scope["path"]))
        body, more = b"", True
        try:
            if scope["path"] == "/early":
                more = False
            while more:
                await self.gate.wait()
                message = await receive()
                if message["type"] == "http.disconnect":
                    self.ended.append("left")
                    return
                self.parts.append(len(message["body"]))
                body, more = body + message["body"], message["more_body"]
            self.bodies.append(body)
            await self.gate.wait()
            if scope["path"] == "/fails":
                raise ValueError("words")
            status = 413 if scope["path"] == "/early" else 200
            await send({"type": "http.response.start", "status": status, "headers": [(b"x-app", b"1")]})
            if scope["path"] == "/stream":
                for piece in (b"one", b"two"):
                    await send({"type": "http.response.body", "body": piece, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
            elif scope["path"] == "/breaks":
                await send({"type": "http.response.body", "body": b"half", "more_body": True})
            else:
                await send({"type": "http.response.body", "body": body or b"nothing"})
            self.ended.append("answered")
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise


class Caller:
    """A connection of a test."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    def reset(self) -> None:
        """Resets the connection. After a plain close, the peer would have to assume that one half still reads."""
        linger = struct.pack("ii", 1, 0)
        self.writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        self.writer.transport.abort()

    async def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Returns the next response; (0, {}, b"") if the connection is closed."""
        async with asyncio.timeout(5):
            try:
                head = await self.reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                return 0, {}, b""
            status, *lines = head.decode("latin-1").strip().split("\r\n")
            headers = dict(line.split(": ", 1) for line in lines)
            assert len(headers) == len(lines), lines
            if "content-length" in headers:
                return int(status.split()[1]), headers, await self.reader.readexactly(int(headers["content-length"]))
            if headers.get("transfer-encoding") == "chunked":
                return int(status.split()[1]), headers, await self._chunks()
            return int(status.split()[1]), headers, b""

    async def _chunks(self) -> bytes:
        body = b""
        while size := int(await self.reader.readuntil(b"\r\n"), 16):
            body += await self.reader.readexactly(size)
            await self.reader.readexactly(2)
        await self.reader.readexactly(2)
        return body

    async def status(self) -> int:
        return (await self.answer())[0]

    async def is_closed(self) -> bool:
        async with asyncio.timeout(5):
            try:
                return await self.reader.read(1) == b""
            except ConnectionError:
                return True


class Door:
    """The port of a server, and the callers of a test."""

    def __init__(self, port: int) -> None:
        self.port = port
        self._callers: list[Caller] = []

    async def call(self, data: bytes = b"") -> Caller:
        caller = Caller(*await asyncio.open_connection("127.0.0.1", self.port))
        self._callers.append(caller)
        caller.send(data)
        return caller

    def close(self) -> None:
        for caller in self._callers:
            caller.writer.close()


class Place(Door):
    """A server with its application."""

    def __init__(self, app: App, server: HttpServer, port: int, task: asyncio.Task[None]) -> None:
        super().__init__(port)
        self.app = app
        self.server = server
        self.task = task


@asynccontextmanager
async def running(server: HttpServer) -> AsyncIterator[tuple[int, asyncio.Task[None]]]:
    """Runs a server on a free port; yields the port, and the server's task."""
    task = asyncio.create_task(server.serve([bound := socket.create_server(("127.0.0.1", 0))]))
    try:
        yield bound.getsockname()[1], task
    finally:
        task.cancel()
        await asyncio.wait([task])


@asynccontextmanager
async def serving(limits: Limits = LIMITS, *, fast: bool = False, standalone: bool = True) -> AsyncIterator[Place]:
    app = App()
    serve_app = partial(app) if fast else None if standalone else app
    server = HttpServer(app, serve_app=serve_app, limits=limits)
    async with running(server) as (port, task):
        place = Place(app, server, port, task)
        try:
            yield place
        finally:
            place.close()


@asynccontextmanager
async def serving_api(
    backend: FakeBackend,
    guard: Gate | None = None,
    *,
    standalone: bool = True,
    prefix: str = "/",
    access_log: bool = False,
) -> AsyncIterator[Door]:
    """Serves the whole API of a backend."""
    api = build_api(backend, gate=guard, cors_origins=(ORIGIN,))
    site = below_prefix(api, prefix, "offramp")
    site = with_access_log(site) if access_log else site
    server = HttpServer(site, serve_app=None if standalone else site, limits=Limits(head_bytes=2000))
    async with running(server) as (port, _):
        door = Door(port)
        yield door
        door.close()
        await asyncio.wait_for(server.close(), 5)
