"""Frames over a connection: four bytes of length, then as many of content."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

LENGTH_BYTES = 4
LONGEST = 1 << 30
"""Bytes; a frame that claims more is noise, and ends the connection."""
SHORT_BYTES = 1 << 15
"""Received at a time. What a frame has beyond them is received into memory of its own: hidden states of a batch of
images are a hundred times that, and an `asyncio.Protocol` would have them copied three times."""


class Frames(asyncio.BufferedProtocol):
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
        self._short = memoryview(bytearray(SHORT_BYTES))
        self._long: memoryview | None = None
        """The content of a long frame that is not whole yet; None while frames come into the short memory."""
        self._received = 0
        """Bytes in either."""
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

    def get_buffer(self, sizehint: int) -> memoryview:
        return (self._short if self._long is None else self._long)[self._received :]

    def buffer_updated(self, nbytes: int) -> None:
        self._received += nbytes
        if self._long is None:
            self._hear_short()
        elif self._received == len(self._long):
            frame, self._long, self._received = self._long, None, 0
            self._hear(frame)

    def _hear_short(self) -> None:
        received, start = self._short[: self._received], 0
        while self._is_open and len(received) - start >= LENGTH_BYTES:
            length = int.from_bytes(received[start : start + LENGTH_BYTES], "big")
            content = received[start + LENGTH_BYTES :][:length]
            if length > self.longest:
                self.abort()
            elif len(content) == length:
                self._hear(memoryview(bytes(content)))
                start += LENGTH_BYTES + length
            else:
                break
        self._keep(received[start:] if self._is_open else received[:0])

    def _keep(self, begun: memoryview) -> None:
        """What has come of a frame that is not whole, its length first as far as there is one."""
        whole = LENGTH_BYTES + int.from_bytes(begun[:LENGTH_BYTES], "big")
        if len(begun) >= LENGTH_BYTES and whole > len(self._short):
            self._long = memoryview(bytearray(whole - LENGTH_BYTES))
            self._received = len(begun) - LENGTH_BYTES
            self._long[: self._received] = begun[LENGTH_BYTES:]
        else:
            self._received = len(begun)
            self._short[: self._received] = begun

    def _hear(self, frame: memoryview) -> None:
        if self._is_open:
            self._on_frame(frame.toreadonly())

    @property
    def _is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()
