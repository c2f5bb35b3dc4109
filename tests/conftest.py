"""What tests of every folder may ask for."""

from __future__ import annotations

import gc
import signal
from collections.abc import Generator, Iterator
from typing import Any

import pytest

ON_RAY = ("_on_ray.py", "_in_chromium.py", "test_quickstart.py", "test_servers.py")
"""Ends of the names of files whose tests start Ray, or a browser: one after the other, in one process."""


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
    items.sort(key=lambda item: not item.path.name.endswith(ON_RAY))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Have one process of several run a whole file, whose tests share what is made once, or all files on Ray."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):  # type: ignore[misc] # it ships no types
        def _split_scope(self, nodeid: str) -> str:
            file: str = super()._split_scope(nodeid)
            return "on Ray" if file.endswith(ON_RAY) else file

    return ByFile(config, log)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Processes that a test starts take Ctrl-C; in a background job of a shell they would inherit to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
