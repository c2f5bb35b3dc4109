"""A simulated fleet in trouble: accelerators that go and come back, replicas that die or become slow."""

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
"""Until a dead replica is replaced: the live service's `health_check_period_s`."""
LOST_S = 8.0
"""Until Ray no longer counts accelerators that are gone."""


def kill(service: SimulatedService, replica: SimulatedReplica) -> None:
    """End a replica at once; its inputs start again elsewhere."""
    if replica.index in service.running[replica.device]:
        service.stop(replica)
    for trip in replica.die():
        service.ingresses[trip.ingress.index].restart(trip)


class LosablePool(AcceleratorPool):
    """A pool from which accelerators are lost, and to which they come back."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self._lost_s: dict[int, float] = {}
        """When each accelerator was lost that is gone."""

    def is_free(self, number: int) -> bool:
        return super().is_free(number) and number not in self._lost_s

    def lose(self, numbers: Iterable[int], now_s: float) -> list[object]:
        """Remove accelerators; returns their holders."""
        lost = [number for number in numbers if number not in self._lost_s]
        self._lost_s |= dict.fromkeys(lost, now_s)
        holders = [self.holders[number] for number in lost]
        for number in lost:
            self.holders[number] = None
        return [holder for holder in holders if holder is not None]

    def bring_back(self, numbers: Iterable[int]) -> None:
        """Return lost accelerators to the pool."""
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
        """End the process of a stage's replica, if it has so many; 0: the one that has run for longest.

        Its inputs start again elsewhere, and Serve starts another replica.
        """
        for replica in self._at(slot, rank):
            self._die(replica)

    def lose(self, device: str, numbers: tuple[int, ...]) -> None:
        """Remove accelerators, with the replicas that run or start on them.

        Replicas take the lowest free number, those of a plan's first stage first.
        """
        self.say(f"{device} {', '.join(map(str, numbers))} lost")
        for holder in self._losable[device].lose(numbers, self._events.time_s):
            if isinstance(holder, SimulatedReplica):
                self._die(holder)
            elif isinstance(holder, Start):
                self._starts.remove(holder)
                self._later(NOTICE_S, self._reconcile, holder.device)

    def bring_back(self, device: str, numbers: tuple[int, ...]) -> None:
        """Return lost accelerators, empty."""
        self.say(f"{device} {', '.join(map(str, numbers))} back")
        self._losable[device].bring_back(numbers)
        self._place()

    def slow(self, slot: str, rank: int, slowness: float) -> None:
        """Have a stage's replica take so many times as long as its profile says; 1: it is healthy again."""
        for replica in self._at(slot, rank):
            self.say(f"{replica.name} takes {slowness:g} times as long")
            self._service.slow(replica, slowness)

    def _at(self, slot: str, rank: int) -> list[SimulatedReplica]:
        """Returns a stage's replica by how long it has run; none if there are not so many."""
        return self._service.slots[slot].replicas[rank : rank + 1] if slot in self._service.slots else []

    def _die(self, replica: SimulatedReplica) -> None:
        self.say(f"{replica.name} dies")
        self._accelerators[replica.device].release(replica)
        kill(self._service, replica)
        self._later(NOTICE_S, self._reconcile, replica.device)


class Fault(NamedTuple):
    """What goes wrong, or right again, at a time."""

    at_s: float
    happen: Callable[[TroubledFleet], None]
    """A call of the fleet, such as `fleet.die("split-cpu-0")`."""


def with_faults(*faults: Fault) -> MakeFleet:
    """A fleet to which these faults happen."""
    return partial(TroubledFleet, faults=faults)
