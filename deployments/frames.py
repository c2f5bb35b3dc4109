"""Frames over a connection: four bytes of length, then as many of content."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

LENGTH_BYTES = 4
LONGEST = 1 << 30
"""Bytes; a frame that claims more is noise, and ends the connection."""


class Frames(asyncio.Protocol):
    """Either end of a connection."""

    def __init__(
        self,
        on_frame: Callable[[memoryview], None],
        on_end: Callable[[], None],
        on_open: Callable[[asyncio.Transport], None] = lambda _: None,
        *,
        longest: int = LONGEST,
    ) -> None:
        """`on_frame` may keep what it gets; it and `on_end`, which comes once, are called on the event loop."""
        self.longest = longest
        self._on_frame = on_frame
        self._on_end = on_end
        self._on_open = on_open
        self._partial = bytearray()
        self._wanted = LENGTH_BYTES
        self._transport: asyncio.Transport | None = None

    def send(self, frame: bytes) -> None:
        """Send a frame; after the connection's end nothing happens."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.writelines((len(frame).to_bytes(LENGTH_BYTES, "big"), frame))

    def close(self) -> None:
        """End the connection after what was sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """End the connection at once."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has the methods, but not the class
        self._on_open(self._transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_end()

    def data_received(self, data: bytes | bytearray) -> None:
        if self._partial:
            self._partial += data
            if len(self._partial) < self._wanted:  # a long frame comes in hundreds of pieces
                return
            data, self._partial = self._partial, bytearray()
        assert self._transport is not None
        view, start = memoryview(data).toreadonly(), 0
        while not self._transport.is_closing():
            self._wanted = _wanted(view[start:])
            if self._wanted > LENGTH_BYTES + self.longest:
                self._transport.abort()
                return
            if len(data) - start < self._wanted:
                self._partial += view[start:]
                return
            self._on_frame(view[start + LENGTH_BYTES : start + self._wanted])
            start += self._wanted


def _wanted(begun: memoryview) -> int:
    """Bytes of the frame that begins with these, as far as they tell."""
    if len(begun) < LENGTH_BYTES:
        return LENGTH_BYTES
    return LENGTH_BYTES + int.from_bytes(begun[:LENGTH_BYTES], "big")
