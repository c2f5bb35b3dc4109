"""ASGI applications, and what is served by which."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

from deployments.ingress.server.limits import Limits

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
"""An ASGI application."""


@dataclass(frozen=True, slots=True)
class LanePath:
    """A path that goes straight to its application, past everything that stands before the others."""

    app: App
    scope: Mapping[str, Any]
    """What routing would have found: `path`, `root_path`, `path_params`."""


Lane = Mapping[bytes, LanePath]
"""By path as it is sent; POST only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What a server's connections serve."""

    app: App
    """Answers what `lane` does not have."""
    lane: Lane
    limits: Limits = field(default_factory=Limits)
    outright: bool
    """Whether `app` is ours too. Else it is Serve's, which gives requests their ids and is told, not cancelled, when a
    caller leaves."""
