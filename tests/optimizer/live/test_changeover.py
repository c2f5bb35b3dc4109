"""Change-overs as literal logs."""

from __future__ import annotations

import pytest

from earlyexit.errors import PlanError
from optimizer.live.changeover import Await, ChangeStep, Scale, steps
from optimizer.live.slots import place
from tests.optimizer.live.plans import on_slots


def told(found: tuple[ChangeStep, ...]) -> list[str]:
    """Steps as a log that one can read."""
    return [line(step).replace("split-", "") for step in found]


def line(step: ChangeStep) -> str:
    match step:
        case Scale(slot=slot, replicas=replicas):
            return f"{slot}={replicas}"
        case Await(replicas=awaited):
            return "await " + " ".join(f"{slot}={each}" for slot, each in awaited.items())
        case _:
            return type(step).__name__.lower()


def runs(**replicas: int) -> dict[str, int]:
    return {f"split-{slot.replace('_', '-')}": each for slot, each in replicas.items()}


def test_a_first_plan_starts_all_it_needs() -> None:
    found = steps(None, on_slots({"T4-0": 2, "V100-0": 1}), {"T4": 2, "V100": 1}, {})
    assert told(found) == ["T4-0=2", "V100-0=1", "await T4-0=2 V100-0=1", "prepare", "switch"]


def test_where_accelerators_are_free_slots_grow_before_the_switch_and_shrink_after_the_drain() -> None:
    before, after = on_slots({"T4-0": 2, "T4-1": 2}), on_slots({"T4-0": 4, "T4-1": 1}, epoch=1)
    found = steps(before, after, {"T4": 6}, before.occupied)
    assert told(found) == ["T4-0=4", "await T4-0=4", "prepare", "switch", "drain", "T4-1=1"]


def test_where_none_is_free_a_donor_gives_up_just_what_is_needed() -> None:
    before, after = on_slots({"T4-0": 4, "T4-1": 3}), on_slots({"T4-0": 1, "T4-1": 5}, epoch=1)
    found = steps(before, after, {"T4": 8}, before.occupied)
    assert told(found) == ["T4-0=3", "T4-1=5", "await T4-1=5", "prepare", "switch", "drain", "T4-0=1"]


def test_of_several_donors_each_keeps_about_the_same_share() -> None:
    before = on_slots({"T4-0": 8, "T4-1": 4, "T4-2": 1})
    after = on_slots({"T4-0": 1, "T4-1": 1, "T4-2": 11}, epoch=1)
    found = steps(before, after, {"T4": 17}, before.occupied)
    # 10 are missing, 4 free: of 8 and 4 remain 4 and 2.
    assert told(found)[:3] == ["T4-0=4", "T4-1=2", "T4-2=11"]


def test_idle_replicas_give_up_theirs_first() -> None:
    before, after = on_slots({"T4-0": 3}), on_slots({"T4-0": 1, "T4-1": 2}, epoch=1)
    found = steps(before, after, {"T4": 5}, {**before.occupied, "split-T4-2": 2})
    assert told(found) == ["T4-2=0", "T4-1=2", "await T4-1=2", "prepare", "switch", "drain", "T4-0=1"]


def test_the_present_plan_keeps_a_replica_per_slot_so_some_grow_after_the_drain() -> None:
    before, after = on_slots({"T4-0": 1, "T4-1": 1, "T4-2": 1}), on_slots({"T4-0": 3}, epoch=1)
    found = steps(before, after, {"T4": 3}, before.occupied)
    late = ["drain", "T4-1=0", "T4-2=0", "T4-0=3", "await T4-0=3", "prepare"]
    assert told(found) == ["prepare", "switch", *late]


def test_a_slot_that_has_nothing_gets_one_replica_before_others_grow() -> None:
    before, after = on_slots({"T4-0": 1, "T4-1": 2}), on_slots({"T4-0": 2, "T4-2": 1}, epoch=1)
    found = steps(before, after, {"T4": 3}, before.occupied)
    late = ["drain", "T4-1=0", "T4-0=2", "await T4-0=2", "prepare"]
    assert told(found) == ["T4-1=1", "T4-2=1", "await T4-2=1", "prepare", "switch", *late]


def test_only_where_nothing_else_is_left_the_present_plan_loses_a_slot() -> None:
    before, after = on_slots({"T4-0": 1}), on_slots({"T4-1": 1}, epoch=1)
    found = steps(before, after, {"T4": 1}, before.occupied)
    assert told(found) == ["T4-0=0", "T4-1=1", "await T4-1=1", "prepare", "switch"]
    placed = place(after.plan, {"T4": 2}, before)
    assert told(steps(before, placed, {"T4": 1}, before.occupied)) == ["prepare", "switch"]


def test_an_avoided_replica_keeps_its_accelerator() -> None:
    before = on_slots({"T4-0": 3, "T4-1": 1})
    after = on_slots({"T4-0": 2, "T4-1": 1}, epoch=1, avoided={"slow": "T4-0"})
    assert told(steps(before, after, {"T4": 4}, before.occupied)) == ["prepare", "switch"]
    gone = on_slots({"T4-0": 2, "T4-1": 1}, epoch=1, avoided={"slow": "T4-2"})
    running = {**before.occupied, "split-T4-2": 1}
    log = told(steps(before, gone, {"T4": 5}, running))
    assert log == ["T4-2=1", "prepare", "switch", "drain", "T4-0=2"]


