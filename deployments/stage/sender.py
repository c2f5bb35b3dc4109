"""The way out of a replica's connection: any thread sends, none waits."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Callable, Sequence

from deployments.frames import LENGTH_BYTES


class Sender:
    """Sends frames at once, from the device's thread too; what the socket does not take then, the event loop sends.

    To hand every part of a reply to the event loop costs the device's thread more than to send it: both want the
    interpreter's lock then (docs/performance.md).
    """

    def __init__(self, transport: asyncio.BaseTransport, loop: asyncio.AbstractEventLoop) -> None:
        """Of an open connection, whose transport sends nothing itself."""
        self._socket = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
        self._socket.setblocking(False)
        self._loop = loop
        self._lock = threading.Lock()
        self._backlog = bytearray()
        self._is_closed = False
        self._when_sent: Callable[[], None] | None = None

    def send(self, frame: bytes) -> None:
        """Send a frame; after the end nothing happens."""
        with self._lock:
            if self._is_closed:
                return
            parts = len(frame).to_bytes(LENGTH_BYTES, "big"), frame
            if self._backlog:  # the event loop is at it
                self._backlog += b"".join(parts)
                return
            sent = self._sent_of(parts)
            if sent < LENGTH_BYTES + len(frame):
                self._backlog += b"".join(parts)
                del self._backlog[:sent]
                self._loop.call_soon_threadsafe(self._watch)

    def when_sent(self, then: Callable[[], None]) -> None:
        """Call this once everything is sent; on the event loop."""
        with self._lock:
            if self._backlog:
                self._when_sent = then
                return
        then()

    def close(self) -> None:
        """The connection has ended; on the event loop."""
        with self._lock:
            self._is_closed = True
            self._loop.remove_writer(self._socket.fileno())
            self._socket.close()

    def _sent_of(self, parts: Sequence[bytes | bytearray]) -> int:
        """Send what the socket takes now; how many bytes that were."""
        try:
            return self._socket.sendmsg(parts)
        except BlockingIOError:
            return 0
        except OSError:  # the connection is gone, which the event loop is told too: it ends the calls
            return sum(map(len, parts))

    def _watch(self) -> None:
        with self._lock:
            if not self._is_closed:
                self._loop.add_writer(self._socket.fileno(), self._go_on)

    def _go_on(self) -> None:
        with self._lock:
            del self._backlog[: self._sent_of([self._backlog])]
            if self._backlog:
                return
            self._loop.remove_writer(self._socket.fileno())
        if self._when_sent is not None:
            self._when_sent()
