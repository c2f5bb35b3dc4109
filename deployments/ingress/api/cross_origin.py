"""Which other sites' pages may use the service in a browser."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware

SENT = ("Authorization", "Content-Type", "X-Request-ID", "Inference-Header-Content-Length")
READ = ("Retry-After", "X-Request-ID", "Inference-Header-Content-Length")
REMEMBERED_S = 600


def cross_origin(origins: Sequence[str]) -> Middleware:
    """Answers a browser's question beforehand, which carries no key, and names the origins in every answer.

    Without credentials: a page of another site sends a key itself, never a password that the browser remembers.
    """
    return Middleware(
        CORSMiddleware,
        allow_origins=list(origins),
        allow_methods=["GET", "POST"],
        allow_headers=list(SENT),
        expose_headers=list(READ),
        max_age=REMEMBERED_S,
    )
