"""Serve's gRPC servers listen on every interface and have no switch for it: here they are told where.

Serve binds them by names that are looked up when a server starts, in the process that starts it. Before, these names
are given another meaning there.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

HOST = "OFFRAMP_GRPC_HOST"
"""Environment variable: where gRPC of a service's callers is to listen; set beside Serve's switches."""
CALLBACK = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": f"{__name__}.bind_callers"}
"""Serve's own hook: called in every proxy, and in ingresses that Serve has listen, before they do."""
ANYWHERE = "[::]"
LOOPBACK = ("127.0.0.1", "::1")


def bind_callers() -> list[Any]:
    """Have gRPC of callers listen where the environment says; gives the middlewares that Serve asks for, none."""
    from ray.serve._private import default_impl

    host = os.environ.get(HOST)
    if host is not None:
        listen_there = _bound(default_impl.add_grpc_address, host)
        default_impl.add_grpc_address = listen_there  # type: ignore[assignment] # of one meaning, with other words
    return []


def bind_calls() -> None:
    """Have this replica take Serve's calls on loopback alone, where its node is found there: no other node exists."""
    import ray
    from ray.serve._private import replica

    host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call] # ray's, not ours
    if host in LOOPBACK:
        name = "add_port_to_grpc_server"
        setattr(replica, name, _bound(getattr(replica, name), host))


def _bound(listen: Callable[[Any, str], Any], host: str) -> Callable[[Any, str], Any]:
    def listen_there(server: Any, address: str) -> Any:
        return listen(server, address.replace(ANYWHERE, f"[{host}]" if ":" in host else host))

    return listen_there
