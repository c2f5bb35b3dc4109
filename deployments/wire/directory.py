"""Which replicas a slot has, and where they take calls: as Serve tells its routers, at once and without asking."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from deployments.wire.messages import Address

Listener = Callable[[Mapping[str, Address]], None]

_BOARDS: dict[str, ReplicaDirectory] = {}
_LOCK = threading.Lock()


class ReplicaDirectory:
    """The running replicas of one slot, by their ids. Serve's router may run in a thread of its own."""

    def __init__(self) -> None:
        self._addresses: Mapping[str, Address] = {}
        self._listeners: list[Listener] = []
        self._lock = threading.Lock()

    def announce(self, addresses: Mapping[str, Address]) -> None:
        """These are all there are now."""
        with self._lock:
            self._addresses = addresses
            for listener in self._listeners:
                listener(addresses)

    def follow(self, listener: Listener) -> None:
        """Tell it what there is now, then of every change, in whatever thread that comes."""
        with self._lock:
            self._listeners.append(listener)
            listener(self._addresses)


def board_of(slot: str) -> ReplicaDirectory:
    """The slot's board in this process."""
    with _LOCK:
        return _BOARDS.setdefault(slot, ReplicaDirectory())
