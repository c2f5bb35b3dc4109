"""What a caller may take of the server before it has sent a request, and while it takes its answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of a server; seconds are those of its event loop."""

    head_bytes: int = 65_536
    """Of a request's line and headers, the bound that uvicorn has; beyond it 431."""
    kept_bytes: int = 65_536
    """Of a body that is gathered before anybody is called. What is longer, or of unknown length, is handed on as it is
    read, and so much of it waits here at most."""
    pipelined: int = 16
    """Whole requests of one connection that wait for the one before; then no more is read of it."""
    waiting: int = 128
    """The same, where more were read already; then 503, and the connection ends: a request is larger than its bytes."""
    connections: int = 20_000
    """Open at a time; who comes then is told 503."""
    idle_s: float = 90.0
    """Between requests, and before the first."""
    head_s: float = 10.0
    """For a head, from its first byte; then 408."""
    body_s: float = 30.0
    """For a body, or every `kept_bytes` of it; then 408."""
    linger_s: float = 5.0
    """For a caller that still sends what nobody reads: were it cut off at once, it might lose its answer."""
    stuck_s: float = 60.0
    """For a caller that takes nothing of what waits to be sent."""
