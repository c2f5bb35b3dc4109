"""What a caller wants generated, whichever route asked."""

from __future__ import annotations

from dataclasses import dataclass, field

from earlyexit.generation.sampling import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateRequest:
    """One sequence."""

    prompt: tuple[int, ...]
    """Tokens."""
    max_tokens: int
    """That are said at most; the model's own length ends it earlier."""
    stops: tuple[str, ...] = ()
    """Texts that end it, which are not said."""
    sampling: Sampling = field(default_factory=Sampling)
    ignores_ends: bool = False
    """Whether it goes on after a token that ends sequences, up to its length: for measurements."""
    timeout_s: float | None = None
    """For the whole sequence, from its arrival; None: only the service's limits on each token apply."""
    request_id: str = ""
    """For logs and traces."""
