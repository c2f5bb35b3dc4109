"""Calls and their inputs."""

from __future__ import annotations

from typing import Any, cast

from earlyexit.engine import Member
from simulator.call import Call, Input, by_call


def member(number: int, origin: object) -> Input:
    return Member(sample_id="", payload=number, origin=origin)


def test_members_are_parted_by_call_in_the_order_in_which_calls_and_members_come() -> None:
    a, b, c = "first", "second", "third"
    members = [member(0, b), member(1, a), member(2, b), member(3, c), member(4, a)]
    parts = [(call, [each.payload for each in mine]) for call, mine in by_call(members)]
    assert parts == [(b, [0, 2]), (a, [1, 4]), (c, [3])]


def test_members_of_one_call_stay_together() -> None:
    members = (member(0, "only"), member(1, "only"))
    assert [(call, list(mine)) for call, mine in by_call(members)] == [("only", list(members))]


def test_equal_calls_are_not_the_same_call() -> None:
    one, other = [1], [1]
    assert len(by_call([member(0, one), member(1, other)])) == 2


def test_who_is_still_inside_is_lost_with_the_replica() -> None:
    members = [member(number, None) for number in range(3)]
    call = Call(cast(Any, None), cast(Any, None), members, 0.0, epoch=0, first=True, probe=False)
    for each in members[1:]:
        each.origin = call
    assert [each.payload for each in call.lost()] == [1, 2]
