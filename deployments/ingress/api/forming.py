"""Large answers leave the event loop while they are formed and compressed, which takes milliseconds."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Callable, Sequence
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from deployments.ingress.api.negotiation import GZIP, LEAST_BYTES, takes_gzip
from earlyexit.wire import Answer, Numbers

T = TypeVar("T")
LARGE_ANSWERS_BYTES = 200_000
"""Of a request's answers together: as JSON, five class maps of 180 x 240 take 2 to 4 ms, as PNG files 1 to 2."""
LARGE_BODY_BYTES = 500_000
"""Above, compressing takes 1 to 3 ms."""
LEVEL = 1
"""Of zlib's: a class map of CamVid in JSON comes to 4.4 % in 0.15 ms; at level 6 to 2.5 % in 0.58 ms."""


async def formed(make: Callable[[], T], answers: Sequence[Answer]) -> T:
    """What is made of answers; in a thread where they are large."""
    size = sum(len(answer.value.raw) for answer in answers if isinstance(answer.value, Numbers))
    return make() if size < LARGE_ANSWERS_BYTES else await asyncio.to_thread(make)


async def compressed(request: Request, response: Response) -> Response:
    """The same response, as gzip where its caller takes that and it is worth it.

    Streams are left alone, and pictures, which are compressed, and what is known by its ETag.
    """
    body = getattr(response, "body", b"")
    if len(body) < LEAST_BYTES:  # as nearly all are
        return response
    headers = response.headers
    if "etag" in headers or headers.get("content-type", "").startswith("image/"):
        return response
    headers.add_vary_header("Accept-Encoding")
    if not takes_gzip(", ".join(request.headers.getlist("accept-encoding"))):
        return response
    response.body = _gzip(body) if len(body) < LARGE_BODY_BYTES else await asyncio.to_thread(_gzip, body)
    headers["content-encoding"] = GZIP
    headers["content-length"] = str(len(response.body))
    return response


def _gzip(body: bytes) -> bytes:
    return gzip.compress(body, LEVEL, mtime=0)
