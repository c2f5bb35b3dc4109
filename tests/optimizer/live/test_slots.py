"""Stages find slots; checked against trying all."""

from __future__ import annotations

from itertools import permutations

import pytest
from numpy.random import default_rng

from earlyexit.errors import PlanError
from earlyexit.network.split import Split
from optimizer.live.slots import num_started, place
from optimizer.placement import PlacedPlan, slot_name
from optimizer.plan import Plan, Stage
from tests.optimizer.live.plans import chain, on_random_slots, on_slots, random_chain

T4_ONLY = {"T4": 3}


def stage(first: int, end: int, replicas: int, *, batch: int = 4) -> Stage:
    return Stage(device="T4", replicas=replicas, splits=(Split(first=first, end=end, batch=batch),))


def num_stopped(before: PlacedPlan, after: PlacedPlan) -> int:
    return num_started(after, before)


def blocks_that_stay(before: PlacedPlan, after: PlacedPlan) -> int:
    return sum(
        len(set(range(one.first, one.end)) & set(range(other.first, other.end)))
        for slot, one in after.stage_of.items()
        if (other := before.stage_of.get(slot)) is not None
    )


def tried_all(plan: Plan, slots: dict[str, int], before: PlacedPlan, avoided: dict[str, str]) -> PlacedPlan:
    """The twin: every assignment, compared by what `place` promises."""
    (device,) = {each.device for each in plan.stages}
    choices = [
        PlacedPlan(plan=plan, slots=tuple(slot_name(device, index) for index in indices), avoided=avoided)
        for indices in permutations(range(slots[device]), len(plan.stages))
    ]
    return min(
        choices,
        key=lambda each: (
            num_started(before, each),
            num_stopped(before, each),
            -blocks_that_stay(before, each),
            each.slots,
        ),
    )


def test_without_a_plan_before_the_stages_of_a_type_take_its_slots_in_order() -> None:
    placed = place(chain(("T4", 1), ("V100", 2), ("T4", 3), epoch=5), {"T4": 2, "V100": 4}, None)
    assert placed.slots == ("split-T4-0", "split-V100-0", "split-T4-1")
    assert placed.epoch == 5


def test_a_stage_takes_the_slot_that_has_its_replicas() -> None:
    before = on_slots({"T4-0": 1, "T4-1": 5})
    assert place(chain(("T4", 5), ("T4", 1)), T4_ONLY, before).slots == ("split-T4-1", "split-T4-0")


def test_the_same_plan_stays_where_it_is() -> None:
    before = on_slots({"T4-2": 2, "T4-0": 2})
    assert place(before.plan, T4_ONLY, before) == before


def test_of_slots_that_start_as_few_the_one_with_the_same_blocks_is_taken() -> None:
    before = PlacedPlan(plan=Plan(stages=(stage(0, 1, 2), stage(1, 6, 2))), slots=("split-T4-0", "split-T4-1"))
    after = place(Plan(stages=(stage(0, 3, 2), stage(3, 6, 2))), T4_ONLY, before)
    assert after.slots == ("split-T4-0", "split-T4-1")
    swapped = place(Plan(stages=(stage(0, 6, 2),)), T4_ONLY, before)
    assert swapped.slots == ("split-T4-1",)


def test_a_slots_avoided_replica_is_none_that_a_stage_can_use() -> None:
    before = on_slots({"T4-0": 2, "T4-1": 2})
    after = place(chain(("T4", 2)), T4_ONLY, before, {"slow": "split-T4-0"})
    assert after.slots == ("split-T4-1",)
    assert after.avoided == {"slow": "split-T4-0"}
    assert num_started(before, after) == 0


def test_more_stages_than_slots_are_refused() -> None:
    with pytest.raises(PlanError, match="4 stages on T4, which has 3 slots"):
        place(chain(("T4", 1), ("T4", 1), ("T4", 1), ("T4", 1)), T4_ONLY, None)


def test_what_is_started_counts_replicas_that_move() -> None:
    assert num_started(None, on_slots({"T4-0": 3})) == 3
    assert num_started(on_slots({"T4-0": 3, "T4-1": 1}), on_slots({"T4-0": 1, "T4-1": 2})) == 1


def test_no_assignment_is_better() -> None:
    for seed in range(60):
        rng = default_rng(seed)
        slots = {"T4": int(rng.integers(1, 6))}
        before = on_random_slots(rng, random_chain(rng, {"T4": 8}, slots), slots)
        plan = random_chain(rng, {"T4": 8}, slots)
        avoided = {}
        if rng.random() < 0.4:
            avoided = {"slow": str(rng.choice(before.slots))}
        assert place(plan, slots, before, avoided).slots == tried_all(plan, slots, before, avoided).slots, seed
