"""How Ray starts on this machine: without the processes that a service has no use for, and for this machine alone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WATCHERS = ("start_log_monitor", "start_monitor")
"""Ray's log monitor passes lines on to drivers that ask for them; ours does not. Its monitor adds nodes to clusters."""
API_SERVER = "start_api_server"
"""Of the dashboard; without one it starts all the same, for Ray's own command line."""


@contextmanager
def without_watchers(*, dashboard: bool) -> Iterator[None]:
    """Inside, `ray.init` leaves them out, and the dashboard's server too unless it is wanted.

    Ray has parameters for it (`RayParams.include_log_monitor`, `no_monitor`) that `ray.init` does not pass on.
    """
    from ray._private.node import Node

    left_out = WATCHERS if dashboard else (*WATCHERS, API_SERVER)
    kept = {name: getattr(Node, name) for name in left_out}
    for name in left_out:
        setattr(Node, name, _start_nothing)
    try:
        yield
    finally:
        for name, start in kept.items():
            setattr(Node, name, start)


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
    name, told = "ENABLE_RAY_CLUSTER", os.environ.get(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR)
    kept = getattr(ray_constants, name)
    setattr(ray_constants, name, False)
    os.environ[ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR] = "0"  # the dashboard asks for the node's address as well
    try:
        yield
    finally:
        setattr(ray_constants, name, kept)
        _restore(ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR, told)


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


def _start_nothing(*_: object, **__: object) -> None:
    pass
