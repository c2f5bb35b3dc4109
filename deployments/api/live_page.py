"""The live page: its files, and its stream of events, which one producer makes for all viewers."""

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

from deployments.api.events import HEADERS, Departure, EventStream
from earlyexit.clock import Clock
from earlyexit.errors import OverloadedError, UnknownPathError

PERIOD_S = 1.0
LONGEST_LOOK_S = 10.0
"""A look at the service that takes longer is trouble, of which viewers are told: proxies close idle connections."""
MOST_VIEWERS = 16
RETRY_S = 10.0
LONGEST_S = 600.0
"""A viewer must reconnect after so long. This bounds what a proxy buffers, and gives new ingresses viewers."""
STUCK_S = 60.0
"""A viewer that reads nothing for so long is disconnected."""
TROUBLE = b'event: trouble\ndata: {"words": "the service cannot be looked at; the log of the ingress says why"}\n\n'

logger = logging.getLogger(f"ray.serve.{__name__}")

Produce = Callable[[], Awaitable[bytes | None]]
"""Returns the newest event; None if there will be no more."""


class Viewer:
    """An asynchronous iterator of the newest event; a slow viewer skips older ones."""

    def __init__(self, since_s: float, leave: Callable[[Viewer], None]) -> None:
        self.since_s = since_s
        self._leave = leave
        self._newest: asyncio.Queue[bytes | None] = asyncio.Queue(1)

    def offer(self, event: bytes | None) -> None:
        """Replaces the event that was not taken yet; None ends the iteration."""
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
    """The viewers of one ingress; it produces events while there are any."""

    produce: Produce
    clock: Clock
    _: KW_ONLY
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    most_viewers: int = MOST_VIEWERS
    longest_s: float = LONGEST_S
    viewers: set[Viewer] = field(default_factory=set, init=False)
    _task: asyncio.Task[None] | None = field(default=None, init=False)
    _newest: bytes | None = field(default=None, init=False)
    _closed: bool = field(default=False, init=False)

    def join(self) -> Viewer:
        """Adds a viewer; raises OverloadedError if there are too many, or if the ingress stops."""
        if self._closed:
            raise OverloadedError("this ingress ends; another one has the page", retry_after_s=1.0)
        if len(self.viewers) >= self.most_viewers:
            message = f"{self.most_viewers} look at the page of this ingress already"
            raise OverloadedError(message, retry_after_s=RETRY_S)
        viewer = Viewer(self.clock.now_s(), self._gone)
        self.viewers.add(viewer)
        if self._newest is not None:
            viewer.offer(self._newest)
        if self._task is None:
            self._task = asyncio.create_task(self._keep_producing())
        return viewer

    def close(self) -> None:
        """Ends every viewer and accepts no more, because the ingress stops."""
        self._closed = True
        for viewer in list(self.viewers):
            viewer.leave()

    def _gone(self, viewer: Viewer) -> None:
        self.viewers.discard(viewer)
        if not self.viewers and self._task is not None:
            self._task.cancel()
            self._task = self._newest = None

    async def _keep_producing(self) -> None:
        while not self._closed:
            began_s = self.clock.now_s()
            await self._publish()
            await self.sleep(max(0.0, began_s + PERIOD_S - self.clock.now_s()))

    async def _publish(self) -> None:
        try:
            async with asyncio.timeout(LONGEST_LOOK_S):
                event = await self.produce()
        except Exception:
            logger.exception("the live page has no news")
            event = TROUBLE
        if event is None:
            self.close()
            return
        self._newest = event
        for viewer in list(self.viewers):
            viewer.offer(event)
            if self.clock.now_s() - viewer.since_s >= self.longest_s:
                viewer.leave()


PAGE = "page.html"
KINDS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page loads files of this service, and nothing else."""
ALWAYS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",  # browsers revalidate by the ETag, so that a page is never older than its service
}


@cache
def assets() -> Mapping[str, bytes]:
    """Returns the files by name; they are read once."""
    return {entry.name: entry.read_bytes() for entry in (files(__package__) / "assets").iterdir()}


async def page(request: Request) -> Response:
    """Returns the page."""
    return _respond(request, PAGE)


async def asset(request: Request) -> Response:
    """Returns a file that the page loads; raises UnknownPathError."""
    name = request.path_params["asset"]
    if name == PAGE or name not in assets():
        raise UnknownPathError(f"GET {request.url.path}: there is no such path; see /openapi.json")
    return _respond(request, name)


def watch(request: Request, join: Callable[[], Viewer]) -> Response:
    """Returns the stream of events; raises what `join` raises."""
    if request.method == "HEAD":
        return Response(media_type="text/event-stream", headers=HEADERS)
    viewer = join()
    return EventStream(viewer, Departure(request.receive, viewer.leave), stuck_s=STUCK_S)


def _respond(request: Request, name: str) -> Response:
    content = assets()[name]
    etag = f'"{sha256(content).hexdigest()[:16]}"'
    headers = ALWAYS | {"etag": etag}
    if etag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(content, media_type=KINDS[name.rpartition(".")[2]], headers=headers)
