"""What holds in every change-over, on random ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property

import pytest
from numpy.random import Generator, default_rng

from optimizer.live.changeover import Await, ChangeStep, Scale, Switch, place, steps
from optimizer.placement import PlacedPlan, slot_name
from tests.optimizer.live.plans import on_random_slots, random_chain


@dataclass(frozen=True)
class Case:
    """A random change-over with all it starts from."""

    before: PlacedPlan | None
    after: PlacedPlan
    counts: dict[str, int]
    running: dict[str, int]

    @cached_property
    def found(self) -> tuple[ChangeStep, ...]:
        return steps(self.before, self.after, self.counts, self.running)

    def levels(self) -> Iterator[tuple[ChangeStep | None, dict[str, int]]]:
        """What the slots run after each step."""
        now = dict(self.running)
        yield None, dict(now)
        for step in self.found:
            if isinstance(step, Scale):
                now[step.slot] = step.replicas
            yield step, dict(now)

    def of_type(self, device: str, levels: Mapping[str, int]) -> dict[str, int]:
        names = {slot_name(device, index) for index in range(9)}
        return {slot: each for slot, each in levels.items() if slot in names}


@cache
def interrupted_case(seed: int) -> Case:
    """What runs is not what the plan before asks for: a change-over broke off, or replicas died."""
    case, rng = random_case(seed), default_rng(seed)
    running = {slot: int(rng.integers(0, each + 1)) for slot, each in case.running.items()}
    for device, count in case.counts.items():
        free = count - sum(case.of_type(device, running).values())
        running[slot_name(device, int(rng.integers(0, 4)))] = int(rng.integers(0, free + 1))
    counts = {device: max(count, sum(case.of_type(device, running).values())) for device, count in case.counts.items()}
    return Case(before=case.before, after=case.after, counts=counts, running=running)


@cache
def random_case(seed: int, *, keeping_slots: bool = False, with_avoided: bool = True) -> Case:
    rng = default_rng(seed)
    counts = {device: int(rng.integers(1, 8)) for device in ("T4", "V100")[: rng.integers(1, 3)]}
    slots = {device: int(rng.integers(1, 5)) for device in counts}
    before = on_random_slots(rng, random_chain(rng, counts, slots), slots)
    plan = random_chain(rng, counts, slots, epoch=1)
    after = place(plan, slots, before) if keeping_slots else on_random_slots(rng, plan, slots)
    running = dict(before.occupied)
    if with_avoided and rng.random() < 0.4:
        after = with_avoided_ones(rng, after, before, counts)
    for device in counts:
        idle = [slot_name(device, index) for index in range(slots[device])]
        idle = [slot for slot in idle if slot not in before.slots]
        free = counts[device] - sum(each for slot, each in running.items() if slot.startswith(f"split-{device}-"))
        if idle and free and rng.random() < 0.4:
            running[str(rng.choice(idle))] = int(rng.integers(1, free + 1))
    return Case(before=None if rng.random() < 0.1 else before, after=after, counts=counts, running=running)


def with_avoided_ones(rng: Generator, after: PlacedPlan, before: PlacedPlan, counts: Mapping[str, int]) -> PlacedPlan:
    """One running replica of a type that has room for it gets no work."""
    for slot in rng.permutation(before.slots).tolist():
        device = slot.split("-")[1]
        used = sum(stage.replicas for stage in after.plan.stages if stage.device == device)
        if used < counts[device]:
            return PlacedPlan(plan=after.plan, slots=after.slots, avoided={"slow": slot})
    return after


SEEDS = range(400)
ALL_CASES = pytest.mark.parametrize("make", [random_case, interrupted_case], ids=["whole", "interrupted"])


@ALL_CASES
def test_there_are_never_more_replicas_than_accelerators(make: Callable[[int], Case]) -> None:
    for case in map(make, SEEDS):
        for _, levels in case.levels():
            for device, count in case.counts.items():
                assert sum(case.of_type(device, levels).values()) <= count


@ALL_CASES
def test_in_the_end_every_slot_runs_what_the_plan_needs(make: Callable[[int], Case]) -> None:
    for case in map(make, SEEDS):
        *_, (_, levels) = case.levels()
        assert {slot: each for slot, each in levels.items() if each} == case.after.occupied
        asked = dict(case.before.occupied) if case.before is not None else {}
        asked |= {step.slot: step.replicas for step in case.found if isinstance(step, Scale)}
        assert all(asked.get(slot, case.running.get(slot)) == each for slot, each in case.after.occupied.items())


@ALL_CASES
def test_at_the_switch_every_stage_has_a_replica_that_works(make: Callable[[int], Case]) -> None:
    for case in map(make, SEEDS):
        spare = {slot: each - case.after.replicas.get(slot, 0) for slot, each in case.after.occupied.items()}
        for step, levels in case.levels():
            if isinstance(step, Switch):
                assert all(levels[slot] - spare[slot] >= 1 for slot in case.after.slots)


def test_at_the_switch_everything_is_there_unless_the_present_plan_would_lose_a_slot() -> None:
    late = 0
    for case in map(random_case, SEEDS):
        at_switch = next(levels for step, levels in case.levels() if isinstance(step, Switch))
        for device, count in case.counts.items():
            running, needed = case.of_type(device, case.running), case.of_type(device, case.after.occupied)
            missing = sum(max(0, each - running.get(slot, 0)) for slot, each in needed.items())
            if missing <= count - sum(running.values()) + could_give(case, running, needed):
                assert all(at_switch[slot] >= each for slot, each in needed.items())
            else:
                late += 1
    assert late > 10


def test_before_the_switch_the_present_plan_keeps_its_slots_unless_the_next_would_have_an_empty_one() -> None:
    lost = 0
    for case in map(random_case, SEEDS):
        for device, count in case.counts.items():
            running, needed = case.of_type(device, case.running), case.of_type(device, case.after.occupied)
            spare = {slot: needed[slot] - case.after.replicas[slot] for slot in needed if slot in case.after.slots}
            empty = sum(max(0, spare[slot] + 1 - running.get(slot, 0)) for slot in spare)
            possible = empty <= count - sum(running.values()) + could_give(case, running, needed)
            kept = all(min_before_switch(case, slot) >= 1 for slot in working_slots(case, device))
            assert kept or not possible
            lost += not kept
    assert lost > 0


def test_no_plan_that_kept_its_slots_makes_the_present_one_lose_any() -> None:
    for seed in SEEDS:
        case = random_case(seed, keeping_slots=True, with_avoided=False)
        for device in case.counts:
            assert all(min_before_switch(case, slot) >= 1 for slot in working_slots(case, device))


def test_before_the_switch_no_more_is_given_up_than_is_needed() -> None:
    for case in map(random_case, SEEDS):
        at_switch = next(levels for step, levels in case.levels() if isinstance(step, Switch))
        for device, count in case.counts.items():
            given = sum(max(0, each - at_switch[slot]) for slot, each in case.of_type(device, case.running).items())
            assert given == 0 or sum(case.of_type(device, at_switch).values()) == count


def test_every_replica_that_starts_is_awaited_and_prepared() -> None:
    for case in map(random_case, SEEDS):
        open_slots: dict[str, int] = {}
        running = dict(case.running)
        for step in case.found:
            match step:
                case Scale(slot=slot, replicas=replicas):
                    if replicas > running.get(slot, 0):
                        open_slots[slot] = replicas
                    running[slot] = replicas
                case Await(replicas=awaited):
                    assert awaited == open_slots
                    open_slots = {}
                case _:
                    assert open_slots == {}
        assert open_slots == {}


def could_give(case: Case, running: Mapping[str, int], needed: Mapping[str, int]) -> int:
    """Replicas that the other slots can do without while each of the present plan keeps one."""
    floors = dict.fromkeys(case.before.slots, 1) if case.before else {}
    return sum(max(0, each - max(needed.get(slot, 0), floors.get(slot, 0))) for slot, each in running.items())


def working_slots(case: Case, device: str) -> list[str]:
    return [] if case.before is None else list(case.of_type(device, case.before.replicas))


def min_before_switch(case: Case, slot: str) -> int:
    least = case.running[slot]
    for step, levels in case.levels():
        least = min(least, levels[slot])
        if isinstance(step, Switch):
            break
    return least


def test_replicas_that_still_start_hold_their_accelerators_and_are_waited_for() -> None:
    for seed in SEEDS:
        case, rng = interrupted_case(seed), default_rng(seed)
        running = {slot: int(rng.integers(0, each + 1)) for slot, each in case.running.items()}
        told = dict(case.running)
        for step in steps(case.before, case.after, case.counts, running, case.running):
            if isinstance(step, Scale):
                told[step.slot] = step.replicas
                running[step.slot] = min(running.get(step.slot, 0), step.replicas)
            elif isinstance(step, Await):
                running |= step.replicas
            elif isinstance(step, Switch):
                spare = {slot: each - case.after.replicas.get(slot, 0) for slot, each in case.after.occupied.items()}
                assert all(running.get(slot, 0) - spare[slot] >= 1 for slot in case.after.slots)
            for device, count in case.counts.items():
                assert isinstance(step, Scale) or sum(case.of_type(device, told).values()) <= count
        assert {slot: each for slot, each in told.items() if each} == case.after.occupied
