"""The ports of a service, the processes that occupy them, and the listening socket of an ingress without a proxy.

The process that starts a service binds this socket and keeps it open. The ingress receives the same socket and listens.
While the only ingress is replaced, connections therefore wait in the kernel's queue instead of being refused. They are
refused only until the first ingress listens.
"""

from __future__ import annotations

import logging
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import EADDRINUSE
from pathlib import Path, PurePath
from tempfile import TemporaryDirectory
from threading import Thread

from earlyexit.errors import OfframpError, raising

LINGER_S = 60.0
"""Most seconds for which HAProxy and Ray's agent outlive a killed service."""
LOOK_S = 0.5

HostPort = tuple[str, int]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningProcess:
    """A running process."""

    pid: int
    name: str
    parent: str | None = None
    """The name of its parent; None if the parent has ended or its name cannot be read."""

    @property
    def is_orphan(self) -> bool:
        """Whether it is a process of Ray whose parent has ended, so that it will end soon."""
        is_of_ray = self.name.startswith(("haproxy", "ray"))
        return is_of_ray and (self.parent is None or not self.parent.startswith("ray"))


def find_listeners() -> dict[int, RunningProcess]:
    """Returns the listening processes by port, as far as this user may see them."""
    import psutil

    return {
        each.laddr.port: process
        for each in psutil.net_connections("tcp")
        if each.status == psutil.CONN_LISTEN and each.laddr and each.pid and (process := find_process(each.pid))
    }


def find_process(pid: int) -> RunningProcess | None:
    """Returns the process; None if it has ended, or this user may not see it."""
    import psutil

    try:
        process = psutil.Process(pid)
        parent = process.parent()
        # Ray's workers overwrite their command line with their title; process names are limited to 15 letters.
        title = None if parent is None or parent.pid <= 1 else PurePath(*parent.cmdline()[:1]).name
        return RunningProcess(pid=pid, name=process.name(), parent=title)
    except psutil.Error:
        return None


def is_free_address(address: HostPort) -> bool:
    """Returns whether no process listens at the address; raises OfframpError if the address is not valid here."""
    try:
        _bind(*address).close()
    except OfframpError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno == EADDRINUSE:
            return False
        raise
    return True


def await_ports(
    wanted: Sequence[HostPort],
    *,
    is_free: Callable[[HostPort], bool] = is_free_address,
    holders: Callable[[], Mapping[int, RunningProcess]] = find_listeners,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Waits until all ports are free; raises OfframpError if a port is taken by a process that will not end soon."""
    patience_s = LINGER_S
    for address in wanted:
        while not is_free(address):
            host, port = address
            holder = holders().get(port)
            if holder is None and is_free(address):  # the process has just ended
                break
            by = "" if holder is None else f" by {holder.name}, pid {holder.pid}"
            if holder is None or not holder.is_orphan or patience_s <= 0:
                raise OfframpError(f"port {port} of {host} is taken{by}")
            if patience_s == LINGER_S:
                logger.warning("port %d is still taken%s of an earlier service: waiting until it ends", port, by)
            pause(LOOK_S)
            patience_s -= LOOK_S


GREETING = b"offramp"
HANDOVER_TIMEOUT_S = 5.0
"""Timeout for receiving the socket, in seconds."""


@contextmanager
def hold_listener(host: str, port: int) -> Iterator[str]:
    """Binds a socket, and yields a path at which processes of this user can receive it.

    Raises OfframpError if the address is taken, or is not an address of this machine.
    """
    with _bind(host, port) as listener, TemporaryDirectory(prefix="offramp-") as folder:
        path = str(Path(folder) / "listener.sock")
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen()
            thread = Thread(target=_hand_out, args=(server, listener), name="listener", daemon=True)
            thread.start()
            try:
                yield path
            finally:
                server.shutdown(socket.SHUT_RDWR)  # wakes the thread
                thread.join()


def take_listener(path: str) -> socket.socket:
    """Returns the listening socket of the process that holds it; raises OfframpError if there is none."""
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(HANDOVER_TIMEOUT_S)
        with raising(OfframpError, f"the listening socket cannot be received at {path}", OSError):
            client.connect(path)
            greeting, descriptors, _, _ = socket.recv_fds(client, len(GREETING), 1)
    if greeting != GREETING or len(descriptors) != 1:
        raise OfframpError(f"the listening socket was not handed over at {path}")
    listener = socket.socket(fileno=descriptors[0])
    try:
        listener.listen()
    except OSError as error:  # another service, which was started at the same time, listens there
        with listener:
            raise OfframpError(f"cannot listen on port {listener.getsockname()[1]}: {error}") from error
    return listener


def _bind(host: str, port: int) -> socket.socket:
    with raising(OfframpError, f"{host} is not an address", OSError):
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier service may linger
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise OfframpError(f"cannot listen on port {port} of {host}: {error}") from error
    return listener


def _hand_out(server: socket.socket, listener: socket.socket) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # only the main thread handles it
    while True:
        try:
            client, _ = server.accept()
        except OSError:  # the socket was shut down: the service has ended
            return
        with client, suppress(OSError):  # the other process is gone
            socket.send_fds(client, [GREETING], [listener.fileno()])
