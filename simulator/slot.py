"""A Serve deployment's replicas, and each ingress's view of how much they hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from deployments.ingress.core.homes import Homes
from deployments.ingress.core.routing import FillFirst, fill_first
from simulator.replica import SimulatedReplica
from simulator.trip import Holder, Trip


class Slot:
    """The way to a stage: a call goes to the replica that the ingress's router ranks first."""

    def __init__(self, name: str, device: str, num_ingresses: int) -> None:
        self.name = name
        self.device = device
        self.replicas: dict[int, SimulatedReplica] = {}
        """Those that take calls, by an index that no other replica of the slot ever had."""
        self.retired: list[SimulatedReplica] = []
        """Those that end their work, or are dead."""
        self.pending: list[tuple[Trip, int, float]] = []
        """Calls, with their block and delay, that found no replica."""
        self.num_ever = 0
        self._homes: dict[tuple[int, int], int] = {}
        """By ingress and sequence, the replica that has it."""
        self.avoided: frozenset[str] = frozenset()
        self.routers = [FillFirst(index / num_ingresses) for index in range(num_ingresses)]
        """What each ingress knows of its loads."""

    def add(self, replica: SimulatedReplica) -> None:
        """A replica takes calls from now on."""
        self.replicas[replica.index] = replica
        if replica.name not in self.avoided:
            self._open(replica)

    def remove(self, replica: SimulatedReplica, now_s: float) -> None:
        """It takes no more; what it has, it ends."""
        replica.until_s = now_s
        del self.replicas[replica.index]
        self.retired.append(replica)
        for router in self.routers:
            router.discard(replica.index)

    def avoid(self, names: Collection[str]) -> None:
        """Leave these replicas out, while there are others."""
        before, self.avoided = self.avoided, frozenset(names)
        for replica in self.replicas.values():
            if replica.name in self.avoided - before:
                for router in self.routers:
                    router.discard(replica.index)
            elif replica.name in before - self.avoided:
                self._open(replica)

    def choose(self, ingress: int, weight: int, batch: int) -> SimulatedReplica | None:
        """The replica for a call of such a weight, which it has from now on; None where there is none."""
        if not self.replicas:
            return None
        router = self.routers[ingress]
        if len(router):
            return self.replicas[router.take(weight, batch)]
        replicas = list(self.replicas.values())  # all are avoided: those are all there is
        loads = [sum(trip.weight for trip in each.trips if trip.ingress.index == ingress) for each in replicas]
        return replicas[fill_first(loads, weight, batch, router.phase)[0]]

    def has(self, name: str) -> bool:
        """Whether a replica takes calls of its sequences."""
        index = int(name.rpartition("#")[2])
        if index not in self.replicas:
            return False
        return name not in self.avoided or all(each.name in self.avoided for each in self.replicas.values())

    def home_of(self, ingress: int, homes: Homes, batch: int) -> SimulatedReplica | None:
        """The replica of a call's sequences; where they have none, the one that `fill_first` puts first by sequences.

        None where there is no replica.
        """
        if homes.replica is not None:
            return self.replicas[int(homes.replica.rpartition("#")[2])]
        offered = [each for each in self.replicas.values() if self.has(each.name)]
        if not offered:
            return None
        held = Counter(index for (of, _), index in self._homes.items() if of == ingress)
        loads = [held[each.index] for each in offered]
        replica = offered[fill_first(loads, len(homes.each), batch, self.routers[ingress].phase)[0]]
        homes.choose(replica.name)
        self._homes.update({(ingress, number): replica.index for number in homes.numbers})
        return replica

    def leave(self, ingress: int, sequence: int) -> SimulatedReplica | None:
        """A sequence is over, or lost; gives the replica that had it, while that takes calls."""
        return self.replicas.get(self._homes.pop((ingress, sequence), -1))

    def withdraw(self, trip: object) -> None:
        """Have a call wait for a replica no more."""
        self.pending = [waiting for waiting in self.pending if waiting[0] is not trip]

    def trips(self) -> Iterator[Trip]:
        """The calls that its replicas have."""
        for replica in (*self.replicas.values(), *self.retired):
            yield from tuple(replica.trips)

    def done(self, ingress: int, replica: Holder, weight: int) -> None:
        """A call has ended."""
        self.routers[ingress].load(replica.index, -weight)

    def _open(self, replica: SimulatedReplica) -> None:
        for router in self.routers:
            router.add(replica.index)
        for trip in replica.trips:  # one that works again may not have ended all that it had
            self.routers[trip.ingress.index].load(replica.index, trip.weight)
