"""Which slot hosts which stage of a new plan: the choice that starts the fewest replicas."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from earlyexit.errors import PlanError
from optimizer.placement import PlacedPlan, initial_placement, slot_name
from optimizer.plan import Plan, Stage

IntArray = npt.NDArray[np.int64]


def place(
    plan: Plan, slots: Mapping[str, int], before: PlacedPlan | None, avoided: Mapping[str, str] | None = None
) -> PlacedPlan:
    """Put every stage into a slot of its accelerator type so that the fewest replicas start.

    `slots` counts the slots per type, `avoided` are replicas that get no work, with the slots they are in. All choices
    that start as few stop as few: what a plan has more than the one before is the same for all. Among them, the most
    blocks stay where they are; then earlier stages have lower slots. Without a plan before, the n-th stage of a type
    has its slot n. Raises PlanError where a type has fewer slots than stages.
    """
    avoided = avoided or {}
    needed = Counter(stage.device for stage in plan.stages)
    for device, num_stages in needed.items():
        _check_enough(device, num_stages, slots.get(device, 0))
    if before is None:
        return initial_placement(plan, avoided)
    indices: dict[int, int] = {}
    for device in needed:
        of_type = [number for number, stage in enumerate(plan.stages) if stage.device == device]
        names = [slot_name(device, index) for index in range(slots[device])]
        cost_KS = _cost([plan.stages[number] for number in of_type], names, before, avoided, plan.num_blocks)
        indices.update(zip(of_type, _first_of_cheapest(cost_KS), strict=True))
    chosen_names = tuple(slot_name(stage.device, indices[number]) for number, stage in enumerate(plan.stages))
    return PlacedPlan(plan=plan, slots=chosen_names, avoided=avoided)


def num_started(before: PlacedPlan | None, after: PlacedPlan) -> int:
    """Replicas that a change-over starts; those that it moves from one slot to another are among them."""
    had = {} if before is None else before.occupied
    return sum(max(0, needed - had.get(slot, 0)) for slot, needed in after.occupied.items())


def _check_enough(device: str, num_stages: int, num_slots: int) -> None:
    if num_stages > num_slots:
        raise PlanError(f"{num_stages} stages on {device}, which has {num_slots} slots")


def _cost(
    stages: Sequence[Stage], names: Sequence[str], before: PlacedPlan, avoided: Mapping[str, str], num_blocks: int
) -> IntArray:
    """Of each stage (K) in each slot (S): replicas started first, blocks that move second, as one whole number."""
    stays = Counter(avoided.values())
    cost_KS = np.zeros((len(stages), len(names)), dtype=np.int64)
    for row, stage in enumerate(stages):
        for column, name in enumerate(names):
            had = before.occupied.get(name, 0) - stays[name]
            started = max(0, stage.replicas - max(0, had))
            cost_KS[row, column] = started * (num_blocks + 1) - _shared_blocks(stage, before.stage_of.get(name))
    return cost_KS


def _shared_blocks(stage: Stage, other: Stage | None) -> int:
    ranges = () if other is None else other.ranges
    return sum(max(0, min(a, b) - max(first, start)) for first, a in stage.ranges for start, b in ranges)


def _first_of_cheapest(cost_KS: IntArray) -> list[int]:
    """One slot per stage at the least cost; among the cheapest choices the lexicographically first."""
    least = _least_sum(cost_KS)
    chosen: list[int] = []
    for row in range(len(cost_KS)):
        for column in (each for each in range(cost_KS.shape[1]) if each not in chosen):
            fixed = [*chosen, column]
            spent = sum(int(cost_KS[each, slot]) for each, slot in enumerate(fixed))
            rest_KS = np.delete(cost_KS[row + 1 :], fixed, axis=1)
            if spent + _least_sum(rest_KS) == least:
                chosen.append(column)
                break
    return chosen


def _least_sum(cost_KS: IntArray) -> int:
    from scipy.optimize import linear_sum_assignment  # slow to import

    return int(cost_KS[linear_sum_assignment(cost_KS)].sum())
