"""Setup of every process of a service: logs that do not quote requests, and background tasks."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Coroutine
from typing import Any


class HideExceptionMessages(logging.Filter):
    """A logging filter that removes the messages of exceptions from tracebacks, because they may quote requests."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Sets the text of the traceback, which formatters then use, and keeps the record."""
        if record.exc_info and record.exc_info[1] is not None:
            error = record.exc_info[1]
            last_line = f"{type(error).__name__} (its message is left out: it may quote the request)"
            record.exc_text = "".join([*traceback.format_tb(error.__traceback__), last_line])
        return True


logger = logging.getLogger(f"ray.serve.{__name__}")


class BackgroundTasks:
    """The background tasks of an ingress, a replica or the controller, which is healthy as long as they run."""

    def __init__(self) -> None:
        logging.raiseExceptions = False  # Serve logs stderr, so errors of a log on a full disk would log each other
        self._tasks: list[asyncio.Task[None]] = []
        """Kept, because the event loop has only weak references to tasks."""

    def start(self, name: str, work: Coroutine[Any, Any, Any]) -> None:
        """Runs a coroutine as a task. If it ends with an error, `check_health` fails."""
        self._tasks.append(asyncio.get_running_loop().create_task(work, name=name))

    def check_health(self) -> None:
        """Raises RuntimeError if a task has failed. Serve calls it every second, and then replaces the process."""
        for task in self._tasks:
            error = task.exception() if task.done() and not task.cancelled() else None
            if error is not None:
                logger.error("the background task %r has ended", task.get_name(), exc_info=error)
                raise RuntimeError(f"the background task {task.get_name()!r} has ended: {error!r}")
