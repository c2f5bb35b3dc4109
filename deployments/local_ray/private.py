"""All code that uses private parts of Ray and Serve, because there is no public setting.

Private parts may change with each release. pyproject.toml therefore pins the release.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from subprocess import Popen
from typing import Any, Literal

from earlyexit.errors import OfframpError

LOOPBACK_NAMES = ("127.0.0.1", "::1", "localhost")
ANYWHERE = "[::]"
KV_NAMESPACE = b"offramp"
SERVE_TIMEOUT_S = 10.0
"""Timeout of a call to Serve's controller, in seconds."""
ANSWER_S = 4.0
"""Timeout in seconds of a broadcast, shorter than the live page's timeout for an update."""

logger = logging.getLogger("offramp")
serve_logger = logging.getLogger(f"ray.serve.{__name__}")


@contextmanager
def environment_variable(name: str, value: str) -> Iterator[None]:
    """Sets an environment variable within the block, also for processes that are started there."""
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

HELPER_STARTERS = ("start_log_monitor", "start_monitor", "start_api_server")
"""Methods of Ray's node that start helper processes: the log monitor, the monitor that adds nodes, and the dashboard's
server, which Ray starts even without a dashboard, for its command line."""


@contextmanager
def without_helpers() -> Iterator[None]:
    """Within the block, `ray.init` does not start processes that a service does not need.

    Ray has parameters for this (`RayParams.include_log_monitor`, `no_monitor`), but `ray.init` does not accept them.
    """
    from ray._private.node import Node

    with ExitStack() as kept:
        for name in HELPER_STARTERS:
            kept.enter_context(_replaced(Node, name, lambda *_, **__: None))
        yield


@contextmanager
def on_loopback() -> Iterator[None]:
    """Within the block, `ray.init` starts a node that listens only on 127.0.0.1.

    Ray does so by default on Windows and macOS, where it has no clusters. Elsewhere it rejects a loopback address.
    """
    from ray._private import ray_constants

    with (
        environment_variable(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, "0"),  # the dashboard reads this one
        _replaced(ray_constants, "ENABLE_RAY_CLUSTER", value=False),
    ):
        yield


@contextmanager
def keep_sigterm_handler() -> Iterator[None]:
    """Within the block, `ray.init` keeps the handler of SIGTERM. Outside the main thread this does nothing.

    Ray installs a handler in Python, and later another one in C++, which aborts the process. The signal is therefore
    blocked, except while processes are started, because they would inherit the mask. Each gets a process group, so that
    SIGTERM to the group of this process, as `timeout` sends it, does not end Ray before Serve.
    """
    from ray._private import services, utils

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    start_unmasked = _sigterm_mask(signal.SIG_UNBLOCK)(services.start_ray_process)
    handler = signal.getsignal(signal.SIGTERM)
    with (
        _sigterm_mask(signal.SIG_BLOCK),
        _replaced(utils, "set_sigterm_handler", lambda _: None),
        _replaced(services, "start_ray_process", start_unmasked),
        _replaced(services, "ConsolePopen", partial(services.ConsolePopen, process_group=0)),
    ):
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, handler)


def head_processes() -> dict[str, Popen[Any]]:
    """Returns the started processes of Ray that are not restarted, by name. Serve or Ray restarts all others."""
    return {name: each.process for name in ("gcs_server", "raylet") for each in _node().all_processes.get(name, ())}


def kill_started() -> None:
    """Kills the processes of Ray that this process has started. Workers and agents end with their raylet."""
    _node().kill_all_processes(check_alive=False, wait=True)


def _node() -> Any:
    from ray._private import worker

    assert worker.global_worker.node is not None, "Ray was started"
    return worker.global_worker.node


EXPECTED_MESSAGES = ("killed by `ray.kill`", "Raylet is terminated", "worker processes have been started")
"""Messages that are not shown. Serve kills its own actors, the head watch reports the end of a raylet in more detail,
and replicas of emulated accelerators need no core, so that there may be more processes than cores."""


def log_ray_messages() -> None:
    """Logs Ray's messages about its workers from now on, instead of printing them, except expected ones."""
    from ray._private import worker

    def log(data: Any, ignore_prefix: bool) -> None:  # noqa: ARG001 - Ray's own signature
        for message in map(str.strip, data["lines"]):
            if message and not any(expected in message for expected in EXPECTED_MESSAGES):
                logger.warning("Ray says: %s", message)

    assert hasattr(worker, "print_to_stdstream"), "this release of Ray prints messages differently"
    worker.print_to_stdstream = log


# Serve's controller, and calls of replicas


async def ask_serve(method: str, *arguments: Any) -> Any:
    """Calls a method of Serve's controller from inside the cluster; raises OfframpError if it fails."""
    import ray
    from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    try:
        async with asyncio.timeout(SERVE_TIMEOUT_S):
            controller = await asyncio.to_thread(ray.get_actor, SERVE_CONTROLLER_NAME, SERVE_NAMESPACE)
            return await getattr(controller, method).remote(*arguments)
    except Exception as error:  # errors of Ray, or any error of the controller
        raise OfframpError(f"Serve's controller does not answer: {error!r}") from error


async def scale_deployment(app: str, deployment: str, replicas: int) -> None:
    """Sets the number of replicas of a deployment, which may be 0; returns before they run."""
    from ray.serve._private.common import DeploymentID

    await ask_serve("update_deployment_replicas", DeploymentID(name=deployment, app_name=app), replicas)


async def find_applications() -> dict[str, Any]:
    """Returns all applications and options of Serve, as its REST API does."""
    return dict(await ask_serve("get_serve_instance_details"))


