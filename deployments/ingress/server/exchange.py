"""One request and its answer, as an ASGI application sees them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, Protocol

from deployments.ingress.server.replies import CLOSE, KEEP, WITHOUT_BODY, head_of

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
App = Callable[[Scope, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]
"""An ASGI application."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"


class Wire(Protocol):
    """What an exchange needs of its connection."""

    @property
    def is_ending(self) -> bool:
        """Whether no further request is taken."""
        ...

    def write(self, data: bytes) -> None: ...

    async def drained(self) -> None:
        """Wait until the caller has taken most of what was written."""
        ...

    def want_more(self) -> None:
        """Read on: what was read of a body has been taken."""
        ...


class Exchange:
    """Gives an application its request, and its caller the answer: head and body in one write, where it is one."""

    __slots__ = (
        "_body",
        "_chunked",
        "_is_over",
        "_more",
        "_news",
        "_start",
        "_wire",
        "answered",
        "app",
        "expects",
        "gone",
        "keep_alive",
        "request_id",
        "scope",
        "started",
    )

    def __init__(self, wire: Wire, app: App, scope: Scope, *, keep_alive: bool, request_id: bytes | None) -> None:
        """`request_id`: to be said in the answer; None where the application does."""
        self._wire = wire
        self.app = app
        self.scope = scope
        self.keep_alive = keep_alive
        self.request_id = request_id
        self.expects = False
        """Whether the caller sends its body only when it is told to."""
        self.started = False
        """Whether some of the answer was written."""
        self.answered = False
        """Whether all of it was."""
        self.gone = False
        """Whether nobody reads it any more."""
        self._body = b""
        self._more = True
        self._is_over = False
        self._news: asyncio.Future[None] | None = None
        self._start: Message | None = None
        self._chunked = False

    @property
    def unread_bytes(self) -> int:
        """Of the body, that the application has not taken."""
        return len(self._body)

    @property
    def is_whole(self) -> bool:
        """Whether the body's end was read."""
        return not self._more

    def feed(self, data: bytes) -> None:
        """More of the body; who has his answer needs none."""
        if not (self.answered or self.gone):
            self._body = self._body + data if self._body else data
            self._wake()

    def end(self) -> None:
        """The body has come to its end."""
        self._more = False
        self._wake()

    def leave(self) -> None:
        """The caller has gone, or is as good as gone."""
        self.gone = True
        self._wake()

    async def receive(self) -> Message:
        """ASGI's: the body as it comes; then, when there is nobody to be answered any more, that."""
        if self.expects and not self.started:
            self.expects = False
            self._wire.write(CONTINUE)
        while True:
            if self.gone or self.answered:
                return {"type": "http.disconnect"}
            if self._body or not (self._more or self._is_over):
                body, self._body = self._body, b""
                self._is_over = not self._more
                if self._more:
                    self._wire.want_more()
                return {"type": "http.request", "body": body, "more_body": self._more}
            self._news = asyncio.get_running_loop().create_future()
            await self._news

    async def send(self, message: Message) -> None:
        """ASGI's; nothing happens where the caller has gone."""
        if self.gone:
            return
        if message["type"] == "http.response.start":
            if self._start is not None:
                raise RuntimeError("an answer was begun twice")
            self._start = message
            return
        if self._start is None or self.answered:
            raise RuntimeError(f"{message['type']} before an answer was begun, or after its end")
        body, more = message.get("body", b""), message.get("more_body", False)
        if self.started:
            self._wire.write(self._piece(body, more))
        else:
            self.started = True
            self._wire.write(self._head(self._start, body, more) + self._piece(body, more))
        if more:
            await self._wire.drained()
        else:
            self.answered = True
            self._wake()

    def _wake(self) -> None:
        if self._news is not None and not self._news.done():
            self._news.set_result(None)

    def _head(self, start: Message, body: bytes, more: bool) -> bytes:
        status, headers = start["status"], start["headers"]
        lines = b"" if self.request_id is None else b"x-request-id: %b\r\n" % self.request_id
        is_old = self.scope["http_version"] == "1.0"
        if not any(name == b"content-length" for name, _ in headers) and status not in WITHOUT_BODY:
            if not more:
                lines += b"content-length: %d\r\n" % len(body)
            elif is_old:  # its end is the connection's
                self.keep_alive = False
            else:
                self._chunked = True
                lines += b"transfer-encoding: chunked\r\n"
        if self._more or self._wire.is_ending:  # a body that nobody reads would be taken for a request
            self.keep_alive = False
        if not self.keep_alive:
            lines += CLOSE
        elif is_old:
            lines += KEEP
        return head_of(status, headers, lines)

    def _piece(self, body: bytes, more: bool) -> bytes:
        if self.scope["method"] == "HEAD":
            return b""
        if not self._chunked:
            return body
        chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        return chunk if more else chunk + LAST_CHUNK
