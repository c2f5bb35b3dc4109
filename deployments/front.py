"""Who stands before the ingresses of a service on one machine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

from deployments.haproxy import bound_haproxy
from deployments.listener import holding
from deployments.settings import ServeSettings
from earlyexit.errors import InputError

HttpFront = Literal["auto", "direct", "haproxy", "proxy"]
"""Nobody: callers reach the only ingress itself (`direct`); HAProxy, which has several, or Serve's own proxy; `auto`:
nobody where that is possible, else HAProxy."""


def front_of(asked: HttpFront, settings: ServeSettings, *, has_grpc: bool) -> HttpFront:
    """What `auto` stands for; raises InputError where callers cannot reach the ingress itself."""
    reasons = {
        f"there are {settings.ingress_replicas} ingresses": settings.ingress_replicas > 1,
        "it speaks gRPC": has_grpc,
        "further versions may be loaded": settings.repository.control == "explicit",
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if asked == "auto":
        return "direct" if reason is None else "haproxy"
    if asked == "direct" and reason is not None:
        raise InputError(f"somebody must stand before this service, because {reason}: front haproxy, or proxy")
    return asked


def switches_of(front: HttpFront) -> dict[str, str]:
    """Of Serve. Where nobody stands before the ingress Serve does not listen at all."""
    has_haproxy, serve_listens = front == "haproxy", front != "direct"
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": str(int(has_haproxy)),
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": str(int(serve_listens)),
    }


@contextmanager
def prepared(
    front: HttpFront, settings: ServeSettings, host: str, port: int, others: Sequence[int]
) -> Iterator[ServeSettings]:
    """The settings for this front, which has what it needs while this lasts; `others`: ports for callers beside `port`.

    Raises OfframpError where the port is taken, or HAProxy is missing.
    """
    if front == "direct":
        with holding(host, port) as listener:
            yield settings.model_copy(update={"listener": listener})
    elif front == "haproxy":
        with bound_haproxy(host, [port, *others]):
            yield settings
    else:
        yield settings
