"""What happens later: the event loop's timers or, in tests, others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol


class Alarm(Protocol):
    """What `Later` gives."""

    def cancel(self) -> None: ...


Later = Callable[[float, Callable[[], None]], Alarm]
"""Has something called after so many seconds."""


def on_loop(seconds: float, call: Callable[[], None]) -> Alarm:
    """By the running event loop."""
    return asyncio.get_running_loop().call_later(seconds, call)
