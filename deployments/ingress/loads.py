"""How many inputs each replica holds, by the calls that were sent to it. Pure."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

R = TypeVar("R", bound=Hashable)


class Loads(Generic[R]):
    """A call counts from the moment in which its replica is chosen.

    Serve reports a call as routed milliseconds later, and now and then after it has ended: pieces that are sent
    together would all see the same replica idle, and what is counted after its end would be counted for ever.
    """

    def __init__(self) -> None:
        self._loads: dict[R, int] = {}
        self._open: dict[str, tuple[R, int]] = {}
        """By call: its replica, and its inputs."""

    def of(self, replica: R) -> int:
        """Inputs that a replica holds."""
        return self._loads.get(replica, 0)

    def begin(self, call: str, replica: R, inputs: int) -> None:
        """A replica was chosen for a call; where another was before, that one did not take it."""
        self.end(call)
        self._open[call] = replica, inputs
        self._loads[replica] = self.of(replica) + inputs

    def move(self, call: str, replica: R) -> None:
        """Another replica than the chosen one took the call; one that has ended stays ended."""
        chosen = self._open.get(call)
        if chosen is not None and chosen[0] != replica:
            self.begin(call, replica, chosen[1])

    def end(self, call: str) -> None:
        """A call has ended, wherever: Serve gives one now and then to another replica than the chosen one."""
        chosen = self._open.pop(call, None)
        if chosen is None:
            return
        left = self.of(chosen[0]) - chosen[1]
        if left > 0:
            self._loads[chosen[0]] = left
        else:
            del self._loads[chosen[0]]
