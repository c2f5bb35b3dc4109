"""An ingress alone: its calls are written down, and the test says what comes back from them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from optimizer.placement import PlacedPlan, initial_placement
from simulator.events import Events
from simulator.ingress import SimulatedIngress, Surroundings
from simulator.outcome import DROPS, Ledger
from simulator.replica import Input, SimulatedReplica, Slot, Trip
from simulator.scenario import Scenario


class FakeReplica:
    """Writes calls down when they reach it; it never works."""

    def __init__(self, scene: IngressScene, slot: str) -> None:
        self.index = 0
        self.busy = 0.0
        self.trips: set[Trip] = set()
        self._scene = scene
        self._slot = slot

    def forget(self, trip: Trip) -> None:
        self._scene.write(f"call {self._scene.calls.index(trip)} is forgotten")

    def submit(self, trip: Trip, block: int) -> None:
        self._scene.calls.append(trip)
        inputs = " ".join(str(member.payload.input) for member in trip.members)
        self._scene.write(f"call {len(self._scene.calls) - 1} to {self._slot} for block {block}: [{inputs}]")


class FakeSlot:
    """One replica, that takes everything; or none."""

    def __init__(self, scene: IngressScene, name: str) -> None:
        self.pending: list[tuple[Trip, int, float]] = []
        self.replica: FakeReplica | None = FakeReplica(scene, name)
        self._scene = scene
        self._name = name

    def choose(self, ingress: int, weight: int, batch: int) -> SimulatedReplica | None:
        return cast(SimulatedReplica | None, self.replica)

    def withdraw(self, trip: object) -> None:
        self.pending = [waiting for waiting in self.pending if waiting[0] is not trip]

    def trips(self) -> Iterator[Trip]:
        return iter(() if self.replica is None else tuple(self.replica.trips))

    def done(self, ingress: int, replica: SimulatedReplica, weight: int) -> None:
        self._scene.write(f"a call of {weight} to {self._name} has ended")


class IngressScene:
    """What an ingress needs of a service, and what a test needs of an ingress."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.events = Events()
        self.ledger = Ledger(scenario.arrivals_s, scenario.inputs_per_request)
        placed = initial_placement(scenario.plan)
        self.slots = {name: FakeSlot(self, name) for name in placed.slots}
        self.calls: list[Trip] = []
        self.log: list[str] = []
        slots = cast(dict[str, Slot], self.slots)
        self.ingress = SimulatedIngress(
            Surroundings(index=0, scenario=scenario, events=self.events, ledger=self.ledger, placed=placed, slots=slots)
        )

    def write(self, what: str) -> None:
        self.log.append(f"{self.events.time_s:g} {what}")

    def arrive(self, until_s: float, *, first: int = 0) -> int:
        """Have the requests of up to a second arrive, from the `first` on; the next that has not."""
        arrivals_s = [at_s for at_s in self.scenario.arrivals_s.tolist()[first:] if at_s <= until_s]
        per_request = self.scenario.inputs_per_request
        self.events.run_arrivals(arrivals_s, lambda number: self.ingress.arrive(number * per_request), first)
        self.events.run_until(until_s)
        return first + len(arrivals_s)

    def answer(self, index: int, block: int, number: int | None = None) -> None:
        """The first inputs of a call, all by default, leave after a block."""
        call = self.calls[index]
        self.ingress.answer(call, self._inside(call)[:number], block)

    def go_on(self, index: int, block: int) -> None:
        """All that are still inside a call go on to a block."""
        call = self.calls[index]
        self.ingress.go_on(call, self._inside(call), block)

    def lose(self, index: int) -> None:
        """All that are still inside a call are too late."""
        call = self.calls[index]
        self.ingress.lose(call, self._inside(call))

    def die(self, index: int) -> None:
        """The replica of a call ends."""
        self.ingress.restart(self.calls[index])

    def drops(self) -> list[str | None]:
        """By input."""
        return [DROPS[reason] if reason >= 0 else None for reason in self.ledger.drop]

    def follow(self, placed: PlacedPlan) -> None:
        self.ingress.follow(placed)

    def _inside(self, trip: Trip) -> list[Input]:
        return [member for member in trip.members if member.payload.holder is trip]
