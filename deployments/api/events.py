"""Server-sent events: a response that streams them, and a watch for the disconnection of its caller."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

HEADERS = {"cache-control": "no-store, no-transform", "x-accel-buffering": "no"}
"""Headers that forbid proxies to buffer, compress or cache events."""


class DisconnectWatch:
    """Calls `on_disconnect` when the caller disconnects, even while nothing is sent."""

    def __init__(self, receive: Receive, on_disconnect: Callable[[], None]) -> None:
        """Starts the watch. The request's body must have been read."""
        self._on_disconnect = on_disconnect
        self._task = asyncio.get_running_loop().create_task(self._watch(receive))

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._on_disconnect()

    def close(self) -> None:
        """Ends the watch, and calls `on_disconnect`."""
        self._task.cancel()
        self._on_disconnect()


class EventStream(Response):
    """A response that sends each event at once, and waits for slow readers.

    Starlette's streaming response does not notice on newer servers that the caller disconnects while nothing is sent.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterable[bytes], watch: DisconnectWatch | None = None, *, stalled_s: float | None = None
    ) -> None:
        """`watch` is closed at the end. The stream ends if the caller reads nothing for `stalled_s` seconds."""
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._watch = watch
        self._stalled_s = stalled_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for event in self._events:
                async with asyncio.timeout(self._stalled_s):
                    await send({"type": "http.response.body", "body": event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (OSError, TimeoutError):
            pass  # the caller is gone or does not read, so no error can be sent
        finally:
            if self._watch is not None:
                self._watch.close()
