"""One timer for the deadlines of all connections: it is set for the first of them, however many there are."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Generic, Protocol, TypeVar

K = TypeVar("K", bound=Hashable)
LEAST_PAUSE_S = 0.25
"""Between two looks: deadlines are met to within it."""


class Planned(Protocol):
    """A call that is planned."""

    def cancel(self) -> None: ...


class Times(Protocol):
    """What of an event loop is needed."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[[], object]) -> Planned: ...


class Deadlines(Generic[K]):
    """Who has until when, by kinds that each have one length: of a kind, who came first is due first."""

    def __init__(
        self,
        lengths_s: Mapping[str, float],
        expired: Callable[[K, str], None],
        loop: Times,
    ) -> None:
        """`expired` is told who is due, and by which kind; they are forgotten then."""
        self._lengths_s = lengths_s
        self._expired = expired
        self._loop = loop
        self._due_s: Mapping[str, dict[K, float]] = {kind: {} for kind in lengths_s}
        self._alarm: Planned | None = None
        self._alarm_s = 0.0

    def arm(self, who: K, kind: str) -> None:
        """From now on; who has a deadline of this kind is to be disarmed first."""
        due_s = self._due_s[kind][who] = self._loop.time() + self._lengths_s[kind]
        self._wake_by(due_s)

    def disarm(self, who: K, kind: str) -> None:
        """No more of it; nothing where there is none."""
        self._due_s[kind].pop(who, None)

    def close(self) -> None:
        """Nobody is told any more."""
        if self._alarm is not None:
            self._alarm.cancel()

    def _wake_by(self, due_s: float) -> None:
        if self._alarm is not None:
            if self._alarm_s <= due_s:
                return
            self._alarm.cancel()
        self._alarm_s = max(due_s, self._loop.time() + LEAST_PAUSE_S)
        self._alarm = self._loop.call_at(self._alarm_s, self._look)

    def _look(self) -> None:
        self._alarm = None
        now_s = self._loop.time()
        for kind, due_s in self._due_s.items():
            late = []
            for who, at_s in due_s.items():
                if at_s > now_s:
                    break
                late.append(who)
            for who in late:
                del due_s[who]
                self._expired(who, kind)
        first_s = min((next(iter(due_s.values())) for due_s in self._due_s.values() if due_s), default=None)
        if first_s is not None:
            self._wake_by(first_s)
