"""What tests of every folder may ask for."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Processes that a test starts take Ctrl-C; in a background job of a shell they would inherit to ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
