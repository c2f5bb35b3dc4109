"""How Ray starts on this machine: without the processes that a service has no use for, and for this machine alone.

Ray's and Serve's own switches.

They are read when ray.serve is imported, here and in every replica, so they are set before.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

THROUGHPUT = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # A replica that says it is broken must not drain for 20 s with calls open.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    # Our own lines are few, warnings and errors: they are written at once, not when a thousand have gathered.
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",
}
RAYLET = {"RAY_worker_niceness": "0"}
"""Read where Ray itself starts. Its default of 15 has whatever else happens on the machine come before the model."""
ALONE = {
    # Ten times a second, how busy a node is.
    "RAY_raylet_report_resources_period_milliseconds": "1000",
    "RAY_gcs_pull_resource_loads_period_milliseconds": "10000",
    "RAY_memory_monitor_refresh_ms": "1000",
    # Of calls that Ray itself carries, which are few.
    "RAY_task_events_report_interval_ms": "0",
    # Every worker looks for signals a hundred times a second, and notes how long that took.
    "RAY_event_stats": "0",
}
"""Read where Ray starts as well: reports between nodes, which one machine does not need."""
QUIET = {
    # Every reader of the metrics sees what Ray exports, every 10 s.
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",
    # Of all controllers' work most is looking whether something has changed.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    # A line per request, which Serve reads to count what ingresses count themselves.
    "RAY_SERVE_HAPROXY_METRICS_ENABLED": "0",
    "RAY_SERVE_EVENT_LOOP_MONITORING_INTERVAL_S": "30",
    # Of processors, memory and disks, for Ray's dashboard.
    "REPORTER_UPDATE_INTERVAL_MS": "30000",
}
"""Periodic work of Serve and Ray in an idle service, made less frequent."""
HAPROXY = {"RAY_SERVE_ENABLE_HA_PROXY": "1"}
# HAProxy's own pages, beside the port that is served.
HAPROXY_PORTS = {"RAY_SERVE_HAPROXY_STATS_PORT": 8404, "RAY_SERVE_HAPROXY_METRICS_PORT": 9101}
# A proxy behind HAProxy, for as long as no ingress is there.
HAPROXY_GRPC_PORTS = {"RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": 9500}


DIED = re.compile(r"Worker PID: (?P<pid>\d+)\b.*?\bWorker exit type: (?P<how>\w+)", flags=re.DOTALL)
NO_NEWS = ("killed by `ray.kill`", "Raylet is terminated")
"""Serve ends its own actors so, its controller among them; the watcher of the raylet reports its end better."""
MOST_LETTERS = 200

logger = logging.getLogger("offramp")


def our_words(message: str) -> str | None:
    """One line for a message of Ray's to its driver; None for what is no news."""
    died = DIED.search(message)
    if died is not None:
        return f"a worker of Ray's has died, pid {died['pid']} ({died['how']})"
    if any(words in message for words in NO_NEWS):
        return None
    first = next((line.strip() for line in message.splitlines() if line.strip()), "")
    return f"Ray says: {first if len(first) <= MOST_LETTERS else first[:MOST_LETTERS] + ' ...'}" if first else None


def use_our_words() -> None:
    """From here on what Ray would print of its workers goes to our log, by its driver's one way to print it."""
    from ray._private import worker

    assert hasattr(worker, "print_to_stdstream"), "this release of Ray prints by another way"
    worker.print_to_stdstream = _log


def _log(data: Mapping[str, Any], ignore_prefix: bool) -> None:  # noqa: ARG001 - Ray's own signature
    for words in map(our_words, data["lines"]):
        if words is not None:
            logger.warning(words)


WATCHERS = ("start_log_monitor", "start_monitor")
"""Ray's log monitor passes lines on to drivers that ask for them; ours does not. Its monitor adds nodes to clusters."""
API_SERVER = "start_api_server"
"""Of the dashboard; without one it starts all the same, for Ray's own command line."""
FOR_SERVE = ("--modules-to-load=ServeHead",)
"""What the controller asks the dashboard for; each of its other parts is a process more, and one of them takes jobs."""


@contextmanager
def without_watchers(*, dashboard: bool) -> Iterator[None]:
    """Inside, `ray.init` leaves them out, and the dashboard's server too unless it is wanted: then it has Serve's part.

    Ray has parameters for it (`RayParams.include_log_monitor`, `no_monitor`, `--modules-to-load`) that `ray.init` does
    not pass on.
    """
    from ray._private import ray_constants, services
    from ray._private.node import Node

    left_out = WATCHERS if dashboard else (*WATCHERS, API_SERVER)
    start_process = services.start_ray_process

    def start_lean(command: list[str], process_type: str, *args: Any, **kwargs: Any) -> Any:
        more = FOR_SERVE if process_type == ray_constants.PROCESS_TYPE_DASHBOARD else ()
        return start_process([*command, *more], process_type, *args, **kwargs)

    with ExitStack() as kept:
        for name in left_out:
            kept.enter_context(_instead(Node, name, _start_nothing))
        kept.enter_context(_instead(services, "start_ray_process", start_lean))
        yield


@contextmanager
def on_loopback(*, alone: bool) -> Iterator[None]:
    """Inside, the node that `ray.init` starts is found at 127.0.0.1 where it is `alone`, and listens there only.

    Ray does so by itself on Windows and macOS, where it has no clusters; elsewhere it takes an address on loopback that
    it is given for a mistake.
    """
    from ray._private import ray_constants

    if not alone:
        yield
        return
    with (
        variable(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, "0"),  # the dashboard asks for the node's address as well
        _instead(ray_constants, "ENABLE_RAY_CLUSTER", value=False),
    ):
        yield


@contextmanager
def keeping_sigterm() -> Iterator[None]:
    """Inside, `ray.init` leaves the handler of SIGTERM as it was; outside the main thread it has none to leave.

    Ray sets handlers of its own in Python, and another one in C++ when it connects, which aborts the process. So the
    signal waits for the moments at which a process is started, none of which is to inherit that, and for the end.
    """
    from ray._private import services, utils

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    start_process = services.start_ray_process

    def start_unmasked(*args: Any, **kwargs: Any) -> Any:
        with masked(signal.SIG_UNBLOCK):
            return start_process(*args, **kwargs)

    handler = signal.getsignal(signal.SIGTERM)
    with (
        masked(signal.SIG_BLOCK),
        _instead(utils, "set_sigterm_handler", _start_nothing),
        _instead(services, "start_ray_process", start_unmasked),
    ):
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, handler)


@contextmanager
def masked(how: int) -> Iterator[None]:
    """Inside, SIGTERM is blocked or not in this thread and those that it starts; `how` is of `pthread_sigmask`."""
    before = signal.pthread_sigmask(how, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def lean_imports() -> Iterator[None]:
    """Here, and in processes that are started inside and those that they start, ray.serve does without pandas."""
    from deployments.startup import sitecustomize

    sitecustomize.leave_out()
    told = os.environ.get("PYTHONPATH")
    here = str(Path(sitecustomize.__file__).parent)
    with variable("PYTHONPATH", here if told is None else os.pathsep.join([here, told])):
        yield


@contextmanager
def variable(name: str, value: str) -> Iterator[None]:
    """Inside, an environment variable has a value, which processes that are started inside inherit."""
    told = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if told is None:
            del os.environ[name]
        else:
            os.environ[name] = told


@contextmanager
def _instead(owner: object, name: str, value: object) -> Iterator[None]:
    kept = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, kept)


def _start_nothing(*_: object, **__: object) -> None:
    pass
