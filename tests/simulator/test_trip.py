"""Calls and their inputs."""

from __future__ import annotations

from typing import Any, cast

from deployments.ingress.core.flights import Flight
from earlyexit.member import Member
from simulator.trip import Input, Trip, by_trip


def member(number: int, origin: object) -> Input:
    return Member(sample_id="", payload=Flight(number, 0.0, 1.0, 0), origin=origin)


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
    trip = Trip(cast(Any, None), [], 0.0, 0, 0.0, False, True)
    trip.begin(cast(Any, None), members)
    members[0].origin = None
    assert [flight.input for flight in trip.left()] == [1, 2]
