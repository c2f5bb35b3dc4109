"""The replicas of each deployment and their addresses, as Serve announces them to its routers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from deployments.wire.messages import Address

Listener = Callable[[Mapping[str, Address]], object]

_DIRECTORIES: dict[str, ReplicaDirectory] = {}


class ReplicaDirectory:
    """The addresses of the running replicas of one deployment, by id. It is thread-safe."""

    def __init__(self) -> None:
        self._addresses: Mapping[str, Address] = {}
        self._listeners: list[Listener] = []
        self._lock = threading.Lock()  # Serve's router may run in a thread of its own

    def announce(self, addresses: Mapping[str, Address]) -> None:
        """Replaces the addresses, and calls the listeners."""
        with self._lock:
            self._addresses = addresses
            for listener in self._listeners:
                listener(addresses)

    def follow(self, listener: Listener) -> None:
        """Calls a listener with the present addresses, and then after each change, in the thread that announced it."""
        with self._lock:
            self._listeners.append(listener)
            listener(self._addresses)


def directory_of(deployment: str) -> ReplicaDirectory:
    """Returns the directory of a deployment in this process."""
    return _DIRECTORIES.setdefault(deployment, ReplicaDirectory())  # atomic: two threads get the same one
