"""How Ray starts on this machine: without the processes that a service has no use for, and for this machine alone."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

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
    told = os.environ.get(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR)
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"  # the dashboard asks for the node's address as well
    try:
        with _instead(ray_constants, "ENABLE_RAY_CLUSTER", value=False):
            yield
    finally:
        _restore(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, told)


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
    os.environ["PYTHONPATH"] = here if told is None else os.pathsep.join([here, told])
    try:
        yield
    finally:
        _restore("PYTHONPATH", told)


def _restore(name: str, told: str | None) -> None:
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
