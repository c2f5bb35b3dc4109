"""Everything that imports private modules of Ray and Serve, for which they have no public setting.

Private modules may change with each release. pyproject.toml pins the release, and `check_release` warns about others.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

TESTED = "2.60.0"
"""The release of Ray that this file was tested with."""
LOOPBACK = ("127.0.0.1", "::1")
ANYWHERE = "[::]"
KV_NAMESPACE = b"offramp"

logger = logging.getLogger("offramp")


def check_release() -> None:
    """Logs a warning if the installed release of Ray is not the tested one."""
    import ray

    if ray.__version__ != TESTED:
        logger.warning("Offramp was tested with Ray %s, and this is %s: internals may differ", TESTED, ray.__version__)


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable inside the block, also for processes that are started there."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


# Starting Ray

WATCHERS = ("start_log_monitor", "start_monitor")
"""Ray's log monitor, which passes lines on to drivers that ask for them, and the monitor that adds nodes."""
API_SERVER = "start_api_server"
"""The dashboard's server. Without a dashboard, Ray starts it all the same, for its own command line."""
FOR_SERVE = ("--modules-to-load=ServeHead",)
"""The controller needs only Serve's part of the dashboard. Each other part is a process, and one accepts jobs."""


@contextmanager
def without_watchers(*, dashboard: bool) -> Iterator[None]:
    """Inside, `ray.init` does not start processes that a service does not need; the dashboard has only Serve's part.

    Ray has parameters for it (`RayParams.include_log_monitor`, `no_monitor`, `--modules-to-load`) that `ray.init` does
    not pass on.
    """
    from ray._private import ray_constants, services
    from ray._private.node import Node

    start_process = services.start_ray_process

    def start_lean(command: list[str], process_type: str, *args: Any, **kwargs: Any) -> Any:
        more = FOR_SERVE if process_type == ray_constants.PROCESS_TYPE_DASHBOARD else ()
        return start_process([*command, *more], process_type, *args, **kwargs)

    with ExitStack() as kept:
        for name in WATCHERS if dashboard else (*WATCHERS, API_SERVER):
            kept.enter_context(_replaced(Node, name, _do_nothing))
        kept.enter_context(_replaced(services, "start_ray_process", start_lean))
        yield


@contextmanager
def on_loopback(*, alone: bool) -> Iterator[None]:
    """Inside, the node that `ray.init` starts listens on 127.0.0.1 only, if it is `alone`.

    Ray does so by itself on Windows and macOS, where it has no clusters. Elsewhere it rejects an address on loopback.
    """
    from ray._private import ray_constants

    if not alone:
        yield
        return
    with (
        variable(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, "0"),  # the dashboard asks for the node's address as well
        _replaced(ray_constants, "ENABLE_RAY_CLUSTER", value=False),
    ):
        yield


@contextmanager
def keeping_sigterm() -> Iterator[None]:
    """Inside, `ray.init` keeps the handler of SIGTERM; outside the main thread there is none to keep.

    Ray installs a handler in Python, and when it connects another one in C++, which aborts the process. The signal is
    therefore blocked, except while processes are started, because they would inherit that.
    """
    from ray._private import services, utils

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    start_process = services.start_ray_process

    def start_unmasked(*args: Any, **kwargs: Any) -> Any:
        with _masked(signal.SIG_UNBLOCK):
            return start_process(*args, **kwargs)

    handler = signal.getsignal(signal.SIGTERM)
    with (
        _masked(signal.SIG_BLOCK),
        _replaced(utils, "set_sigterm_handler", _do_nothing),
        _replaced(services, "start_ray_process", start_unmasked),
    ):
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, handler)


class Started(Protocol):
    """A child process, such as `subprocess.Popen`."""

    pid: int

    def poll(self) -> int | None: ...


def started_processes(*names: str) -> dict[str, Started]:
    """Returns processes of the Ray that this process has started, by name."""
    from ray._private import worker

    node = worker.global_worker.node
    assert node is not None, "Ray was started"
    return {name: each.process for name in names for each in node.all_processes.get(name, ())}


