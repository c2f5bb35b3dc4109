"""Who may pass into an ingress. Everything is behind the keys, where there are any, but what is listed as open."""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping
from dataclasses import dataclass

from deployments.access import AccessSettings
from deployments.ingress.access.key_ring import KeyRing
from deployments.ingress.access.rates import RateLimits, limit_of
from earlyexit.clock import Clock
from earlyexit.errors import UnauthorizedError

RPCS = "/inference.GRPCInferenceService/"
OPEN_PATHS = frozenset({"/v2/health/live", "/v2/health/ready", RPCS + "ServerLive", RPCS + "ServerReady"})
"""Probes have no key, over HTTP or gRPC."""
PAGES = ("/docs", "/dashboard")
"""These, and what is below them, a person opens: a browser then asks for the key itself, as a password."""
SAFE_METHODS = frozenset({"GET", "HEAD"})
"""Taken with a password. A browser sends it with whatever another site's page makes it ask for: so nothing else is."""
EVERYBODY = "everybody"
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
    """What settings ask for; None where everybody may send whatever he likes. Raises InputError for bad keys."""
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
