"""Without its head, or its raylet, a Ray on one machine is over: this watches both and reports their end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Protocol

from earlyexit.errors import HeadLostError

VITAL = ("gcs_server", "raylet")
"""Of Ray's processes: nothing takes their place. Serve, or Ray, starts all others anew."""


class Started(Protocol):
    """A process that this one has started, as `subprocess.Popen` has it."""

    pid: int

    def poll(self) -> int | None: ...


def ray_processes() -> dict[str, Started]:
    """The vital ones of the Ray that this process has started, by name."""
    from ray._private import worker

    node = worker.global_worker.node
    assert node is not None, "Ray was started"
    return {name: each.process for name in VITAL for each in node.all_processes.get(name, ())}


@contextlib.contextmanager
def watched(processes: Mapping[str, Started], on_loss: Callable[[HeadLostError], None]) -> Iterator[None]:
    """Call, from a thread of its own, once one of them has ended before the block has."""
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
    """Wait until one of them ends, or a pipe is closed at its other end; whether it is the first.

    Nothing is looked at again and again.
    """
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
    """What has ended, and how: `found` has process ids and, of ended ones, statuses as `subprocess` has them."""
    ended = [f"{name} {pid} {_how(status)}" for name, (pid, status) in found.items() if status is not None]
    return f"Ray's head is gone ({', '.join(ended) or 'the cause is unknown'}); what was left of the service is ended"


def _how(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"was killed by {signal.Signals(-status).name}"
    except ValueError:  # a real-time signal has no name
        return f"was killed by signal {-status}"
