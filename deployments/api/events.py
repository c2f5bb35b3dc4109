"""Server-sent events: a response that streams them, and the watch that notices when its caller leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

HEADERS = {"cache-control": "no-store, no-transform", "x-accel-buffering": "no"}
"""Proxies must not buffer, compress or cache events."""


class Departure:
    """Calls `leave` when the caller disconnects, also while nothing is sent."""

    def __init__(self, receive: Receive, leave: Callable[[], None]) -> None:
        """Watches from now on, until it is closed; the request's body must have been read."""
        self._leave = leave
        self._task = asyncio.get_running_loop().create_task(self._watch(receive))

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._leave()

    def close(self) -> None:
        """Stops watching, and calls `leave` as well."""
        self._task.cancel()
        self._leave()


class EventStream(Response):
    """Sends each event as soon as it is there, and waits for slow readers.

    Starlette's own streaming response does not notice, on newer servers, that a caller has left while nothing is sent.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterable[bytes], departure: Departure | None = None, *, stuck_s: float | None = None
    ) -> None:
        """`departure` is closed at the end; a caller that accepts nothing for `stuck_s` seconds is given up."""
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._departure = departure
        self._stuck_s = stuck_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in self._events:
                async with asyncio.timeout(self._stuck_s):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (OSError, TimeoutError):
            pass  # the caller has left, or does not read: no error can be sent
        finally:
            if self._departure is not None:
                self._departure.close()
