"""Which replicas a deployment has, and where they take calls, as Serve announces it to its routers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from deployments.wire.messages import Address

Listener = Callable[[Mapping[str, Address]], object]

_BOARDS: dict[str, ReplicaDirectory] = {}


class ReplicaDirectory:
    """The addresses of the running replicas of one deployment, by id. Serve's router may run in a thread of its own."""

    def __init__(self) -> None:
        self._addresses: Mapping[str, Address] = {}
        self._listeners: list[Listener] = []
        self._lock = threading.Lock()

    def announce(self, addresses: Mapping[str, Address]) -> None:
        """Set the replicas that there are now, and tell the listeners."""
        with self._lock:
            self._addresses = addresses
            for listener in self._listeners:
                listener(addresses)

    def follow(self, listener: Listener) -> None:
        """Call a listener with the present addresses, then with every change, in the thread of the change."""
        with self._lock:
            self._listeners.append(listener)
            listener(self._addresses)


def board_of(deployment: str) -> ReplicaDirectory:
    """Returns the directory of a deployment in this process."""
    return _BOARDS.setdefault(deployment, ReplicaDirectory())  # of two threads both get the first one's
