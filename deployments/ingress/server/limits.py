"""What a caller may take of the server before it has sent a request, and while it takes its answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of a server; seconds are those of its event loop, kept to within two seconds."""

    head_bytes: int = 65_536
    """Of a request's line and headers, beyond it 431; and of trailers, which are ignored, beyond it 400."""
    kept_bytes: int = 65_536
    """Of a body: after each so many bytes `body_s` begins anew."""
    waiting: int = 128
    """Requests of one connection that wait for the one before; then 503, and the connection ends: a request takes more
    memory than its bytes."""
    connections: int = 20_000
    """Open at a time; the next one is answered 503."""
    idle_s: float = 90.0
    """Between requests, and before the first."""
    head_s: float = 10.0
    """For a head, from its first byte; then 408."""
    body_s: float = 30.0
    """For a body, or every `kept_bytes` of it; then 408."""
    linger_s: float = 5.0
    """For a caller that still sends after its connection was refused: closed at once, it might lose its answer."""
    left_s: float = 5.0
    """For the answer to a caller that has closed its half of the connection, which may as well have gone."""
    stuck_s: float = 60.0
    """For a caller that does not read what waits to be sent."""
    sweep_s: float = 1.0
    """Between two looks at these."""
