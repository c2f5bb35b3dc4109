"""How much each caller may send: token buckets, on a clock that is passed in."""

from __future__ import annotations

from dataclasses import dataclass

from deployments.access import AccessSettings
from earlyexit.errors import RateLimitError


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A rate for ever, and what may come at once."""

    rate_per_s: float
    burst: float


def limit_of(access: AccessSettings, num_ingresses: int) -> Limit | None:
    """One ingress's part: they do not speak with each other, and whatever is before them spreads requests evenly."""
    if access.rate_per_s is None:
        return None
    burst = max(1.0, access.rate_per_s) if access.burst is None else access.burst
    return Limit(rate_per_s=access.rate_per_s / num_ingresses, burst=max(1.0, burst / num_ingresses))


class TokenBucket:
    """Fills at a rate up to a burst."""

    def __init__(self, limit: Limit, now_s: float) -> None:
        self._limit = limit
        self._level = limit.burst
        self._seen_s = now_s

    def take(self, tokens: float, now_s: float) -> float:
        """Take tokens and say 0, or take none and say in how many seconds they will be there.

        More than a burst at once is taken of a full bucket, which then is in debt: else it would never be taken.
        """
        limit = self._limit
        self._level = min(limit.burst, self._level + (now_s - self._seen_s) * limit.rate_per_s)
        self._seen_s = now_s
        missing = min(tokens, limit.burst) - self._level
        if missing > 0:
            return missing / limit.rate_per_s
        self._level -= tokens
        return 0.0


class RateLimits:
    """A bucket per caller. Callers are owners of keys, or everybody: there are never many."""

    def __init__(self, limit: Limit, counted: str) -> None:
        """`counted`: what a token is, for the refusal's words."""
        self._limit = limit
        self._counted = counted
        self._buckets: dict[str, TokenBucket] = {}

    def take(self, caller: str, tokens: int, now_s: float) -> None:
        """Raises RateLimitError, with the time to wait, for what is too much."""
        bucket = self._buckets.get(caller)
        if bucket is None:
            bucket = self._buckets[caller] = TokenBucket(self._limit, now_s)
        wait_s = bucket.take(tokens, now_s)
        if wait_s > 0:
            limit = self._limit
            raise RateLimitError(
                f"too many {self._counted}: {limit.rate_per_s:g} per second are taken, {limit.burst:g} at once",
                retry_after_s=wait_s,
            )
