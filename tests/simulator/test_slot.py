"""Calls, their inputs, and which replica of a slot takes them."""

from __future__ import annotations

from typing import Any, cast

from deployments.ingress.core.inputs import Flight
from earlyexit.engine.queue import Member
from simulator.replica import Input, SimulatedReplica, Slot, Trip, by_trip

BATCH = 4


class FakeReplica:
    """One that only has a name, and the calls that were put on it."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.name = f"slot#{index}"
        self.trips: set[Trip] = set()
        self.until_s = 0.0


def slot_of(num_replicas: int, *, num_ingresses: int = 1) -> Slot:
    slot = Slot("slot", "cpu", num_ingresses)
    for index in range(num_replicas):
        slot.add(cast(SimulatedReplica, FakeReplica(index)))
    return slot


class FakeMember:
    origin: Any
    reserve_s: float


class FakeIngress:
    def __init__(self, index: int) -> None:
        self.index = index


def send(slot: Slot, weight: int, *, ingress: int = 0) -> int:
    """Send a call that never ends; the index of the replica that takes it."""
    replica = slot.choose(ingress, weight, BATCH)
    assert replica is not None
    trip = Trip(cast(Any, None), [], 0.0, 0, 0.0, None, True)
    trip.weight = weight
    trip.begin(cast(Any, FakeIngress(ingress)), [cast(Any, FakeMember()) for _ in range(weight)])
    replica.trips.add(trip)
    return replica.index


def test_idle_replicas_come_first_and_then_the_fullest_batch_that_has_room() -> None:
    slot = slot_of(2)
    assert [send(slot, 3), send(slot, 1), send(slot, 1), send(slot, 3), send(slot, 4)] == [0, 1, 0, 1, 0]


def test_a_call_that_has_ended_makes_room() -> None:
    slot = slot_of(2)
    assert [send(slot, 3), send(slot, 1)] == [0, 1]
    slot.done(0, slot.replicas[0], 3)
    assert send(slot, 2) == 0


def test_a_replica_that_was_removed_takes_no_more_and_may_end_its_calls() -> None:
    slot = slot_of(2)
    assert send(slot, 1) == 0
    removed = slot.replicas[0]
    slot.remove(removed, 1.0)
    slot.done(0, removed, 1)
    assert [send(slot, 1), send(slot, 4)] == [1, 1]
    slot.remove(slot.replicas[1], 5.0)
    assert slot.choose(0, 1, BATCH) is None
    assert [replica.until_s for replica in slot.retired] == [1.0, 5.0]


def test_each_ingress_counts_its_own_calls_only_and_begins_elsewhere() -> None:
    slot = slot_of(4, num_ingresses=2)
    assert [send(slot, 4, ingress=ingress) for ingress in (0, 0, 1, 1, 1, 1)] == [0, 1, 2, 3, 0, 1]


def test_avoided_replicas_are_left_out_while_there_are_others() -> None:
    slot = slot_of(3)
    slot.avoid({"slot#0", "slot#2"})
    assert [send(slot, 4), send(slot, 4)] == [1, 1]
    slot.avoid({"slot#2"})
    assert [send(slot, 4), send(slot, 4)] == [0, 0]
    slot.avoid(())
    assert send(slot, 4) == 2


def test_of_avoided_replicas_only_all_get_work_as_the_live_router_has_it() -> None:
    slot = slot_of(2)
    slot.avoid({"slot#0", "slot#1"})
    assert [send(slot, 3), send(slot, 1), send(slot, 1)] == [0, 1, 0]


def test_what_a_replica_held_counts_when_it_is_no_longer_avoided() -> None:
    slot = slot_of(2)
    assert send(slot, 3) == 0
    slot.avoid({"slot#0"})
    slot.avoid(())
    assert [send(slot, 1), send(slot, 1)] == [1, 0]
    alone = Slot("slot", "cpu", 1)  # avoided from its start, it gets calls all the same, and may end them
    alone.avoid({"slot#0"})
    alone.add(cast(SimulatedReplica, FakeReplica(0)))
    assert send(alone, 2) == 0
    alone.done(0, alone.replicas[0], 2)
    alone.replicas[0].trips.clear()
    alone.avoid(())
    assert send(alone, 2) == 0


def member(number: int, origin: object) -> Input:
    return Member(sample_id="", payload=Flight(number, cast("Any", None), 0.0, 1.0), origin=origin)


def test_members_are_parted_by_trip_in_the_order_in_which_calls_and_members_come() -> None:
    a, b, c = (cast(Trip, name) for name in ("first", "second", "third"))
    members = [member(0, b), member(1, a), member(2, b), member(3, c), member(4, a)]
    parts = [(call, [each.payload.input for each in mine]) for call, mine in by_trip(members)]
    assert parts == [(b, [0, 2]), (a, [1, 4]), (c, [3])]


def test_members_of_one_call_stay_together() -> None:
    only = cast(Trip, "only")
    members = [member(0, only), member(1, only)]
    assert [(trip, list(mine)) for trip, mine in by_trip(members)] == [(only, members)]


def test_who_has_not_left_a_replica_is_lost_with_it() -> None:
    members = [member(number, None) for number in range(3)]
    trip = Trip(cast(Any, None), [], 0.0, 0, 0.0, None, True)
    trip.begin(cast(Any, None), members)
    members[0].origin = None
    assert [flight.input for flight in trip.left()] == [1, 2]
