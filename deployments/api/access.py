"""Which callers an ingress admits. With keys, every path needs one, except those listed as open."""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deployments.api.operations import OPEN_PATHS, PAGES
from deployments.keys import AccessSettings, Keys, read_keys
from earlyexit.clock import Clock
from earlyexit.errors import InputError, RateLimitError, UnauthorizedError

logger = logging.getLogger(f"ray.serve.{__name__}")

LOOK_EVERY_S = 1.0
"""A key that was taken out is refused after a second."""
Stamp = tuple[int, int, int] | None


class KeyRing:
    """The keys that are known now."""

    def __init__(self, access: AccessSettings, environment: Mapping[str, str] = os.environ) -> None:
        """Raises InputError where the settings' keys cannot be read."""
        self._access = access
        self._environment = environment
        self._stamp = self._stamp_now()
        keys = read_keys(access, environment)
        assert keys is not None, "a ring is made for settings that have keys"
        self.keys: Keys = keys

    async def watch(self) -> None:
        """Look after the file for ever; a variable never changes."""
        while self._access.keys_file is not None:
            await asyncio.sleep(LOOK_EVERY_S)
            await asyncio.to_thread(self.look)

    def look(self) -> None:
        """Read the file again if it changed. One that is wrong changes nothing: an error in the log says so, once."""
        stamp = self._stamp_now()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            keys = read_keys(self._access, self._environment)
        except InputError as error:
            logger.error("the API keys stay as they were: %s", error)
            return
        assert keys is not None
        self.keys = keys
        logger.warning("API keys were read again: there are %d", len(keys))

    def _stamp_now(self) -> Stamp:
        """What changes when the file does; a file put in another's place has another inode."""
        try:
            found = os.stat(Path(self._access.keys_file)) if self._access.keys_file is not None else None
        except OSError:
            return None
        return None if found is None else (found.st_mtime_ns, found.st_size, found.st_ino)


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
    """A bucket per caller. A caller is the owner of a key, or all callers together where there are no keys."""

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


SAFE_METHODS = frozenset({"GET", "HEAD"})
"""Taken with a password. A browser sends it with whatever another site's page makes it ask for: so nothing else is."""
EVERYBODY = "all callers"
"""The one caller where there are no keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Knows callers by their keys, and holds them to their rate."""

    ring: KeyRing | None
    limits: RateLimits | None
    clock: Clock
    counts_inputs: bool
    """The rate is one of inputs, which are known only when a body has been read."""

    def admit(self, method: str, path: str, authorization: str | None) -> str:
        """The caller of a request to a path; raises UnauthorizedError, RateLimitError."""
        if path in OPEN_PATHS:
            return EVERYBODY
        caller = EVERYBODY if self.ring is None else self._caller(self.ring, method, path, authorization)
        if self.limits is not None and not self.counts_inputs:
            self.limits.take(caller, 1, self.clock.now_s())
        return caller

    def charge(self, caller: str, num_inputs: int) -> None:
        """Count a prediction's inputs; raises RateLimitError."""
        if self.limits is not None and self.counts_inputs:
            self.limits.take(caller, num_inputs, self.clock.now_s())

    def _caller(self, ring: KeyRing, method: str, path: str, authorization: str | None) -> str:
        token = None if authorization is None else _token(method, authorization)
        caller = None if token is None else ring.keys.owner(token)
        if caller is not None:
            return caller
        problem = "no API key was sent" if authorization is None else "the API key is not known here"
        scheme = 'Basic realm="offramp", charset="UTF-8"' if _is_page(path) else "Bearer"
        raise UnauthorizedError(f"{problem}; send the header `Authorization: Bearer <key>`", scheme=scheme)


def gate_of(
    access: AccessSettings | None, clock: Clock, num_ingresses: int, environment: Mapping[str, str] = os.environ
) -> Gate | None:
    """What the settings ask for; None where there are neither keys nor rates. Raises InputError for bad keys."""
    if access is None:
        return None
    limit = limit_of(access, num_ingresses)
    if not access.has_keys and limit is None:
        return None
    return Gate(
        ring=KeyRing(access, environment) if access.has_keys else None,
        limits=None if limit is None else RateLimits(limit, access.rate_of),
        clock=clock,
        counts_inputs=access.rate_of == "inputs",
    )


def _is_page(path: str) -> bool:
    return any(path == page or path.startswith(page + "/") for page in PAGES)


def _token(method: str, authorization: str) -> str | None:
    """The key in an Authorization header."""
    scheme, _, value = authorization.partition(" ")
    match scheme.lower():
        case "bearer":
            return value.strip()
        case "basic" if method in SAFE_METHODS:
            return _password(value)
    return None


def _password(value: str) -> str | None:
    """Of HTTP Basic; whatever user name a person typed is as good as any."""
    try:
        return base64.b64decode(value, validate=True).decode("utf-8").partition(":")[2]
    except (binascii.Error, ValueError):
        return None
