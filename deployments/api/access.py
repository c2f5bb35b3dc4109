"""Access control by API keys and rate limits. If there are keys, all paths except `OPEN_PATHS` need one."""

from __future__ import annotations

import asyncio
import base64
import logging
import math
import os
from collections.abc import Mapping
from contextlib import suppress

from deployments.api.operations import OPEN_PATHS, PAGES
from deployments.keys import AccessSettings, Keys, read_keys
from earlyexit.clock import Clock
from earlyexit.errors import InputError, RateLimitError, UnauthorizedError

logger = logging.getLogger(f"ray.serve.{__name__}")

RELOAD_S = 1.0
"""Interval between reads of the key file, in seconds. A removed key is refused after at most this time."""
SAFE_METHODS = frozenset({"GET", "HEAD"})
"""Methods that may authenticate by password. Browsers also send passwords with requests of other sites' pages."""
ALL_CALLERS = "all callers"
"""The only caller of a service without keys."""


class Gate:
    """Identifies callers by their keys, and limits their request rates with one token bucket per caller.

    A caller is the owner of a key; without keys, all callers share a bucket.
    """

    def __init__(
        self, access: AccessSettings, clock: Clock, num_ingresses: int = 1, environment: Mapping[str, str] = os.environ
    ) -> None:
        """An ingress has its share of rate and burst, because requests are spread evenly over the ingresses.

        Raises InputError if the settings' keys cannot be read.
        """
        self._access = access
        self._clock = clock
        self._environment = environment
        self.keys = read_keys(access, environment)
        """The API keys in force; None if no key is needed."""
        self._problem = ""
        """The error of the last read; empty if it succeeded."""
        rate_per_s = access.rate_per_s or math.inf
        self.rate_per_s = rate_per_s / num_ingresses
        self.burst = max(1.0, (access.burst or max(1.0, rate_per_s)) / num_ingresses)
        """The capacity of a bucket: by default the requests of one second, and at least one."""
        self._levels: dict[str, tuple[float, float]] = {}
        """The level of each caller's bucket, and the time of that level."""

    async def watch(self) -> None:
        """Reloads the key file again and again; returns at once if there is none."""
        while self._access.keys_file is not None:
            await asyncio.sleep(RELOAD_S)
            await asyncio.to_thread(self.reload)

    def reload(self) -> None:
        """Reads the keys again. If the file is invalid, the old keys stay in force, and an error is logged once."""
        problem = ""
        try:
            keys = read_keys(self._access, self._environment)
            if keys != self.keys:
                self.keys = keys
                logger.warning("API keys were reloaded: there are %d", len(keys or ()))
        except InputError as error:
            problem = str(error)
            if problem != self._problem:
                logger.error("the API keys were not reloaded: %s", problem)
        self._problem = problem

    def admit(self, method: str, path: str, authorization: str | None) -> None:
        """Raises UnauthorizedError for a request without a key, and RateLimitError with the waiting time."""
        if path in OPEN_PATHS:
            return
        caller = ALL_CALLERS if self.keys is None else self._caller(self.keys, method, path, authorization)
        if self._access.rate_per_s is None:
            return
        now_s = self._clock.now_s()
        level, updated_s = self._levels.get(caller, (self.burst, now_s))
        level = min(self.burst, level + (now_s - updated_s) * self.rate_per_s)
        self._levels[caller] = (level if level < 1 else level - 1, now_s)
        if level < 1:
            raise RateLimitError(
                f"too many requests: the limit is {self.rate_per_s:g} per second, and {self.burst:g} at once",
                retry_after_s=(1 - level) / self.rate_per_s,
            )

    def _caller(self, keys: Keys, method: str, path: str, authorization: str | None) -> str:
        caller = keys.owner(_token(method, authorization or ""))
        if caller is not None:
            return caller
        problem = "no API key was sent" if authorization is None else "the API key is unknown"
        is_page = any(path == page or path.startswith(page + "/") for page in PAGES)
        scheme = 'Basic realm="offramp", charset="UTF-8"' if is_page else "Bearer"
        text = f"{problem}; send the header `Authorization: Bearer <key>`; commands: set OFFRAMP_API_KEY"
        raise UnauthorizedError(text, scheme=scheme)


def _token(method: str, authorization: str) -> str:
    """Returns the key in an Authorization header; empty if there is none."""
    scheme, _, value = authorization.partition(" ")
    match scheme.lower():
        case "bearer":
            return value.strip()
        case "basic" if method in SAFE_METHODS:
            with suppress(ValueError):  # the password is the key; the user name is ignored
                return base64.b64decode(value, validate=True).decode("utf-8").partition(":")[2]
    return ""
