"""Ray's and Serve's switches for one machine, what Ray reports about its workers, and the watch over its head.

The switches are read when ray.serve is imported, here and in each replica, so they are set before.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from deployments.local_ray.private import Started, print_workers_by, variable
from earlyexit.errors import HeadLostError

THROUGHPUT = {
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # A replica that reports itself unhealthy must not drain for 20 s with open calls.
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    # Log lines are few, and are written at once instead of a thousand together.
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "1",
}
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
