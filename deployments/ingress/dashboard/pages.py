"""The page's files and its stream of events, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from deployments.ingress.dashboard.feed import Viewer
from earlyexit.errors import UnknownPathError

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
            pass  # the viewer has gone, or is as good as gone: nobody is left to be told
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
