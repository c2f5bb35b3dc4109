"""Plans on slots, hand-made and random, for the tests of what leads from one to another."""

from __future__ import annotations

from collections.abc import Mapping

from numpy.random import Generator

from earlyexit.network.boundary import Split
from optimizer.placement import PlacedPlan, slot_name
from optimizer.plan import Plan, Stage

NUM_BLOCKS = 12


def chain(*stages: tuple[str, int], epoch: int = 0) -> Plan:
    """Stages of one block each, as (accelerator type, replicas)."""
    return Plan(
        stages=tuple(
            Stage(device=device, replicas=replicas, splits=(Split(first=block, end=block + 1, batch=4),))
            for block, (device, replicas) in enumerate(stages)
        ),
        epoch=epoch,
    )


def on_slots(replicas: Mapping[str, int], *, epoch: int = 0, avoided: Mapping[str, str] | None = None) -> PlacedPlan:
    """A stage of one block per slot, in order; slots are named like `T4-0`."""
    plan = chain(*((slot.rpartition("-")[0], each) for slot, each in replicas.items()), epoch=epoch)
    gone = {name: f"split-{slot}" for name, slot in (avoided or {}).items()}
    return PlacedPlan(plan=plan, slots=tuple(f"split-{slot}" for slot in replicas), avoided=gone)


def random_chain(rng: Generator, counts: Mapping[str, int], slots: Mapping[str, int], *, epoch: int = 0) -> Plan:
    """Stages in random order that fit the accelerators and the slots."""
    stages: list[tuple[str, int]] = []
    for device, count in counts.items():
        num_stages = int(rng.integers(1, min(count, slots[device]) + 1))
        spare = int(rng.integers(0, count - num_stages + 1))
        extra = rng.multinomial(spare, [1 / num_stages] * num_stages).tolist()
        stages += [(device, 1 + each) for each in extra]
    return chain(*(stages[index] for index in rng.permutation(len(stages))), epoch=epoch)


def on_random_slots(rng: Generator, plan: Plan, slots: Mapping[str, int]) -> PlacedPlan:
    free = {device: rng.permutation(num).tolist() for device, num in slots.items()}
    return PlacedPlan(
        plan=plan, slots=tuple(slot_name(stage.device, free[stage.device].pop()) for stage in plan.stages)
    )
