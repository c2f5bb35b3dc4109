"""Background tasks that live as long as their process, and whose end by an error the health check tells."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any

logger = logging.getLogger(f"ray.serve.{__name__}")


class Supervised:
    """The background tasks of an ingress, a replica or the controller."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self._failed: dict[str, BaseException] = {}

    def start(self, name: str, work: Coroutine[Any, Any, Any]) -> None:
        """Run the work beside serving. An error that ends it is logged, and fails `check` from then on."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)  # the event loop itself holds tasks only weakly
        task.add_done_callback(self._note)

    def check(self) -> None:
        """Raise RuntimeError where a task has ended by an error; Serve then replaces the process."""
        for name, error in self._failed.items():
            raise RuntimeError(f"the background task {name!r} has ended: {error!r}")

    def _note(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._failed[task.get_name()] = error
            logger.error("the background task %r has ended", task.get_name(), exc_info=error)
