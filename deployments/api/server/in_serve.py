"""Runs Offramp's HTTP server in the place of Serve's: Serve passes the port, watches the server and ends it.

Serve 2.60 has no setting for this. It starts the server of an ingress replica once the application is built.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from ray.serve.config import HTTPOptions
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from deployments.api.server.server import BACKLOG, HttpServer, Lane, Limits
from deployments.local_ray.private import with_middlewares


async def start_in_serve(
    lane: Lane,
    serves_own: Any,
    app: Any,
    http_options: HTTPOptions,
    *,
    event_loop: asyncio.AbstractEventLoop,
    enable_so_reuseport: bool = False,
) -> tuple[asyncio.Task[None], Any]:
    """Starts a server as Serve's function does: returns its task, and an object with `should_exit`.

    Paths outside the `lane` pass through Serve's layers, and so do all if requests have a timeout. TLS and a root path
    are left to Serve's own server. Raises RuntimeError, caused by an OSError, if the port is taken.
    """
    if http_options.ssl_certfile or http_options.root_path:
        options = {"event_loop": event_loop, "enable_so_reuseport": enable_so_reuseport}
        started: tuple[asyncio.Task[None], Any] = await serves_own(app, http_options, **options)
        return started
    bound = _bound(http_options.host or "127.0.0.1", http_options.port, reuse_port=enable_so_reuseport)
    # Serve's server trusts the headers of a proxy on this machine, as uvicorn does by default.
    whole: Any = ProxyHeadersMiddleware(with_middlewares(app, http_options.middlewares), "127.0.0.1")
    server = HttpServer(
        whole,
        lane={} if http_options.request_timeout_s or http_options.middlewares else lane,
        limits=Limits(idle_s=http_options.keep_alive_timeout_s),
    )
    return event_loop.create_task(server.serve([bound])), server


def _bound(host: str, port: int, *, reuse_port: bool) -> socket.socket:
    family, is_ipv6 = (socket.AF_INET6, True) if ":" in host else (socket.AF_INET, False)
    options: dict[str, bool] = {"reuse_port": reuse_port, "dualstack_ipv6": is_ipv6}
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG, **options)
    except OSError as error:
        raise RuntimeError(f"Failed to bind to address '{host}:{port}'.") from error
