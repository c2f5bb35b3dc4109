"""Our server in the place of Serve's: Serve gives it its port, watches it and ends it, as it does its own.

Serve 2.60 has no setting for that. `ray.serve._private.replica` starts the server of an ingress replica once the
application is built, by a function of its module, which is replaced in this process.
"""

from __future__ import annotations

import asyncio
import socket
from functools import partial
from typing import Any

from ray.serve._private import http_util, replica
from ray.serve.config import HTTPOptions
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from deployments.api.server.connection import Lane, Limits
from deployments.api.server.server import BACKLOG, HttpServer

THEIRS = http_util.start_asgi_http_server


def replace_server(lane: Lane) -> None:
    """From now on the replica's HTTP server is ours; what `lane` does not have goes through Serve's layers."""
    replica.start_asgi_http_server = partial(_start, lane)  # type: ignore[attr-defined] # imported there for its own use


async def _start(
    lane: Lane,
    app: Any,
    http_options: HTTPOptions,
    *,
    event_loop: asyncio.AbstractEventLoop,
    enable_so_reuseport: bool = False,
) -> tuple[asyncio.Task[None], Any]:
    """As Serve's function of this name does: a task that ends with the server, and what has its `should_exit`.

    Raises RuntimeError, caused by an OSError, where the port is taken. TLS and a root path are left to Serve's
    own server, and a timeout for all requests to its layers.
    """
    if http_options.ssl_certfile or http_options.root_path:
        return await THEIRS(app, http_options, event_loop=event_loop, enable_so_reuseport=enable_so_reuseport)
    bound = _bound(http_options.host or "127.0.0.1", http_options.port, reuse_port=enable_so_reuseport)
    layered: Any = http_util._apply_middlewares(app, http_options.middlewares)
    whole: Any = ProxyHeadersMiddleware(layered, "127.0.0.1")  # as uvicorn has it; its types are narrower
    server = HttpServer(
        whole,
        lane={} if http_options.request_timeout_s or http_options.middlewares else lane,
        limits=Limits(idle_s=http_options.keep_alive_timeout_s),
    )
    return event_loop.create_task(server.serve([bound])), server


def _bound(host: str, port: int, *, reuse_port: bool) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reuse_port:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind((host, port))
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise RuntimeError(f"Failed to bind to address '{host}:{port}'.") from error
    return bound
