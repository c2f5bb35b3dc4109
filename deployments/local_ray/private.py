"""Everything that imports private modules of Ray and Serve, for which they have no public setting.

Private modules may change with each release. pyproject.toml pins the release, and `check_release` warns about others.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

from earlyexit.errors import OfframpError

TESTED = "2.60.0"
"""The release of Ray that this file was tested with."""
LOOPBACK = ("127.0.0.1", "::1")
ANYWHERE = "[::]"
KV_NAMESPACE = b"offramp"
SERVE_S = 10.0
"""Timeout of a call to Serve's controller, in seconds."""

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

WATCHERS = ("start_log_monitor", "start_monitor", "start_api_server")
"""Ray's log monitor, which passes lines on to drivers that ask for them, the monitor that adds nodes, and the server of
the dashboard, which Ray starts without a dashboard, too, for its own command line."""


@contextmanager
def without_watchers() -> Iterator[None]:
    """Inside, `ray.init` does not start processes that a service does not need.

    Ray has parameters for it (`RayParams.include_log_monitor`, `no_monitor`) that `ray.init` does not pass on.
    """
    from ray._private.node import Node

    with ExitStack() as kept:
        for name in WATCHERS:
            kept.enter_context(_replaced(Node, name, _do_nothing))
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


def kill_started() -> None:
    """Kills the processes that Ray has started from this one; its workers and agents end with their raylet."""
    from ray._private import worker

    node = worker.global_worker.node
    assert node is not None, "Ray was started"
    node.kill_all_processes(check_alive=False, wait=True)


def print_workers_by(log: Callable[[Sequence[str]], None]) -> None:
    """Passes the lines that Ray would print about its workers to `log`."""
    from ray._private import worker

    assert hasattr(worker, "print_to_stdstream"), "this release of Ray prints in another way"
    worker.print_to_stdstream = lambda data, ignore_prefix: log(data["lines"])  # noqa: ARG005 - Ray's own signature


# Serve's controller, which Ray's dashboard asks for the same.


async def ask_serve(method: str, *arguments: Any) -> Any:
    """Returns what Serve's controller answers, from inside the cluster; raises OfframpError if it does not."""
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    try:
        async with asyncio.timeout(SERVE_S):
            controller = await asyncio.to_thread(ray.get_actor, SERVE_CONTROLLER_NAME, SERVE_NAMESPACE)
            return await getattr(controller, method).remote(*arguments)
    except Exception as error:  # of Ray, and whatever the controller raises
        raise OfframpError(f"Serve's controller does not answer: {error!r}") from error


async def scale_deployment(app: str, deployment: str, replicas: int) -> None:
    """Has a deployment run so many replicas, also none; returns before they run."""
    from ray.serve._private.common import DeploymentID

    await ask_serve("update_deployment_replicas", DeploymentID(name=deployment, app_name=app), replicas)


async def find_applications() -> dict[str, Any]:
    """Returns all applications and options of Serve, as its REST API does."""
    found: dict[str, Any] = await ask_serve("get_serve_instance_details")
    return found


async def put_applications(config: Mapping[str, Any]) -> None:
    """Replaces the set of applications, as a PUT to Serve's REST API does."""
    from ray.serve.schema import ServeDeploySchema

    await ask_serve("apply_config", ServeDeploySchema.model_validate(config))


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
