"""Fixtures and hooks for the tests of all folders."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chromium import browser as browser  # a fixture

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as in `make test`; torch reads it at its import

ON_RAY = (
    "test_answers_on_ray.py",
    "test_canary_on_ray.py",
    "test_cascade_on_ray.py",
    "test_keys_on_ray.py",
    "test_kinds_on_ray.py",
    "test_streams_on_ray.py",
    "test_new_plans_on_ray.py",
    "test_page_on_ray.py",
    "test_ends_on_ray.py",
    "test_quickstart.py",
    "test_servers.py",
)
"""Files whose tests start Ray, in the order in which one process runs them.

Neighbours share a service if they can. The file that kills Ray comes last among those that need it.
"""

EXPORTS = ("test_onnx_backend.py", "test_exported.py", "test_onnx_graph.py", "test_sites.py", "test_laws.py")
"""Files that trace and export models. One process runs them, because the first export in a process loads modules for
seconds, and because they trace the same modules."""

LONG = ("test_page_in_chromium.py", "test_simulation.py")
"""Files that take minutes, so they start early. Any free process may run tests of the last one."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collection creates millions of objects that stay, and garbage collection would take a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on Ray come first, because they take longest, run one after the other, and mostly wait."""
    early = (*ON_RAY, *LONG)
    items.sort(key=lambda item: early.index(item.path.name) if item.path.name in early else len(early))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distributes whole files to processes, because their tests share fixtures. One process runs all files on Ray."""
    from xdist.scheduler import LoadFileScheduling

    together = dict.fromkeys(ON_RAY, "on Ray") | dict.fromkeys(EXPORTS, "exports")

    class ByFile(LoadFileScheduling):  # type: ignore[misc] # it ships no types
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            name = Path(file).name
            return nodeid if name == LONG[-1] else together.get(name, file)

    return ByFile(config, log)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Lets processes of a test receive Ctrl-C, which background jobs of a shell would ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
