"""Admits callers by API keys and rates. With keys, all paths need one, except those listed as open."""

from __future__ import annotations

import asyncio
import base64
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from deployments.api.operations import OPEN_PATHS, PAGES
from deployments.keys import AccessSettings, Keys, read_keys
from earlyexit.clock import Clock
from earlyexit.errors import InputError, RateLimitError, UnauthorizedError

logger = logging.getLogger(f"ray.serve.{__name__}")

LOOK_EVERY_S = 1.0
"""Interval in seconds: a removed key is refused after at most so long."""


class KeyRing:
    """The present API keys."""

    def __init__(self, access: AccessSettings, environment: Mapping[str, str] = os.environ) -> None:
        """Raises InputError if the settings' keys cannot be read."""
        self._access = access
        self._environment = environment
        self.keys = self._read()
        self._problem = ""
        """What is wrong with the file now."""

    async def watch(self) -> None:
        """Watches the file without an end; returns at once for keys in an environment variable."""
        while self._access.keys_file is not None:
            await asyncio.sleep(LOOK_EVERY_S)
            await asyncio.to_thread(self.look)

    def look(self) -> None:
        """Reads the keys again; for a bad file they stay, and one error is logged."""
        problem = ""
        try:
            keys = self._read()
            if keys != self.keys:
                self.keys = keys
                logger.warning("API keys were read again: there are %d", len(keys))
        except InputError as error:
            problem = str(error)
            if problem != self._problem:
                logger.error("the API keys stay as they were: %s", problem)
        self._problem = problem

    def _read(self) -> Keys:
        keys = read_keys(self._access, self._environment)
        assert keys is not None, "a ring is made for settings that have keys"
        return keys


@dataclass(slots=True)
class RateLimits:
    """A token bucket for each caller: the owner of a key, or all callers together if there are no keys."""

    rate_per_s: float
    burst: float
    """The most tokens of a bucket."""
    counted: Literal["requests", "inputs"] = "requests"
    _levels: dict[str, tuple[float, float]] = field(default_factory=dict, init=False)
    """By caller, the level of the bucket, and when it was so."""

    def take(self, caller: str, tokens: int, now_s: float) -> None:
        """Takes tokens of a caller's bucket, or none of them; raises RateLimitError with the time to wait.

        More than a burst at once is taken of a full bucket, which is then in debt: otherwise it would never be taken.
        """
        level, seen_s = self._levels.get(caller, (self.burst, now_s))
        level = min(self.burst, level + (now_s - seen_s) * self.rate_per_s)
        missing = min(tokens, self.burst) - level
        self._levels[caller] = (level if missing > 0 else level - tokens, now_s)
        if missing > 0:
            raise RateLimitError(
                f"too many {self.counted}: {self.rate_per_s:g} per second are taken, {self.burst:g} at once",
                retry_after_s=missing / self.rate_per_s,
            )


def rate_limits(access: AccessSettings, num_ingresses: int) -> RateLimits | None:
    """Returns the limits of one ingress: its share, since ingresses do not communicate and requests are spread evenly.

    Without a burst, one second's requests may come at once, and in any case one.
    """
    if access.rate_per_s is None:
        return None
    burst = max(1.0, access.rate_per_s) if access.burst is None else access.burst
    return RateLimits(access.rate_per_s / num_ingresses, max(1.0, burst / num_ingresses), access.rate_of)


SAFE_METHODS = frozenset({"GET", "HEAD"})
"""Methods allowed with a password, which browsers also send with requests that pages of other sites cause."""
ALL_CALLERS = "all callers"
"""The only caller if there are no keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Identifies callers by their keys, and limits their rates."""

    ring: KeyRing | None
    limits: RateLimits | None
    clock: Clock

    def admit(self, method: str, path: str, authorization: str | None) -> str:
        """Returns the caller of a request to a path; raises UnauthorizedError, RateLimitError."""
        if path in OPEN_PATHS:
            return ALL_CALLERS
        caller = ALL_CALLERS if self.ring is None else self._caller(self.ring, method, path, authorization)
        if self.limits is not None and self.limits.counted == "requests":
            self.limits.take(caller, 1, self.clock.now_s())
        return caller

    def charge(self, caller: str, num_inputs: int) -> None:
        """Counts the inputs of a prediction, which are known after its body was read; raises RateLimitError."""
        if self.limits is not None and self.limits.counted == "inputs":
            self.limits.take(caller, num_inputs, self.clock.now_s())

    def _caller(self, ring: KeyRing, method: str, path: str, authorization: str | None) -> str:
        token = None if authorization is None else _token(method, authorization)
        caller = None if token is None else ring.keys.owner(token)
        if caller is not None:
            return caller
        problem = "no API key was sent" if authorization is None else "the API key is not known here"
        is_page = any(path == page or path.startswith(page + "/") for page in PAGES)
        scheme = 'Basic realm="offramp", charset="UTF-8"' if is_page else "Bearer"
        raise UnauthorizedError(f"{problem}; send the header `Authorization: Bearer <key>`", scheme=scheme)


def gate_of(access: AccessSettings | None, clock: Clock, num_ingresses: int) -> Gate | None:
    """Returns the gate that the settings ask for; None without keys and rates. Raises InputError for bad keys."""
    limits = None if access is None else rate_limits(access, num_ingresses)
    if access is None or (limits is None and not access.has_keys):
        return None
    return Gate(ring=KeyRing(access) if access.has_keys else None, limits=limits, clock=clock)


def _token(method: str, authorization: str) -> str | None:
    """Returns the key in an Authorization header; None if there is none."""
    scheme, _, value = authorization.partition(" ")
    match scheme.lower():
        case "bearer":
            return value.strip()
        case "basic" if method in SAFE_METHODS:
            with suppress(ValueError):  # the password is the key, and any user name is accepted
                return base64.b64decode(value, validate=True).decode("utf-8").partition(":")[2]
    return None
