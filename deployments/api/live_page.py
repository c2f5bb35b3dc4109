"""Viewers of the live page, and the one producer for all of them, which runs while there is a viewer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from earlyexit.clock import Clock
from earlyexit.errors import OverloadedError, UnknownPathError

PERIOD_S = 1.0
HEARTBEAT_S = 10.0
"""Proxies close connections on which nothing happens; where the service does not answer, nothing else would."""
MOST_VIEWERS = 16
LONGEST_S = 600.0
"""A viewer is asked to come again after so long: what a proxy keeps for a slow one is bounded, and a new ingress gets
its part of the viewers."""
BEAT = b": still here\n\n"
TROUBLE = b'event: trouble\ndata: {"words": "the service cannot be looked at; the log of the ingress says why"}\n\n'

logger = logging.getLogger(f"ray.serve.{__name__}")

Produce = Callable[[], Awaitable[bytes | None]]
"""The newest event; None where there will be none any more."""


class Viewer:
    """A viewer: gets the newest event whenever it is ready for one, and never those that it missed."""

    def __init__(self, since_s: float, leave: Callable[[Viewer], None]) -> None:
        self.since_s = since_s
        self._leave = leave
        self._newest: bytes | None = None
        self._news = asyncio.Event()
        self._ended = False

    def offer(self, event: bytes) -> None:
        """Instead of what was not taken yet."""
        self._newest = event
        self._news.set()

    def beat(self) -> None:
        """A sign of life, where there is no news."""
        if self._newest is None:
            self.offer(BEAT)

    def end(self) -> None:
        """Nothing comes any more."""
        self._ended = True
        self._news.set()

    def leave(self) -> None:
        """The viewer has gone."""
        self.end()
        self._leave(self)

    def __aiter__(self) -> Viewer:
        return self

    async def __anext__(self) -> bytes:
        await self._news.wait()
        event, self._newest = self._newest, None
        if self._ended or event is None:
            raise StopAsyncIteration
        self._news.clear()
        return event


class Feed:
    """One per ingress, on its event loop."""

    def __init__(
        self,
        produce: Produce,
        clock: Clock,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        most_viewers: int = MOST_VIEWERS,
        longest_s: float = LONGEST_S,
    ) -> None:
        self._produce = produce
        self._clock = clock
        self._sleep = sleep
        self._most_viewers = most_viewers
        self._longest_s = longest_s
        self._viewers: set[Viewer] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._newest: bytes | None = None
        self._closed = False

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    def join(self) -> Viewer:
        """Adds a viewer; raises OverloadedError if there are too many, or if the ingress ends."""
        if self._closed:
            raise OverloadedError("this ingress ends; another one has the page", retry_after_s=1.0)
        if len(self._viewers) >= self._most_viewers:
            message = f"{self._most_viewers} look at the page of this ingress already"
            raise OverloadedError(message, retry_after_s=HEARTBEAT_S)
        viewer = Viewer(self._clock.now_s(), self._gone)
        self._viewers.add(viewer)
        if self._newest is not None:
            viewer.offer(self._newest)
        if not self._tasks:
            self._tasks = [asyncio.create_task(self._keep_producing()), asyncio.create_task(self._keep_beating())]
        return viewer

    def close(self) -> None:
        """End every viewer, and take no more: the ingress ends."""
        self._closed = True
        for viewer in list(self._viewers):
            viewer.end()

    def _gone(self, viewer: Viewer) -> None:
        self._viewers.discard(viewer)
        if not self._viewers:
            for task in self._tasks:
                task.cancel()
            self._tasks, self._newest = [], None

    async def _keep_producing(self) -> None:
        while not self._closed:
            began_s = self._clock.now_s()
            await self._publish()
            await self._sleep(max(0.0, began_s + PERIOD_S - self._clock.now_s()))

    async def _publish(self) -> None:
        try:
            event = await self._produce()
        except Exception:
            logger.exception("the live page has no news")
            event = TROUBLE
        if event is None:
            self.close()
            return
        self._newest = event
        for viewer in self._viewers:
            viewer.offer(event)

    async def _keep_beating(self) -> None:
        while True:
            await self._sleep(HEARTBEAT_S)
            for viewer in self._viewers:
                viewer.beat()
                if self._clock.now_s() - viewer.since_s >= self._longest_s:
                    viewer.end()


PAGE = "page.html"
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""The page loads what this service serves, and nothing else."""
ALWAYS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # kept, and asked for by its ETag: a page is never older than its service
}
STREAM = {"cache-control": "no-store, no-transform", "x-accel-buffering": "no"}
"""No proxy may gather events, compress or keep them."""
STUCK_S = 60.0
"""A viewer that takes nothing for so long is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asset:
    """A file of the page."""

    content: bytes
    media_type: str
    etag: str


@cache
def assets() -> Mapping[str, Asset]:
    """By name; read once."""
    folder = files(__package__) / "assets"
    return {entry.name: _asset(entry.name, entry.read_bytes()) for entry in folder.iterdir()}


async def page(request: Request) -> Response:
    """The page itself."""
    return _respond(request, assets()[PAGE])


async def asset(request: Request) -> Response:
    """A file that it loads; raises UnknownPathError."""
    name = request.path_params["asset"]
    if name == PAGE or name not in assets():
        raise UnknownPathError(f"GET {request.url.path}: there is no such path; see /openapi.json")
    return _respond(request, assets()[name])


def watch(request: Request, join: Callable[[], Viewer]) -> Response:
    """The stream of events; raises what `join` does."""
    if request.method == "HEAD":
        return Response(media_type="text/event-stream", headers=STREAM)
    return EventStream(join())


class EventStream(StreamingResponse):
    """What a viewer gets, until it leaves or is let go."""

    def __init__(self, viewer: Viewer, *, stuck_s: float = STUCK_S) -> None:
        super().__init__(viewer, media_type="text/event-stream", headers=STREAM)
        self._viewer = viewer
        self._stuck_s = stuck_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI request. Starlette's own would not notice, on newer servers, that a silent viewer has left."""
        leaving = asyncio.create_task(_leave_when_gone(receive, self._viewer))
        try:
            await self._stream(send)
        except (OSError, TimeoutError):
            pass  # the viewer has gone, or does not read: no error can be sent
        finally:
            leaving.cancel()
            self._viewer.leave()

    async def _stream(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async for event in self._viewer:
            async with asyncio.timeout(self._stuck_s):
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _leave_when_gone(receive: Receive, viewer: Viewer) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    viewer.leave()


def _respond(request: Request, found: Asset) -> Response:
    headers = ALWAYS | {"etag": found.etag}
    if found.etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(found.content, media_type=found.media_type, headers=headers)


def _asset(name: str, content: bytes) -> Asset:
    etag = f'"{sha256(content).hexdigest()[:16]}"'
    return Asset(content=content, media_type=KINDS[name.rpartition(".")[2]], etag=etag)
