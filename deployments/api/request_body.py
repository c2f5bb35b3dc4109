"""Reads and decompresses request bodies, with bounds on each body and on all together."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.requests import ClientDisconnect, Request
from starlette.types import Scope

from earlyexit.errors import InputError, OverloadedError, PayloadTooLargeError

MAX_DIGITS = 12
"""Of a length: Python refuses to parse numbers with thousands of digits."""
HELD = "offramp.held"
"""Key of an ASGI scope: bytes of its body that count as held."""
RETRY_AFTER_S = 1.0
GZIPS = (b"gzip", b"x-gzip")
WITH_HEADER = 31
"""zlib's window for the format of gzip."""
LARGE_GZIP_BYTES = 1000
"""Larger bodies are decompressed in a thread, since that may take more than a millisecond."""


class Bodies:
    """The bodies that an ingress holds: of requests that arrive, and of requests without an answer."""

    def __init__(self, max_bytes: int, max_held_bytes: int) -> None:
        """`max_bytes`: of one body; `max_held_bytes`: of all, but one body of the largest size is always accepted."""
        self.max_bytes = max_bytes
        self._max_held_bytes = max(max_held_bytes, max_bytes)
        self.held_bytes = 0

    async def read(self, request: Request) -> bytes:
        """Returns the whole body, decompressed; it counts as held until `release`.

        Raises PayloadTooLargeError, OverloadedError if too much is held, and InputError for encodings other than gzip.
        """
        is_gzip = False
        for name, value in request.scope["headers"]:  # a body that is refused is not read
            if name == b"content-length" and (len(value) > MAX_DIGITS or int(value) > self.max_bytes):
                raise self._too_large()
            if name == b"content-encoding" and value.lower() != b"identity":
                if value.lower() not in GZIPS or is_gzip:
                    raise InputError(f"content-encoding {value[:80].decode('latin-1')!r}; gzip and identity are taken")
                is_gzip = True
        body = await self._read(request)
        if not is_gzip:
            return body
        if len(body) < LARGE_GZIP_BYTES:
            whole = self._decompressed(body)
        else:
            whole = await asyncio.to_thread(self._decompressed, body)
        self._hold(request.scope, len(whole) - len(body))
        return whole

    async def _read(self, request: Request) -> bytes:
        parts: bytearray | None = None
        while True:  # Starlette's stream is a generator around this, at twice the cost
            message = await request.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            part: bytes = message.get("body", b"")
            self._hold(request.scope, len(part))
            if parts is None and not message.get("more_body", False):
                if len(part) > self.max_bytes:
                    raise self._too_large()
                return part
            parts = bytearray() if parts is None else parts
            parts += part
            if len(parts) > self.max_bytes:
                raise self._too_large()
            if not message.get("more_body", False):
                return bytes(parts)

    def release(self, scope: Scope) -> None:
        """Releases the body of a request that is over."""
        self.held_bytes -= scope.pop(HELD, 0)

    @contextmanager
    def holding(self, num_bytes: int) -> Iterator[None]:
        """Counts a message that was read elsewhere as held; raises what `read` raises."""
        if num_bytes > self.max_bytes:
            raise PayloadTooLargeError(f"the message is larger than {self.max_bytes} bytes")
        scope: Scope = {}
        self._hold(scope, num_bytes)
        try:
            yield
        finally:
            self.release(scope)

    def _hold(self, scope: Scope, num_bytes: int) -> None:
        if self.held_bytes + num_bytes > self._max_held_bytes:
            message = f"bodies of {self.held_bytes} bytes are held here, at most {self._max_held_bytes} are"
            raise OverloadedError(message, retry_after_s=RETRY_AFTER_S)
        self.held_bytes += num_bytes
        scope[HELD] = scope.get(HELD, 0) + num_bytes

    def _decompressed(self, body: bytes) -> bytes:
        gzip = zlib.decompressobj(WITH_HEADER)
        try:
            whole = gzip.decompress(body, self.max_bytes + 1)
        except zlib.error as error:
            raise InputError(f"the body is not gzip: {error}") from error
        if len(whole) > self.max_bytes:
            raise self._too_large()
        if not gzip.eof or gzip.unused_data:
            raise InputError("the gzip body is cut off" if not gzip.eof else "bytes follow the end of the gzip body")
        return whole

    def _too_large(self) -> PayloadTooLargeError:
        return PayloadTooLargeError(f"the body is larger than {self.max_bytes} bytes")
