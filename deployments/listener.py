"""The socket that a service listens on, held by the process that started it.

So no caller is refused while the only ingress is replaced: who comes meanwhile waits in the kernel's queue. The holder
binds; the ingress gets the same socket, not one beside it, and listens. Until the first one does, callers are refused.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

from earlyexit.errors import OfframpError

DOOR = "listener.sock"
GREETING = b"offramp"
HANDED_S = 5.0
"""Until a holder that lives has handed the socket over."""


@contextmanager
def holding(host: str, port: int) -> Iterator[str]:
    """Bind, and hand the socket to whoever asks at the path, which only this user can reach.

    Raises OfframpError where the address is taken, or none of this machine's.
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
    """The holder's socket; raises OfframpError where nobody holds one there."""
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
        with asking, suppress(OSError):  # who asked has gone
            socket.send_fds(asking, [GREETING], [held.fileno()])
