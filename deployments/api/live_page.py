"""The live page: its files, and its event stream, which one task produces for all viewers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from hashlib import sha256
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response

from deployments.api.server import EVENT_HEADERS, DisconnectWatch, EventStream
from earlyexit.clock import Clock
from earlyexit.errors import OverloadedError, UnknownPathError

PERIOD_S = 1.0
POLL_TIMEOUT_S = 10.0
"""Timeout of an update, in seconds. Viewers then get an error event, because proxies close idle connections."""
MAX_VIEWERS = 16
RETRY_S = 10.0
MAX_CONNECTED_S = 600.0
"""Viewers must reconnect after this time. This limits what a proxy buffers, and moves viewers to new ingresses."""
STALLED_S = 60.0
"""A viewer that reads nothing for this time is disconnected."""
FAILURE_EVENT = b'event: trouble\ndata: {"words": "the service\'s state is not available; see the ingress log"}\n\n'

logger = logging.getLogger(f"ray.serve.{__name__}")

Produce = Callable[[], Awaitable[bytes | None]]
"""Returns the newest event; None if there are no more events."""


class Viewer:
    """An asynchronous iterator of events. A slow viewer gets only the newest one."""

    def __init__(self, since_s: float, leave: Callable[[Viewer], None]) -> None:
        self.since_s = since_s
        self._leave = leave
        self._newest: asyncio.Queue[bytes | None] = asyncio.Queue(1)

    def offer(self, event: bytes | None) -> None:
        """Replaces an event that was not read yet; None ends the iteration."""
        if self._newest.full():
            self._newest.get_nowait()
        self._newest.put_nowait(event)

    def leave(self) -> None:
        """Ends the iteration, and removes the viewer from its feed."""
        self._leave(self)
        self.offer(None)

    def __aiter__(self) -> Viewer:
        return self

    async def __anext__(self) -> bytes:
        event = await self._newest.get()
        if event is None:
            raise StopAsyncIteration
        return event


@dataclass(slots=True, eq=False)
class Feed:
    """The viewers of one ingress. Events are produced while there are viewers."""

    produce: Produce
    clock: Clock
    _: KW_ONLY
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    max_viewers: int = MAX_VIEWERS
    max_connected_s: float = MAX_CONNECTED_S
    viewers: set[Viewer] = field(default_factory=set, init=False)
    _task: asyncio.Task[None] | None = field(default=None, init=False)
    _newest: bytes | None = field(default=None, init=False)
    _closed: bool = field(default=False, init=False)

    def join(self) -> Viewer:
        """Adds a viewer; raises OverloadedError if there are too many, or if the ingress is shutting down."""
        if self._closed:
            raise OverloadedError("this ingress is shutting down; another one serves the page", retry_after_s=1.0)
        if len(self.viewers) >= self.max_viewers:
            message = f"the page of this ingress has {self.max_viewers} viewers already"
            raise OverloadedError(message, retry_after_s=RETRY_S)
        viewer = Viewer(self.clock.now_s(), self._remove)
        self.viewers.add(viewer)
        if self._newest is not None:
            viewer.offer(self._newest)
        if self._task is None:
            self._task = asyncio.create_task(self._keep_producing())
        return viewer

    def close(self) -> None:
        """Disconnects all viewers and accepts no more, because the ingress is shutting down."""
        self._closed = True
        for viewer in list(self.viewers):
            viewer.leave()

    def _remove(self, viewer: Viewer) -> None:
        self.viewers.discard(viewer)
        if not self.viewers and self._task is not None:
            self._task.cancel()
            self._task = self._newest = None

    async def _keep_producing(self) -> None:
        while not self._closed:
            start_s = self.clock.now_s()
            await self._publish()
            await self.sleep(max(0.0, start_s + PERIOD_S - self.clock.now_s()))

    async def _publish(self) -> None:
        try:
            async with asyncio.timeout(POLL_TIMEOUT_S):
                event = await self.produce()
        except Exception:
            logger.exception("the live page could not be updated")
            event = FAILURE_EVENT
        if event is None:
            self.close()
            return
        self._newest = event
        for viewer in list(self.viewers):
            viewer.offer(event)
            if self.clock.now_s() - viewer.since_s >= self.max_connected_s:
                viewer.leave()


PAGE = "page.html"
CONTENT_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page may load only files of this service."""
PAGE_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # browsers revalidate by ETag, so the page always has the service's version
}


@cache
def assets() -> Mapping[str, bytes]:
    """Returns the page's files by name. They are read once."""
    return {entry.name: entry.read_bytes() for entry in (files(__package__) / "assets").iterdir()}


async def page(request: Request) -> Response:
    """Answers with the page."""
    return _respond(request, PAGE)


async def asset(request: Request) -> Response:
    """Answers with a file that the page loads; raises UnknownPathError."""
    name = request.path_params["asset"]
    if name == PAGE or name not in assets():
        raise UnknownPathError(f"GET {request.url.path}: there is no such path; see /openapi.json")
    return _respond(request, name)


def watch(request: Request, join: Callable[[], Viewer]) -> Response:
    """Answers with the event stream; raises what `join` raises."""
    if request.method == "HEAD":
        return Response(media_type="text/event-stream", headers=EVENT_HEADERS)
    viewer = join()
    return EventStream(viewer, DisconnectWatch(request.receive, viewer.leave), stalled_s=STALLED_S)


def _respond(request: Request, name: str) -> Response:
    content = assets()[name]
    etag = f'"{sha256(content).hexdigest()[:16]}"'
    headers = PAGE_HEADERS | {"etag": etag}
    if etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=CONTENT_TYPES[name.rpartition(".")[2]], headers=headers)
