"""Watches Ray's head and raylet, without which a Ray on one machine cannot go on, and reports their end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator, Mapping

from deployments.local_ray.private import Started
from earlyexit.errors import HeadLostError

VITAL = ("gcs_server", "raylet")
"""Ray's processes that nothing restarts; Serve or Ray restarts all others."""


@contextlib.contextmanager
def watched(processes: Mapping[str, Started], on_loss: Callable[[HeadLostError], None]) -> Iterator[None]:
    """Calls `on_loss`, from a thread, once one of the processes ends before the block."""
    stopped, stop = os.pipe()
    watch = threading.Thread(target=_watch, args=(processes, stopped, on_loss), name="head watch", daemon=True)
    watch.start()
    try:
        yield
    finally:
        os.close(stop)
        watch.join()
        os.close(stopped)


def _watch(processes: Mapping[str, Started], stopped: int, on_loss: Callable[[HeadLostError], None]) -> None:
    if await_loss(processes, stopped):
        on_loss(HeadLostError(loss_words({name: (each.pid, each.poll()) for name, each in processes.items()})))


def await_loss(processes: Mapping[str, Started], stopped: int) -> bool:
    """Waits, without polling, until a process ends or the other end of a pipe is closed; returns whether it ended."""
    with contextlib.ExitStack() as stack:
        poll = select.poll()
        poll.register(stopped, select.POLLIN)
        for each in processes.values():
            try:
                descriptor = os.pidfd_open(each.pid)
            except ProcessLookupError:  # it has ended, and been waited for
                return True
            stack.callback(os.close, descriptor)
            poll.register(descriptor, select.POLLIN)
        return all(descriptor != stopped for descriptor, _ in poll.poll())


def loss_words(found: Mapping[str, tuple[int, int | None]]) -> str:
    """Describes the loss; `found`: process ids and, of ended processes, statuses as in `subprocess`."""
    ended = [f"{name} {pid} {_how(status)}" for name, (pid, status) in found.items() if status is not None]
    return f"Ray's head is gone ({', '.join(ended) or 'the cause is unknown'}); what was left of the service is ended"


def _how(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {-status}"
