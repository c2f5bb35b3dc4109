"""Numbers of replicas in changes of plans: literal cases, and properties of random changes."""

from __future__ import annotations

from collections.abc import Mapping

from numpy.random import Generator, default_rng

from deployments.controller.decide import due_requests
from earlyexit.network.boundary import Split
from optimizer.plans.plan import PlacedPlan, Plan, Stage

Counts = Mapping[str, int]


def placed(*stages: tuple[str, int], epoch: int = 0, avoided: Mapping[str, str] | None = None) -> PlacedPlan:
    """Returns a plan with a stage of one block for each (accelerator type, replicas)."""
    made = (
        Stage(device=device, replicas=replicas, splits=(Split(first=block, end=block + 1, batch=4),))
        for block, (device, replicas) in enumerate(stages)
    )
    return PlacedPlan(plan=Plan(stages=tuple(made), epoch=epoch), avoided=avoided or {})


def log(before: PlacedPlan | None, after: PlacedPlan, running: Counts | None = None, **starting: int) -> list[str]:
    """Returns the requests before the switch and after the drain. By default, the replicas of `before` are running.

    `starting`: the numbers that an earlier change has requested.
    """
    occupied = {} if before is None else before.occupied
    now, requested = {**occupied, **(running or {})}, {**occupied, **starting}
    first = due_requests(after.occupied, now, requested, may_shrink=False)
    last = due_requests(after.occupied, now | first, now | first, may_shrink=True)
    return [" ".join(f"{device}={each}" for device, each in numbers.items()) for numbers in (first, last)]


def test_a_change_starts_no_replica_that_moves_to_another_stage() -> None:
    grown = placed(("T4", 4), ("V100", 1), epoch=1)
    # With the same counts nothing starts. Otherwise a type grows before the switch, or shrinks after the drain.
    assert log(placed(("T4", 2), ("T4", 2)), placed(("T4", 3), ("T4", 1), epoch=1)) == ["", ""]
    assert log(placed(("T4", 2), ("V100", 2)), grown) == ["T4=4", "V100=1"]
    # An avoided replica keeps its accelerator.
    assert log(placed(("T4", 3)), placed(("T4", 1), ("T4", 2), epoch=1, avoided={"slow": "T4"})) == ["T4=4", ""]
    assert log(None, placed(("T4", 2))) == ["T4=2", ""]
    # The earlier requests are unknown.
    assert log(None, placed(("T4", 2)), {"T4": 2, "V100": 1}) == ["T4=2", "V100=0"]
    # The same plan, while one type is unused.
    assert log(placed(("T4", 3)), placed(("T4", 3)), {"T4": 3, "V100": 1}) == ["", "V100=0"]
    # A lost replica does not return, and a starting one is not requested again.
    assert log(placed(("T4", 3)), placed(("T4", 2), epoch=1), {"T4": 2}) == ["T4=2", ""]
    assert log(placed(("T4", 4)), grown, {"V100": 0}, V100=1)[0] == ""
    # A replica that was requested for a plan that was given up no longer starts after the change.
    given_up = {"T4": 2}, {"T4": 2, "V100": 0}, {"T4": 2, "V100": 1}
    assert [due_requests(*given_up, may_shrink=may_shrink) for may_shrink in (False, True)] == [{}, {"V100": 0}]


def random_plan(rng: Generator, counts: Counts, *, epoch: int) -> PlacedPlan:
    stages: list[tuple[str, int]] = []
    for device, count in counts.items():
        left = int(rng.integers(0 if stages else 1, count + 1))
        while left:
            stages.append((device, int(rng.integers(1, left + 1))))
            left -= stages[-1][1]
    free = [device for device, count in counts.items() if sum(n for each, n in stages if each == device) < count]
    slow = {"slow": str(rng.choice(free))} if free and rng.random() < 0.3 else None
    return placed(*(stages[index] for index in rng.permutation(len(stages))), epoch=epoch, avoided=slow)


def test_no_plan_lacks_replicas_during_a_change() -> None:
    """Includes changes that continue an interrupted one."""
    started = 0
    for seed in range(400):
        rng = default_rng(seed)
        counts = {device: int(rng.integers(1, 8)) for device in ("T4", "V100")[: rng.integers(1, 3)]}
        before, after = (random_plan(rng, counts, epoch=epoch) for epoch in (0, 1))
        now = {device: int(rng.integers(0, count + 1)) for device, count in counts.items()}
        if rng.random() < 0.5:
            now = {device: before.occupied.get(device, 0) for device in counts}
        known = before.occupied if rng.random() < 0.9 else {}
        requested = {device: number for device, number in known.items() if now[device] == number}
        at_once = int(rng.integers(1, 4)) if rng.random() < 0.5 else None
        while numbers := due_requests(after.occupied, now, requested, at_once=at_once, may_shrink=False):
            for device, number in numbers.items():
                assert now[device] <= number <= after.occupied[device], "nothing is taken from a plan that is followed"
                assert number - now[device] <= (at_once or counts[device]), seed
                started += number - now[device]
            now, requested = now | numbers, requested | numbers
        assert all(now[device] >= each for device, each in after.occupied.items()), seed
        now |= due_requests(after.occupied, now, now, may_shrink=True)
        assert {device: each for device, each in now.items() if each} == after.occupied, seed
    assert started > 100
