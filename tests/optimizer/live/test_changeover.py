"""Changes of plans: literal logs, and properties of random changes."""

from __future__ import annotations

from collections.abc import Mapping

from numpy.random import Generator, default_rng

from earlyexit.network.boundary import Split
from optimizer.live.changeover import Await, ChangeStep, Drain, Scale, Switch, num_started, steps
from optimizer.plans.plan import PlacedPlan, Plan, Stage

Counts = Mapping[str, int]


def placed(*stages: tuple[str, int], epoch: int = 0, avoided: Mapping[str, str] | None = None) -> PlacedPlan:
    """Stages of one block each, as (accelerator type, replicas)."""
    made = (
        Stage(device=device, replicas=replicas, splits=(Split(first=block, end=block + 1, batch=4),))
        for block, (device, replicas) in enumerate(stages)
    )
    return PlacedPlan(plan=Plan(stages=tuple(made), epoch=epoch), avoided=avoided or {})


def line(step: ChangeStep) -> str:
    match step:
        case Scale(device=device, replicas=replicas):
            return f"{device}={replicas}"
        case Await(replicas=awaited):
            return "await " + " ".join(f"{device}={each}" for device, each in awaited.items())
        case _:
            return type(step).__name__.lower()


def log(
    before: PlacedPlan | None, after: PlacedPlan, running: Counts | None = None, coming: Counts | None = None
) -> str:
    """The steps of a change. By default the replicas of the plan before are running."""
    now = {**({} if before is None else before.occupied), **(running or {})}
    return ", ".join(line(each) for each in steps(before, after, {"T4": 9, "V100": 9}, now, coming or now))


def test_a_change_over_starts_no_replica_that_moves_to_another_stage() -> None:
    grown = placed(("T4", 4), ("V100", 1), epoch=1)
    # Within the same counts nothing starts; else a type grows before the switch, and another shrinks after the drain.
    assert log(placed(("T4", 2), ("T4", 2)), placed(("T4", 3), ("T4", 1), epoch=1)) == "prepare, switch"
    assert log(placed(("T4", 2), ("V100", 2)), grown) == "T4=4, await T4=4, prepare, switch, drain, V100=1"
    # An avoided replica keeps its accelerator.
    avoiding = placed(("T4", 1), ("T4", 2), epoch=1, avoided={"slow": "T4"})
    assert log(placed(("T4", 3)), avoiding) == "T4=4, await T4=4, prepare, switch"
    assert log(None, placed(("T4", 2))) == "T4=2, await T4=2, prepare, switch"
    # What ran before is not known.
    assert log(None, placed(("T4", 2)), {"T4": 2, "V100": 1}) == "T4=2, prepare, switch, drain, V100=0"
    # The same plan, where nothing is wrong, where a replica died, and where a type is idle.
    same = placed(("T4", 3))
    assert log(same, same) == ""
    assert log(same, same, {"T4": 2}) == "T4=3, await T4=3, prepare"
    assert log(same, same, {"T4": 3, "V100": 1}) == "V100=0"
    # A replica that was lost does not come back, and one that starts is waited for.
    assert log(same, placed(("T4", 2), epoch=1), {"T4": 2}) == "T4=2, prepare, switch"
    starts = log(placed(("T4", 4)), grown, {"T4": 4, "V100": 0}, {"T4": 4, "V100": 1})
    assert starts == "V100=1, await V100=1, prepare, switch"
    before = placed(("T4", 2), ("T4", 2), ("V100", 1))
    assert num_started(before, placed(("T4", 4), ("V100", 3))) == 2
    assert num_started(None, placed(("T4", 4), ("V100", 3))) == 7


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


def test_in_every_change_over_no_plan_lacks_replicas_and_none_has_too_many() -> None:
    """Includes changes that continue an interrupted one."""
    started = 0
    for seed in range(400):
        rng = default_rng(seed)
        counts = {device: int(rng.integers(1, 8)) for device in ("T4", "V100")[: rng.integers(1, 3)]}
        before, after = (random_plan(rng, counts, epoch=epoch) for epoch in (0, 1))
        running = {device: int(rng.integers(0, count + 1)) for device, count in counts.items()}
        if rng.random() < 0.5:
            running = {device: before.occupied.get(device, 0) for device in counts}
        known = before if rng.random() < 0.9 else None
        now, is_switched, is_drained = dict(running), False, False
        for step in steps(known, after, counts, running):
            match step:
                case Scale(device=device, replicas=replicas):
                    assert replicas == after.occupied.get(device, 0), seed
                    assert is_drained or replicas >= now[device], "nothing is taken from a plan that is followed"
                    started += max(0, replicas - now[device])
                    now[device] = replicas
                case Await(replicas=awaited):
                    assert all(now[device] == each for device, each in awaited.items()), seed
                case Switch():
                    is_switched = True
                    assert all(now[device] >= each for device, each in after.occupied.items()), seed
                case Drain():
                    is_drained = is_switched
                case _:
                    assert not is_switched, seed
        assert is_switched
        assert {device: each for device, each in now.items() if each} == after.occupied, seed
    assert started > 100
