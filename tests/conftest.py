"""What tests of every folder may ask for."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What one process of several runs: a file, whose tests share what is made once; or all that starts Ray."""
    for item in items:
        is_heavy = item.get_closest_marker("ray") or item.get_closest_marker("browser")
        item.add_marker(pytest.mark.xdist_group("ray" if is_heavy else item.path.stem))


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Processes that a test starts take Ctrl-C; in a background job of a shell they would inherit to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