def test_a_donor_with_an_avoided_replica_keeps_one_that_works() -> None:
    before = on_slots({"T4-0": 2, "T4-1": 1}, avoided={"slow": "T4-0"})
    after = on_slots({"T4-1": 2}, epoch=1)
    # Slot 0 runs 3; the floor is 2, the avoided one and one that works.
    found = steps(before, after, {"T4": 4}, before.occupied)
    assert told(found) == ["T4-0=2", "T4-1=2", "await T4-1=2", "prepare", "switch", "drain", "T4-0=0"]


def test_the_same_plan_is_only_mended() -> None:
    placed = on_slots({"T4-0": 2, "T4-1": 1})
    assert steps(placed, placed, {"T4": 4}, placed.occupied) == ()
    found = steps(placed, placed, {"T4": 4}, runs(T4_0=2, T4_1=1, T4_2=1))
    assert told(found) == ["T4-2=0"]
    assert told(steps(placed, placed, {"T4": 4}, runs(T4_0=1, T4_1=1))) == ["T4-0=2", "await T4-0=2", "prepare"]


def test_where_an_accelerator_is_lost_its_replica_is_not_waited_for() -> None:
    before, after = on_slots({"T4-0": 3, "T4-1": 1}), on_slots({"T4-0": 2, "T4-1": 1}, epoch=1)
    found = steps(before, after, {"T4": 3}, runs(T4_0=2, T4_1=1))
    assert told(found) == ["T4-0=2", "prepare", "switch"]


def test_a_replica_that_comes_back_by_itself_is_waited_for() -> None:
    before, after = on_slots({"T4-0": 3}), on_slots({"T4-0": 3}, epoch=1)
    found = steps(before, after, {"T4": 3}, runs(T4_0=2))
    assert told(found) == ["T4-0=3", "await T4-0=3", "prepare", "switch"]


def test_replicas_that_were_asked_for_before_are_waited_for() -> None:
    before, after = on_slots({"T4-0": 4}), on_slots({"T4-0": 3, "T4-1": 1}, epoch=1)
    found = steps(before, after, {"T4": 4}, runs(T4_0=3, T4_1=0), runs(T4_0=3, T4_1=1))
    assert told(found) == ["T4-0=3", "T4-1=1", "await T4-1=1", "prepare", "switch"]


def test_replicas_that_start_where_nobody_needs_them_are_not_waited_for_and_give_way() -> None:
    before, after = on_slots({"T4-0": 2}), on_slots({"T4-0": 2, "T4-2": 1}, epoch=1)
    found = steps(before, after, {"T4": 3}, runs(T4_0=2, T4_1=0), runs(T4_0=2, T4_1=1))
    assert told(found) == ["T4-1=0", "T4-2=1", "await T4-2=1", "prepare", "switch"]


def test_idle_replicas_that_nothing_needs_go_last() -> None:
    before, after = on_slots({"T4-0": 1}), on_slots({"T4-0": 1}, epoch=1)
    found = steps(before, after, {"T4": 3}, runs(T4_0=1, T4_2=2))
    assert told(found) == ["prepare", "switch", "drain", "T4-2=0"]


def test_one_that_the_next_plan_does_not_need_is_not() -> None:
    before, after = on_slots({"T4-0": 3, "T4-1": 1}), on_slots({"T4-1": 1}, epoch=1)
    found = steps(before, after, {"T4": 4}, runs(T4_0=2, T4_1=1))
    assert told(found) == ["T4-0=2", "prepare", "switch", "drain", "T4-0=0"]


def test_a_slot_of_the_present_plan_gets_its_only_replica_back_but_is_not_waited_for() -> None:
    before, after = on_slots({"T4-0": 1, "T4-1": 1}), on_slots({"T4-1": 1}, epoch=1)
    found = steps(before, after, {"T4": 2}, runs(T4_0=0, T4_1=1))
    assert told(found) == ["T4-0=1", "prepare", "switch", "drain", "T4-0=0"]


def test_slots_that_a_change_over_left_half_way_are_told_again() -> None:
    before, after = on_slots({"T4-0": 3, "T4-1": 1}), on_slots({"T4-0": 3, "T4-1": 1}, epoch=2)
    found = steps(before, after, {"T4": 5}, runs(T4_0=2, T4_1=2, T4_2=1))
    log = ["T4-2=0", "T4-0=3", "await T4-0=3", "prepare", "switch", "drain", "T4-1=1"]
    assert told(found) == log


def test_more_than_there_is_is_refused() -> None:
    with pytest.raises(PlanError, match="need 4 T4, there are 3"):
        steps(None, on_slots({"T4-0": 3}, avoided={"slow": "T4-0"}), {"T4": 3}, {})


def test_a_slot_of_an_unknown_accelerator_type_is_refused() -> None:
    with pytest.raises(PlanError, match="none of the accelerator types"):
        steps(None, on_slots({"T4-0": 1}), {"V100": 3}, {})
