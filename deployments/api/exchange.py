"""Requests and responses over HTTP: bodies within limits, errors of each protocol, negotiation, compression, events."""

from __future__ import annotations

import asyncio
import gzip
import math
import zlib
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial

from pydantic_core import to_json
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.api.operations import (
    EVENTS,
    JSON,
    MAX_DIGITS,
    OPENAI_CODES,
    BodyT,
    OpenAiError,
    T,
    V2Error,
    error_type_of,
    new_id,
    parse_body,
)
from earlyexit.errors import (
    InputError,
    MethodNotAllowedError,
    OfframpError,
    OverloadedError,
    PayloadTooLargeError,
    RetryableError,
    UnauthorizedError,
    raising,
)

COMPRESSIONS = (b"gzip", b"x-gzip", b"deflate")
ANY_WINDOW = 47
"""zlib's `wbits` for the formats of gzip and of deflate (RFC 9110, section 8.4.1), which it tells apart."""
LARGE_COMPRESSED_BYTES = 1000
"""Larger bodies are decompressed in a thread, because that may take more than a millisecond."""
LARGE_BYTES = 500_000
"""Larger bodies are parsed and compressed in a thread (measured: short texts take up to 0.05 s, and gzip 1 to 3 ms)."""


async def run(work: Callable[[], T], *, in_thread: bool) -> T:
    """Returns the result of `work`; in a thread, it does not delay other requests."""
    return await asyncio.to_thread(work) if in_thread else work()


class RequestBodies:
    """Limits the size of a body, and the memory of the bodies whose requests are not answered yet."""

    def __init__(self, max_bytes: int, max_held_bytes: int) -> None:
        """`max_bytes` limits one body, `max_held_bytes` all bodies; one body of the largest size is always accepted."""
        self.max_bytes = max_bytes
        self._max_held_bytes = max(max_held_bytes, max_bytes)
        self.held_bytes = 0

    def check(self, num_bytes: int, what: str = "body") -> None:
        """Raises PayloadTooLargeError for a body of too many bytes."""
        if num_bytes > self.max_bytes:
            raise PayloadTooLargeError(f"the {what} is larger than {self.max_bytes} bytes")

    def hold(self, num_bytes: int) -> int:
        """Adds to `held_bytes` and returns the number, which the caller subtracts later. Raises OverloadedError."""
        if self.held_bytes + num_bytes > self._max_held_bytes:
            limit = self._max_held_bytes
            raise OverloadedError(f"requests in progress hold {self.held_bytes} bytes; the limit is {limit}")
        self.held_bytes += num_bytes
        return num_bytes


class UnsupportedMediaTypeError(InputError, http_status=415):
    """A body has a content type or a content encoding that is not supported. The message lists the supported ones."""


def first_header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> str | None:
    """Returns the first header of a name, which is in lower case; None if there is none."""
    for key, value in headers:
        if key == name:
            return str(value, "latin-1")
    return None


class HttpRequest(Request):
    """A request over HTTP."""

    def __init__(self, scope: Scope, receive: Receive, bodies: RequestBodies) -> None:
        super().__init__(scope, receive)
        self._bodies = bodies
        self._held_bytes = 0
        """Bytes of the body that are held in memory."""
        self.late_status: int | None = None
        """The status to count for a stream that failed after its headers; None if it did not fail."""

    @cached_property
    def id(self) -> str:
        """The request's id: the caller's, or a new one. The HTTP server adds it to the response."""
        return first_header(self.scope["headers"], b"x-request-id") or new_id()

    @property
    def path(self) -> str:
        """The path below the service's prefix."""
        path: str = self.scope["path"]
        return path.removeprefix(self.scope.get("root_path", ""))

    @property
    def target(self) -> str:
        """The method and the path as it was sent, which has no line breaks."""
        return f"{self.method} {self.scope['raw_path'].decode('latin-1')}"

    async def parsed(self, kind: type[BodyT], empty: bytes = b"") -> BodyT:
        """Returns the validated body; raises InputError. `empty` replaces an empty body."""
        return parse_body(kind, await self.body() or empty)

    async def body(self) -> bytes:
        """Returns the decompressed body, which counts as held until `release`.

        Raises PayloadTooLargeError, UnsupportedMediaTypeError, InputError, and OverloadedError if too much is held.
        """
        encodings = list[bytes]()
        for name, value in self.scope["headers"]:  # checked before the body is read
            if name == b"content-length":
                self._bodies.check(int(value[:MAX_DIGITS]))
            if name == b"content-encoding" and value.lower() != b"identity":
                encodings.append(value.lower())
        if encodings and (len(encodings) > 1 or encodings[0] not in COMPRESSIONS):
            text = b", ".join(encodings)[:80].decode("latin-1")
            raise UnsupportedMediaTypeError(f"content-encoding must be gzip, deflate or identity (got {text!r})")
        body = await self._read()
        if not encodings:
            return body
        content = await run(partial(self._decompress, body), in_thread=len(body) >= LARGE_COMPRESSED_BYTES)
        self._held_bytes += self._bodies.hold(len(content) - len(body))
        return content

    def release(self) -> None:
        """Stops counting the body as held, because the request is answered."""
        self._bodies.held_bytes -= self._held_bytes
        self._held_bytes = 0

    async def _read(self) -> bytes:
        parts = bytearray()
        while True:  # Starlette's `stream` is a generator around this, which takes twice the time
            message = await self.receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnect
            part: bytes = message.get("body", b"")
            self._held_bytes += self._bodies.hold(len(part))
            self._bodies.check(len(parts) + len(part))
            is_last = not message.get("more_body", False)
            if is_last and not parts:
                return part
            parts += part
            if is_last:
                return bytes(parts)

    def _decompress(self, body: bytes) -> bytes:
        decompressor = zlib.decompressobj(ANY_WINDOW)
        with raising(InputError, "the body is not gzip or deflate", zlib.error):
            content = decompressor.decompress(body, self._bodies.max_bytes + 1)
        self._bodies.check(len(content))
        if not decompressor.eof:
            raise InputError("the compressed body is cut off")
        if decompressor.unused_data:
            raise InputError("bytes follow the end of the compressed body")
        return content