def print_workers_by(log: Callable[[Sequence[str]], None]) -> None:
    """Passes the lines that Ray would print about its workers to `log`."""
    from ray._private import worker

    assert hasattr(worker, "print_to_stdstream"), "this release of Ray prints in another way"
    worker.print_to_stdstream = lambda data, ignore_prefix: log(data["lines"])  # noqa: ARG005 - Ray's own signature


def token_headers() -> Mapping[str, str]:
    """Returns the headers with the token of this process, if Ray asks for tokens."""
    from ray._private.authentication.http_token_authentication import get_auth_headers_if_auth_enabled

    return dict(get_auth_headers_if_auth_enabled({}))


# Ray's key-value store. These calls block.


def kv_get(key: str) -> bytes | None:
    """Returns a value of Offramp's; None if there is none."""
    from ray.experimental.internal_kv import _internal_kv_get

    value: bytes | None = _internal_kv_get(key, namespace=KV_NAMESPACE)
    return value


def kv_put(key: str, value: str) -> None:
    """Stores a value of Offramp's."""
    from ray.experimental.internal_kv import _internal_kv_put

    _internal_kv_put(key, value, namespace=KV_NAMESPACE)


def kv_keys(prefix: str) -> list[str]:
    """Returns Offramp's keys with a prefix."""
    from ray.experimental.internal_kv import _internal_kv_list

    return [key.decode() for key in _internal_kv_list(prefix, namespace=KV_NAMESPACE)]


# Serve's servers, whose addresses and code cannot be set. Names are replaced in the process that starts the server.

GRPC_HOST = "OFFRAMP_GRPC_HOST"
"""Environment variable: the address on which gRPC listens for callers; set together with Serve's switches."""
GRPC_CALLBACK = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": f"{__name__}.bind_callers"}
"""Serve calls this hook in each proxy, and in each ingress that it lets listen, before they listen."""


def bind_callers() -> list[Any]:
    """Makes gRPC listen for callers on `GRPC_HOST`; returns the middlewares that Serve asks for: none."""
    from ray.serve._private import default_impl

    host = os.environ.get(GRPC_HOST)
    if host is not None:
        listen_there = _bound(default_impl.add_grpc_address, host)
        default_impl.add_grpc_address = listen_there  # type: ignore[assignment] # other names of parameters
    return []


def bind_calls() -> None:
    """Makes this replica take Serve's calls on loopback only, if its node is there: then no other node exists."""
    import ray
    from ray.serve._private import replica

    host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call] # Ray's code
    if host in LOOPBACK:
        name = "add_port_to_grpc_server"
        setattr(replica, name, _bound(getattr(replica, name), host))


def replace_http_server(start: Callable[..., Any]) -> None:
    """Makes Serve start the HTTP server of this replica by `start`, which gets Serve's function, then its arguments."""
    from ray.serve._private import http_util, replica

    with_serves = partial(start, http_util.start_asgi_http_server)
    replica.start_asgi_http_server = with_serves  # type: ignore[attr-defined] # imported there for its own use


def with_middlewares(app: Any, middlewares: Any) -> Any:
    """Wraps an application into the middlewares of Serve's `HTTPOptions`."""
    from ray.serve._private import http_util

    return http_util._apply_middlewares(app, middlewares)


def _bound(listen: Callable[[Any, str], Any], host: str) -> Callable[[Any, str], Any]:
    def listen_there(server: Any, address: str) -> Any:
        return listen(server, address.replace(ANYWHERE, f"[{host}]" if ":" in host else host))

    return listen_there


@contextmanager
def _masked(how: int) -> Iterator[None]:
    """Blocks or unblocks SIGTERM in this thread and those that it starts; `how` as in `pthread_sigmask`."""
    before = signal.pthread_sigmask(how, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _replaced(owner: object, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _do_nothing(*_: object, **__: object) -> None:
    pass
