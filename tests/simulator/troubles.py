"""A simulated fleet with faults: accelerators that are lost and return, replicas that die or become slow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import NamedTuple

from simulator.controlled import MakeFleet
from simulator.events import CONTROLS
from simulator.fleet import AcceleratorPool, Delays, SimulatedFleet, Start
from simulator.processes import SimulatedReplica
from simulator.service import SimulatedService

NOTICE_S = 1.0
"""Seconds until a dead replica is replaced: the live service's `health_check_period_s`."""
LOST_S = 8.0
"""Seconds until Ray no longer counts lost accelerators."""


def kill(service: SimulatedService, replica: SimulatedReplica) -> None:
    """Ends a replica at once; its inputs start again on other replicas."""
    if replica.index in service.running[replica.device]:
        service.stop(replica)
    for call in replica.die():
        service.ingresses[call.ingress.index].restart(call)


class LosablePool(AcceleratorPool):
    """A pool that can lose accelerators and get them back."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._lost_s: dict[int, float] = {}
        """When each lost accelerator was lost."""

    def is_free(self, number: int) -> bool:
        return super().is_free(number) and number not in self._lost_s

    def lose(self, numbers: Iterable[int], now_s: float) -> list[object]:
        """Removes accelerators; returns their holders."""
        lost = [number for number in numbers if number not in self._lost_s]
        self._lost_s |= dict.fromkeys(lost, now_s)
        holders = [self.holders[number] for number in lost]
        for number in lost:
            self.holders[number] = None
        return [holder for holder in holders if holder is not None]

    def bring_back(self, numbers: Iterable[int]) -> None:
        """Returns lost accelerators to the pool."""
        for number in numbers:
            self._lost_s.pop(number, None)

    def counted(self, noticed_s: float) -> int:
        """Returns the number of accelerators, including those lost after `noticed_s`."""
        return len(self.holders) - sum(lost_s <= noticed_s for lost_s in self._lost_s.values())


class TroubledFleet(SimulatedFleet):
    """A fleet to which faults happen."""

    def __init__(
        self, service: SimulatedService, counts: Mapping[str, int], delays: Delays, faults: tuple[Fault, ...] = ()
    ) -> None:
        super().__init__(service, counts, delays)
        self._losable = {device: LosablePool(count) for device, count in counts.items()}
        self._accelerators = {**self._losable}
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
            elif isinstance(holder, Start):
                self._starts.remove(holder)
                self._call_later(NOTICE_S, self._reconcile, holder.device)

    def bring_back(self, device: str, numbers: tuple[int, ...]) -> None:
        """Returns lost accelerators, without replicas."""
        self.say(f"{device} {', '.join(map(str, numbers))} back")
        self._losable[device].bring_back(numbers)
        self._place()

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
        self._accelerators[replica.device].release(replica)
        kill(self._service, replica)
        self._call_later(NOTICE_S, self._reconcile, replica.device)


class Fault(NamedTuple):
    """A fault, or the end of one, at a time."""

    at_s: float
    happen: Callable[[TroubledFleet], None]
    """A call of the fleet, such as `fleet.die("split-cpu-0")`."""


def with_faults(*faults: Fault) -> MakeFleet:
    """Returns a fleet to which these faults happen."""
    return partial(TroubledFleet, faults=faults)