# Responses

Handler = Callable[[HttpRequest], Awaitable[object]]
"""Returns a response, or the content of a JSON response."""
SERVER_ERROR = 500


def json_response(content: object, status: int = 200) -> Response:
    """Returns a JSON response. JSON has no infinite numbers, which become null."""
    return Response(to_json(content, inf_nan_mode="null"), status_code=status, media_type=JSON)


# Errors


def error_response(path: str, request_id: str, error: OfframpError) -> Response:
    """Returns an error in the format of the path's protocol."""
    error_type = error_type_of(path)
    if error_type is V2Error:
        body: dict[str, object] = {"error": str(error)}
    elif error_type is OpenAiError:
        body = openai_error(error)
    else:
        body = {"error": {"kind": error.kind, "message": str(error)}, "request_id": request_id}
    response = json_response(body, status=error.http_status)
    if isinstance(error, MethodNotAllowedError):
        response.headers["allow"] = ", ".join(error.allowed)
    if isinstance(error, UnauthorizedError):
        response.headers["www-authenticate"] = error.scheme
    if isinstance(error, RetryableError):
        response.headers["retry-after"] = retry_after_header(error)
    return response


def openai_error(error: OfframpError) -> dict[str, object]:
    """Returns an error in OpenAI's format; its code is our `kind` if OpenAI has no code for it."""
    type_ = "server_error" if error.http_status >= SERVER_ERROR else "invalid_request_error"
    param = error.param if isinstance(error, InputError) else None
    code = OPENAI_CODES.get(error.kind, error.kind)
    return {"error": {"message": str(error), "type": type_, "param": param, "code": code}}


def retry_after_header(error: RetryableError) -> str:
    """Returns the value of Retry-After in whole seconds."""
    return str(max(1, math.ceil(error.retry_after_s)))


# Content negotiation (RFC 9110, section 12.5)

ANYTHING = "*/*"
MIN_COMPRESSED_BYTES = 1_500
"""Smaller answers are not compressed, because they fit into one packet."""
GZIP_LEVEL = 1
"""zlib's level (measured: level 6 takes four times as long as level 1 for a class map in JSON)."""


def preferred_type(accept: str, offered: Sequence[str]) -> str | None:
    """Returns the offered content type that the caller prefers; None if it accepts none.

    A type has the weight of the most specific range that includes it. The first of equal types is returned.
    """
    weights = [_weight(accept, each, f"{each.partition('/')[0]}/*", ANYTHING) for each in offered]
    best = max(weights)
    return offered[weights.index(best)] if best > 0 else None


def _weight(header: str, *names: str) -> float:
    """Returns the weight that a header gives to the first of the names that it lists; 0 if it lists none."""
    weights: dict[str, float] = {}
    for part in header.split(","):
        name, *parameters = (each.strip().lower() for each in part.split(";"))
        with suppress(ValueError):
            weight = float(next((each.removeprefix("q=") for each in parameters if each.startswith("q=")), "1"))
            if name and 0 <= weight <= 1:
                weights[name] = weight
    return next((weights[name] for name in names if name in weights), 0.0)


async def compress(request: HttpRequest, response: Response) -> None:
    """Compresses a large response if the caller accepts gzip.

    Images, which are compressed already, and responses with an ETag stay unchanged.
    """
    body, headers = bytes(response.body), response.headers
    if "etag" in headers or headers.get("content-type", "").startswith("image/"):
        return
    headers.add_vary_header("Accept-Encoding")
    if not _weight(", ".join(request.headers.getlist("accept-encoding")), "gzip", "*"):
        return
    response.body = await run(partial(gzip.compress, body, GZIP_LEVEL, mtime=0), in_thread=len(body) >= LARGE_BYTES)
    headers["content-encoding"] = "gzip"
    headers["content-length"] = str(len(response.body))


# Server-sent events

EVENT_HEADERS = {"cache-control": "no-store, no-transform", "x-accel-buffering": "no"}
"""Headers that forbid proxies to buffer, compress or cache events."""


@contextmanager
def watching(receive: Receive, on_disconnect: Callable[[], None]) -> Iterator[None]:
    """Calls `on_disconnect` if the caller disconnects within the block. The request's body must have been read."""

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        on_disconnect()

    task = asyncio.get_running_loop().create_task(watch())
    try:
        yield
    finally:
        task.cancel()


class EventStream(Response):
    """A response that sends each event at once, and waits for slow readers.

    Starlette's streaming response does not notice on newer servers that the caller disconnects while nothing is sent.
    """

    media_type = EVENTS

    def __init__(self, events: AsyncIterable[bytes], on_end: Callable[[], None]) -> None:
        """`on_end`: called when the caller disconnects, and at the end."""
        super().__init__(headers=EVENT_HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._on_end = on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with watching(receive, self._on_end):
                await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
                async for event in self._events:
                    await send({"type": "http.response.body", "body": event, "more_body": True})
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._on_end()
