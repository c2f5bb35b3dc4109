"""Stages find slots, checked against trying all; and change-overs as literal logs."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import permutations

import pytest
from numpy.random import default_rng

from earlyexit.errors import PlanError
from earlyexit.network.boundary import Split
from optimizer.live.changeover import Await, ChangeStep, Scale, num_started, place, steps
from optimizer.placement import PlacedPlan, slot_name
from optimizer.plan import Plan, Stage
from tests.optimizer.live.plans import chain, on_random_slots, on_slots, random_chain

T4_ONLY = {"T4": 3}


def stage(first: int, end: int, replicas: int, *, batch: int = 4) -> Stage:
    return Stage(device="T4", replicas=replicas, splits=(Split(first=first, end=end, batch=batch),))


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
            num_started(each, before),
            -blocks_that_stay(before, each),
            each.slots,
        ),
    )


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


def test_without_a_plan_before_the_stages_of_a_type_take_its_slots_in_order() -> None:
    placed = place(chain(("T4", 1), ("V100", 2), ("T4", 3), epoch=5), {"T4": 2, "V100": 4}, None)
    assert (placed.slots, placed.epoch) == (("split-T4-0", "split-V100-0", "split-T4-1"), 5)


def test_more_stages_than_slots_are_refused() -> None:
    with pytest.raises(PlanError, match="4 stages on T4, which has 3 slots"):
        place(chain(("T4", 1), ("T4", 1), ("T4", 1), ("T4", 1)), T4_ONLY, None)


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


Slots = Mapping[str, int]
SWITCH = ["prepare", "switch"]


@pytest.mark.parametrize(
    ("before", "after", "count", "running", "log"),
    [
        pytest.param(
            {"T4-0": 2, "T4-1": 2},
            {"T4-0": 4, "T4-1": 1},
            6,
            {},
            ["T4-0=4", "await T4-0=4", *SWITCH, "drain", "T4-1=1"],
            id="grows before the switch and shrinks after the drain",
        ),
        pytest.param(
            {"T4-0": 4, "T4-1": 3},
            {"T4-0": 1, "T4-1": 5},
            8,
            {},
            ["T4-0=3", "T4-1=5", "await T4-1=5", *SWITCH, "drain", "T4-0=1"],
            id="a donor gives up just what is needed",
        ),
        pytest.param(
            {"T4-0": 8, "T4-1": 4, "T4-2": 1},
            {"T4-0": 1, "T4-1": 1, "T4-2": 11},
            17,
            {},
            ["T4-0=4", "T4-1=2", "T4-2=11", "await T4-2=11", *SWITCH, "drain", "T4-0=1", "T4-1=1"],
            id="of several donors each keeps about the same share",
        ),
        pytest.param(
            {"T4-0": 3},
            {"T4-0": 1, "T4-1": 2},
            5,
            {"T4-2": 2},
            ["T4-2=0", "T4-1=2", "await T4-1=2", *SWITCH, "drain", "T4-0=1"],
            id="idle replicas give up theirs first",
        ),
        pytest.param(
            {"T4-0": 1, "T4-1": 1, "T4-2": 1},
            {"T4-0": 3},
            3,
            {},
            [*SWITCH, "drain", "T4-1=0", "T4-2=0", "T4-0=3", "await T4-0=3", "prepare"],
            id="the present plan keeps a replica per slot",
        ),
        pytest.param(
            {"T4-0": 1, "T4-1": 2},
            {"T4-0": 2, "T4-2": 1},
            3,
            {},
            ["T4-1=1", "T4-2=1", "await T4-2=1", *SWITCH, "drain", "T4-1=0", "T4-0=2", "await T4-0=2", "prepare"],
            id="a slot that has nothing gets a replica before others grow",
        ),
        pytest.param(
            {"T4-0": 1},
            {"T4-1": 1},
            1,
            {},
            ["T4-0=0", "T4-1=1", "await T4-1=1", *SWITCH],
            id="the present plan loses a slot where nothing else is left",
        ),
        pytest.param({"T4-0": 3}, {"T4-0": 3}, 3, {"T4-0": 2}, ["T4-0=3", "await T4-0=3", *SWITCH], id="one died"),
        pytest.param(
            {"T4-0": 3, "T4-1": 1}, {"T4-0": 2, "T4-1": 1}, 3, {"T4-0": 2}, ["T4-0=2", *SWITCH], id="one is lost"
        ),
        pytest.param(
            {"T4-0": 3, "T4-1": 1},
            {"T4-0": 3, "T4-1": 1},
            5,
            {"T4-0": 2, "T4-1": 2, "T4-2": 1},
            ["T4-2=0", "T4-0=3", "await T4-0=3", *SWITCH, "drain", "T4-1=1"],
            id="a change-over was left half way",
        ),
    ],
)
def test_a_change_over(before: Slots, after: Slots, count: int, running: Slots, log: list[str]) -> None:
    present = on_slots(before)
    now = {**present.occupied, **{f"split-{slot}": each for slot, each in running.items()}}
    assert told(steps(present, on_slots(after, epoch=1), {"T4": count}, now)) == log


def test_a_first_plan_starts_all_it_needs() -> None:
    found = steps(None, on_slots({"T4-0": 2, "V100-0": 1}), {"T4": 2, "V100": 1}, {})
    assert told(found) == ["T4-0=2", "V100-0=1", "await T4-0=2 V100-0=1", "prepare", "switch"]


def test_an_avoided_replica_keeps_its_accelerator_and_its_slot_one_that_works() -> None:
    before = on_slots({"T4-0": 3, "T4-1": 1})
    after = on_slots({"T4-0": 2, "T4-1": 1}, epoch=1, avoided={"slow": "T4-0"})
    assert told(steps(before, after, {"T4": 4}, before.occupied)) == SWITCH
    before, after = on_slots({"T4-0": 2, "T4-1": 1}, avoided={"slow": "T4-0"}), on_slots({"T4-1": 2}, epoch=1)
    found = steps(before, after, {"T4": 4}, before.occupied)
    assert told(found) == ["T4-0=2", "T4-1=2", "await T4-1=2", *SWITCH, "drain", "T4-0=0"]


def test_the_same_plan_is_only_mended() -> None:
    placed = on_slots({"T4-0": 2, "T4-1": 1})
    assert steps(placed, placed, {"T4": 4}, placed.occupied) == ()
    assert told(steps(placed, placed, {"T4": 4}, {**placed.occupied, "split-T4-2": 1})) == ["T4-2=0"]
    assert told(steps(placed, placed, {"T4": 4}, {**placed.occupied, "split-T4-0": 1})) == [
        "T4-0=2",
        "await T4-0=2",
        "prepare",
    ]


def test_replicas_that_were_asked_for_before_are_waited_for_if_they_are_needed() -> None:
    before, after = on_slots({"T4-0": 4}), on_slots({"T4-0": 3, "T4-1": 1}, epoch=1)
    running, coming = {"split-T4-0": 3, "split-T4-1": 0}, {"split-T4-0": 3, "split-T4-1": 1}
    found = steps(before, after, {"T4": 4}, running, coming)
    assert told(found) == ["T4-0=3", "T4-1=1", "await T4-1=1", *SWITCH]
    elsewhere = on_slots({"T4-0": 3, "T4-2": 1}, epoch=1)
    assert told(steps(before, elsewhere, {"T4": 4}, running, coming))[:2] == ["T4-0=3", "T4-1=0"]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PlanError, match="need 4 T4, there are 3"):
        steps(None, on_slots({"T4-0": 3}, avoided={"slow": "T4-0"}), {"T4": 3}, {})
    with pytest.raises(PlanError, match="none of the accelerator types"):
        steps(None, on_slots({"T4-0": 1}), {"V100": 3}, {})
