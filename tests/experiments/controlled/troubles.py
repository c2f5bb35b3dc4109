"""A simulated fleet with faults: accelerators that are lost and return, replicas that die or become slow."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from experiments.controlled import AcceleratorPool, SimulatedFleet
from simulator.events import CONTROLS
from simulator.processes import SimulatedReplica
from simulator.service import SimulatedService
from tests.simulator.tiny_cases import kill

NOTICE_S = 1.0
"""Seconds until a dead replica is replaced: the live service's `health_check_period_s`."""
LOST_S = 8.0
"""Seconds until Ray no longer counts lost accelerators."""


class Lost(NamedTuple):
    """The holder of a lost accelerator."""

    at_s: float


class LosablePool(AcceleratorPool):
    """A pool that can lose accelerators and get them back."""

    def lose(self, numbers: Iterable[int], now_s: float) -> list[object]:
        """Removes accelerators; returns their holders."""
        found = [(number, self.holders[number]) for number in numbers]
        lost = {number: holder for number, holder in found if not isinstance(holder, Lost)}
        for number in lost:
            self.holders[number] = Lost(now_s)
        return [holder for holder in lost.values() if holder is not None]

    def bring_back(self, numbers: Iterable[int]) -> None:
        """Returns lost accelerators to the pool."""
        for number in numbers:
            if isinstance(self.holders[number], Lost):
                self.holders[number] = None

    def counted(self, noticed_s: float) -> int:
        """Returns the number of accelerators, including those lost after `noticed_s`."""
        return sum(not isinstance(holder, Lost) or holder.at_s > noticed_s for holder in self.holders)


class TroubledFleet(SimulatedFleet):
    """A fleet to which faults happen."""

    start_s, drain_s = 4.0, 1.0

    def __init__(self, service: SimulatedService, faults: tuple[Fault, ...] = ()) -> None:
        super().__init__(service)
        self._losable = {device: LosablePool(len(pool.holders)) for device, pool in self._pools.items()}
        self._pools = {**self._losable}
        self._faults = faults

    def boot(self) -> None:
        super().boot()
        for fault in self._faults:
            self._events.at(fault.at_s, CONTROLS, fault.happen, self)

    async def capacity(self) -> dict[str, int]:
        return {device: each.counted(self._events.time_s - LOST_S) for device, each in self._losable.items()}

    def die(self, slot: str, rank: int = 0) -> None:
        """Ends the process of a stage's replica, if there are enough; rank 0 is the one that has run longest.

        Its inputs start again on other replicas, and Serve starts another replica.
        """
        for replica in self._at(slot, rank):
            self._die(replica)

    def lose(self, device: str, numbers: tuple[int, ...]) -> None:
        """Removes accelerators, with the replicas that run or start on them.

        Replicas take the lowest free number, those of a plan's first stage first.
        """
        self.say(f"{device} {', '.join(map(str, numbers))} lost")
        for holder in self._losable[device].lose(numbers, self._events.time_s):
            if isinstance(holder, SimulatedReplica):
                self._die(holder)
            else:
                self._starts[device].remove(holder)
                self._call_later(NOTICE_S, self._reconcile, device)

    def bring_back(self, device: str, numbers: tuple[int, ...]) -> None:
        """Returns lost accelerators, without replicas."""
        self.say(f"{device} {', '.join(map(str, numbers))} back")
        self._losable[device].bring_back(numbers)
        self._place(device)

    def slow(self, slot: str, rank: int, slowness: float) -> None:
        """Slows a stage's replica by this factor; 1 makes it healthy again."""
        for replica in self._at(slot, rank):
            self.say(f"{replica.name} takes {slowness:g} times as long")
            self._service.slow(replica, slowness)

    def _at(self, slot: str, rank: int) -> list[SimulatedReplica]:
        """Returns a stage's replica by rank; None if there are not enough."""
        return self._service.slots[slot].replicas[rank : rank + 1] if slot in self._service.slots else []

    def _die(self, replica: SimulatedReplica) -> None:
        self.say(f"{replica.name} dies")
        self._pools[replica.device].hand_over(replica, None)
        kill(self._service, replica)
        self._call_later(NOTICE_S, self._reconcile, replica.device)


class Fault(NamedTuple):
    """A fault, or the end of one, at a time."""

    at_s: float
    happen: Callable[[TroubledFleet], None]
    """A call of the fleet, such as `fleet.die("split-cpu-0")`."""


def with_faults(*faults: Fault) -> Callable[[SimulatedService], SimulatedFleet]:
    """Returns a fleet to which these faults happen."""
    return partial(TroubledFleet, faults=faults)
