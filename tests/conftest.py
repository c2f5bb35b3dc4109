"""What tests of every folder may ask for."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # as `make test` has it: torch reads it when it is imported

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

Neighbours share a service where they can, and the one that kills Ray is the last that needs it.
"""

LONG = ("test_page_in_chromium.py", "test_simulation.py")
"""Files that take minutes: they start early. Tests of the last run in whichever process is free."""


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Millions of objects are made meanwhile, all to stay: to look for garbage among them takes a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What runs on Ray comes first: it takes longest, one after the other, and mostly waits."""
    early = (*ON_RAY, *LONG)
    items.sort(key=lambda item: early.index(item.path.name) if item.path.name in early else len(early))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Have one process of several run a whole file, whose tests share what is made once, or all files on Ray."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):  # type: ignore[misc] # it ships no types
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            name = Path(file).name
            return "on Ray" if name in ON_RAY else nodeid if name == LONG[-1] else file

    return ByFile(config, log)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Processes that a test starts take Ctrl-C; in a background job of a shell they would inherit to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