def end_serve() -> None:
    """Ends Serve, if it runs, after its applications have answered all accepted requests.

    `serve.shutdown` by itself would end its proxies with the requests in them.
    """
    from ray import serve
    from ray.serve.context import _get_global_client

    client: Any = _get_global_client(raise_if_no_controller_running=False)
    try:
        if client is not None:
            client.delete_all_apps()
    except Exception as error:  # the signal that ends this process may have ended Ray's processes, too
        logger.warning("requests may be lost: Serve's controller does not answer: %r", error)
    else:
        serve.shutdown()  # type: ignore[no-untyped-call] # ray's, not ours


async def put_applications(config: Mapping[str, Any]) -> None:
    """Replaces the set of applications, as a PUT to Serve's REST API does."""
    from ray.serve.schema import ServeDeploySchema

    await ask_serve("apply_config", ServeDeploySchema.model_validate(config))


class DeploymentHandles:
    """Calls the replicas of one application's deployments, from inside one of them."""

    def __init__(self, app: str) -> None:
        self._app = app
        self._handles: dict[str, Any] = {}

    async def handle(self, deployment: str) -> Any:
        """Returns a deployment's handle. It is created in a thread, because that blocks until Serve answers."""
        if deployment not in self._handles:
            from ray import serve

            self._handles[deployment] = await asyncio.to_thread(serve.get_deployment_handle, deployment, self._app)
        return self._handles[deployment]

    async def broadcast(self, deployment: str, method: str, *arguments: Any, timeout_s: float) -> list[Any]:
        """Returns each replica's answer, none if no replica runs. Raises OfframpError if a replica does not answer."""
        answers = await self._ask(deployment, method, *arguments, timeout_s=timeout_s)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise OfframpError(f"{method} failed on a replica of {deployment}: {answer!r}") from answer
        return answers

    async def try_broadcast(self, deployment: str, method: str, *args: Any, timeout_s: float = ANSWER_S) -> list[Any]:
        """Returns each replica's answer, None for one without an answer, and one None if Serve names no replicas."""
        try:
            answers = await self._ask(deployment, method, *args, timeout_s=timeout_s)
        except Exception as error:  # Ray raises many kinds
            answers = [error]
        for failure in (each for each in answers if isinstance(each, BaseException)):
            serve_logger.warning("the call of %s on %s failed: %r", method, deployment, failure)
        return [None if isinstance(each, BaseException) else each for each in answers]

    async def _ask(self, deployment: str, method: str, *arguments: Any, timeout_s: float) -> list[Any]:
        """Returns the answer of each replica, or its error; empty if no replica runs.

        Serve's own `results_async` returns no answer at all if one replica is late.
        """
        from ray.serve.exceptions import DeploymentUnavailableError

        called = (await self.handle(deployment)).broadcast(method, *arguments)
        try:
            results = await asyncio.wait_for(called._fetch_replica_results_async(), timeout_s)
        except DeploymentUnavailableError:
            return []
        answers = (asyncio.wait_for(each.get_async(), timeout_s) for each in results)
        return await asyncio.gather(*answers, return_exceptions=True)


# Ray's key-value store


async def ask_store(operation: Literal["get", "put", "del", "list"], *arguments: Any) -> Any:
    """Calls the store in a thread, because each call blocks for about a millisecond.

    `get` returns the value of one of Offramp's keys, or None. `put` sets it, unless there is one and it must not be
    overwritten, and returns whether there was one. `list` returns the keys with a prefix. Returned texts are bytes.
    """
    from ray.experimental import internal_kv

    call = getattr(internal_kv, f"_internal_kv_{operation}")
    return await asyncio.to_thread(call, *arguments, namespace=KV_NAMESPACE)


# Serve's servers, which have no settings for their address and code. Functions are replaced where a server starts.

GRPC_HOST = "OFFRAMP_GRPC_HOST"
"""Environment variable with the address on which gRPC listens for callers."""
GRPC_CALLBACK = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": f"{__name__}.bind_callers"}
"""Serve calls this hook in each proxy and each listening ingress, before they listen."""


def bind_callers() -> list[Any]:
    """Makes gRPC listen for callers on `GRPC_HOST`; returns an empty list of middlewares, as the hook requires."""
    from ray.serve._private import default_impl

    host = os.environ.get(GRPC_HOST)
    if host is not None:
        _listen_on(host, default_impl, "add_grpc_address")
    return []


def bind_calls() -> None:
    """Makes this replica listen for Serve's calls on loopback if its node does, because there is no other node then."""
    import ray
    from ray.serve._private import replica

    host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call] # Ray's code
    if host in LOOPBACK_NAMES:
        _listen_on(host, replica, "add_port_to_grpc_server")


def replace_http_server(start: Callable[..., Any]) -> None:
    """Makes Serve start this replica's HTTP server with `start`, which gets Serve's function and its arguments."""
    from ray.serve._private import http_util, replica

    replacement = partial(start, http_util.start_asgi_http_server)
    replica.start_asgi_http_server = replacement  # type: ignore[attr-defined] # Serve's module imports it privately


def with_middlewares(app: Any, middlewares: Any) -> Any:
    """Wraps an application with the middlewares of Serve's `HTTPOptions`."""
    from ray.serve._private import http_util

    return http_util._apply_middlewares(app, middlewares)


def _listen_on(host: str, module: object, name: str) -> None:
    """Makes a module's function, which gets a server and an address, listen on this host instead of everywhere."""
    listen, there = getattr(module, name), f"[{host}]" if ":" in host else host
    setattr(module, name, lambda server, address: listen(server, address.replace(ANYWHERE, there)))


@contextmanager
def _sigterm_mask(how: int) -> Iterator[None]:
    """Blocks or unblocks SIGTERM in this thread and threads that it starts; `how` as in `pthread_sigmask`."""
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
