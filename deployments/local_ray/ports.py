"""Ports that a service needs, the processes that occupy them, and the socket for callers without a proxy.

The process that starts a service holds that socket, so that no caller is refused while the only ingress is replaced:
connections wait in the kernel's queue. The holder binds the socket, and the ingress gets the same one and listens.
Until the first ingress does, callers are refused.
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

from earlyexit.errors import OfframpError

LINGER_S = 60.0
"""HAProxy and Ray's agent outlive a killed service by at most this time."""
LOOK_S = 0.5

HostPort = tuple[str, int]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningProcess:
    """A process that was found running."""

    pid: int
    name: str
    parent: str | None = None
    """The name of its parent; None if that has ended or cannot be read."""

    @property
    def is_left(self) -> bool:
        """Whether it is a process of Ray whose parent has ended, so that it will soon end, too."""
        is_rays = self.name.startswith(("haproxy", "ray"))
        return is_rays and (self.parent is None or not self.parent.startswith("ray"))


def await_ports(
    wanted: Sequence[HostPort],
    *,
    is_free: Callable[[HostPort], bool] | None = None,
    holders: Callable[[], Mapping[int, RunningProcess]] | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Waits until all ports are free; raises OfframpError if one is taken by a process that will not soon end."""
    is_free, holders = is_free or _is_free, holders or find_listeners
    patience_s = LINGER_S
    for address in wanted:
        while not is_free(address):
            host, port = address
            holder = holders().get(port)
            if holder is None and is_free(address):  # it has ended since
                break
            by = "" if holder is None else f" by {holder.name}, pid {holder.pid}"
            if holder is None or not holder.is_left or patience_s <= 0:
                raise OfframpError(f"port {port} of {host} is taken{by}")
            if patience_s == LINGER_S:
                logger.warning("port %d is still taken%s, of an earlier service: waiting for its end", port, by)
            pause(LOOK_S)
            patience_s -= LOOK_S


def free_port() -> int:
    """Returns a port of this machine that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def is_taken(port: int) -> bool:
    """Returns whether the port cannot be listened on at all addresses."""
    return not _is_free(("0.0.0.0", port))


def find_listeners() -> dict[int, RunningProcess]:
    """Returns the listening processes by port, as far as this user may see them."""
    import psutil

    try:
        connections = psutil.net_connections("tcp")
    except psutil.AccessDenied:  # macOS tells the administrator only
        return {}
    listening = {each.laddr.port: each.pid for each in connections if each.status == psutil.CONN_LISTEN and each.laddr}
    return {port: found for port, pid in listening.items() if (found := find_process(pid)) is not None}


def find_process(pid: int | None) -> RunningProcess | None:
    """Returns the process; None if it has ended, or this user may not see it."""
    import psutil

    if pid is None:
        return None
    try:
        process = psutil.Process(pid)
        parent = process.parent()
        # Ray's workers overwrite their command line, since a process name has only 15 letters.
        title = None if parent is None or parent.pid <= 1 else PurePath(*parent.cmdline()[:1]).name
        return RunningProcess(pid=pid, name=process.name(), parent=title)
    except psutil.Error:
        return None


def _is_free(address: HostPort) -> bool:
    """Returns whether no process listens there; raises OfframpError for an address that none could listen at."""
    try:
        _bound(*address).close()
    except OfframpError as error:
        if isinstance(error.__cause__, OSError) and error.__cause__.errno == EADDRINUSE:
            return False
        raise
    return True


DOOR = "listener.sock"
GREETING = b"offramp"
HANDED_S = 5.0
"""How long to wait for the holder of the socket."""


@contextmanager
def holding(host: str, port: int) -> Iterator[str]:
    """Binds a socket, and hands it to each process that asks at the path, which only this user can reach.

    Raises OfframpError if the address is taken, or is not one of this machine.
    """
    with _bound(host, port) as held, TemporaryDirectory(prefix="offramp-") as folder:
        path = str(Path(folder) / DOOR)
        with socket.socket(socket.AF_UNIX) as door:
            door.bind(path)
            door.listen()
            handing = Thread(target=_hand_out, args=(door, held), name="listener", daemon=True)
            handing.start()
            try:
                yield path
            finally:
                door.shutdown(socket.SHUT_RDWR)  # wakes the thread
                handing.join()


def take_listener(path: str) -> socket.socket:
    """Returns the holder's socket; raises OfframpError if there is no holder."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(HANDED_S)
        try:
            asking.connect(path)
            greeting, found, _, _ = socket.recv_fds(asking, len(GREETING), 1)
        except OSError as error:
            raise OfframpError(f"the socket to listen on cannot be had at {path}: {error}") from error
    if greeting != GREETING or len(found) != 1:
        raise OfframpError(f"the socket to listen on was not handed over at {path}")
    return socket.socket(fileno=found[0])


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise OfframpError(f"{host} is no address: {error}") from error
    held = socket.socket(family, kind, protocol)
    try:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier service may linger
        held.bind(address)
    except OSError as error:
        held.close()
        raise OfframpError(f"port {port} of {host} cannot be listened on: {error}") from error
    return held


def _hand_out(door: socket.socket, held: socket.socket) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # the main thread's, while Ray starts too
    while True:
        try:
            asking, _ = door.accept()
        except OSError:  # shut: the service has ended
            return
        with asking, suppress(OSError):  # the asking process has gone
            socket.send_fds(asking, [GREETING], [held.fileno()])
