"""From one plan on slots to the next: which slot hosts which stage, and the steps of the change.

Stages get the slots that start the fewest replicas. Neither plan lacks replicas while it is followed: slots grow first
where accelerators are free. Where not all can grow, slots that the next plan needs less of give up just what is needed,
and none of the present plan its last working replica if that can be helped. A slot that cannot grow even so has at
least one replica at the switch, and the rest once the present plan's last input is answered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from earlyexit.errors import PlanError
from optimizer.placement import PlacedPlan, initial_placement, is_slot_of, slot_name
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
        _check_slots(device, num_stages, slots.get(device, 0))
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


def _check_slots(device: str, num_stages: int, num_slots: int) -> None:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Have a slot run so many replicas, avoided ones among them."""

    slot: str
    replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Await:
    """Wait until slots run at least so many replicas."""

    replicas: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Prepare:
    """Have every replica of the next plan make ready for its assignment, while it serves."""


@dataclass(frozen=True, slots=True)
class Switch:
    """Have every ingress follow the next plan."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Wait until no input is under way by an earlier plan."""


ChangeStep = Scale | Await | Prepare | Switch | Drain


def steps(
    before: PlacedPlan | None,
    after: PlacedPlan,
    counts: Mapping[str, int],
    running: Mapping[str, int],
    coming: Mapping[str, int] | None = None,
) -> tuple[ChangeStep, ...]:
    """What leads from `before`, with the replicas that run now, to `after`, on so many accelerators per type.

    `running` may name slots of no plan: idle ones, which give up theirs first. `coming` counts starting replicas too:
    they have accelerators, but are waited for; None: there are none. Where `before` is `after` only what is missing, or
    too much, is scaled. A slot that runs other than its plan asks for is told again. Raises PlanError where `after` and
    its avoided replicas need more accelerators than there are.
    """
    coming = running if coming is None else coming
    target: dict[str, int] = {}
    at_switch: dict[str, int] = {}
    floors = _floors(before)
    for device, slots in _by_type(before, after, counts, coming).items():
        needed = {slot: after.occupied.get(slot, 0) for slot in slots}
        _check_enough(device, sum(needed.values()), counts[device])
        target |= needed
        now = _occupied_now(needed, floors, before, coming, counts[device])
        at_switch |= needed if before == after else _at_switch(now, needed, floors, after, counts[device])
    course = _Course.of(before, running, coming, target)
    ahead = course.to(at_switch)
    if before == after:
        return (*ahead, Prepare()) if any(isinstance(step, Await) for step in ahead) else ahead
    rest = course.to(target)
    late = (Drain(), *rest, Prepare()) if any(isinstance(step, Await) for step in rest) else (Drain(), *rest)
    return (*ahead, Prepare(), Switch(), *(late if rest else ()))


@dataclass(slots=True)
class _Course:
    """What slots were told so far, what they run then, and what they shall run in the end."""

    now: dict[str, int]
    told: dict[str, int | None]
    """None: not known, so they are told whatever it is."""
    target: Mapping[str, int]

    @classmethod
    def of(
        cls, before: PlacedPlan | None, running: Mapping[str, int], coming: Mapping[str, int], target: Mapping[str, int]
    ) -> _Course:
        plan: Mapping[str, int | None] = {} if before is None else dict(before.occupied)
        idle = {slot: None if replicas else 0 for slot, replicas in coming.items() if slot not in plan}
        starting = {slot: replicas for slot, replicas in coming.items() if replicas > running.get(slot, 0)}
        return cls(now=dict(running), told={**plan, **idle, **starting}, target=target)

    def to(self, levels: Mapping[str, int]) -> tuple[ChangeStep, ...]:
        """Scale slots to these levels, those that shrink first, and wait for those of the next plan that grow."""
        growing = {slot: level for slot, level in sorted(levels.items()) if level > self.now.get(slot, 0)}
        scales = [
            Scale(slot=slot, replicas=level)
            for slot, level in sorted(levels.items(), key=lambda item: (item[0] in growing, item[0]))
            if self._must_tell(slot, level)
        ]
        due = {slot: min(level, self.target[slot]) for slot, level in growing.items()}
        awaited = {slot: level for slot, level in due.items() if level > self.now.get(slot, 0)}
        self.told |= levels
        self.now |= levels
        return (*scales, Await(replicas=awaited)) if awaited else tuple(scales)

    def _must_tell(self, slot: str, level: int) -> bool:
        """Whether a slot would not run, or keep, this level by itself; one that shrinks later may shrink already."""
        told = self.told.get(slot, 0)
        if level == self.now.get(slot, 0) and level > self.target[slot]:
            return told is not None and told > level
        return not level == self.now.get(slot, 0) == told


def _by_type(
    before: PlacedPlan | None, after: PlacedPlan, counts: Mapping[str, int], running: Mapping[str, int]
) -> dict[str, list[str]]:
    """All slots that anything is known of, per accelerator type."""
    planned = [] if before is None else list(before.occupied)
    types: dict[str, list[str]] = {device: [] for device in counts}
    for slot in sorted({*planned, *after.occupied, *running}):
        device = next((device for device in counts if is_slot_of(device, slot)), None)
        if device is None:
            raise PlanError(f"slot {slot!r} is of none of the accelerator types {sorted(counts)}")
        types[device].append(slot)
    return types


def _check_enough(device: str, needed: int, count: int) -> None:
    if needed > count:
        raise PlanError(f"the plan and its avoided replicas need {needed} {device}, there are {count}")


def _occupied_now(
    needed: Mapping[str, int],
    floors: Mapping[str, int],
    before: PlacedPlan | None,
    running: Mapping[str, int],
    count: int,
) -> dict[str, int]:
    """Replicas that run, or come back by themselves: those that either plan still needs, if they have accelerators."""
    asked = {} if before is None else before.occupied
    now = {slot: running.get(slot, 0) for slot in needed}
    due = {
        slot: max(each, min(asked.get(slot, 0), max(needed[slot], floors.get(slot, 0)))) for slot, each in now.items()
    }
    return due if sum(due.values()) <= count else now


def _floors(before: PlacedPlan | None) -> dict[str, int]:
    """What leaves each slot of the present plan one replica that works."""
    return {} if before is None else {slot: before.occupied[slot] - each + 1 for slot, each in before.replicas.items()}


def _at_switch(
    now: Mapping[str, int], needed: Mapping[str, int], floors: Mapping[str, int], after: PlacedPlan, count: int
) -> dict[str, int]:
    """Replicas per slot when the ingresses switch: as near to what is needed as the present plan's floors allow."""
    levels = dict(now)
    lacking = sum(max(0, needed[slot] - level) for slot, level in now.items())
    _give_up(levels, needed, floors, lacking - (count - sum(levels.values())))
    spared = {slot: needed[slot] - each for slot, each in after.replicas.items() if slot in needed}
    empty = sum(max(0, spared[slot] + 1 - levels[slot]) for slot in spared)
    _give_up(levels, needed, {}, empty - (count - sum(levels.values())))
    for _ in range(min(lacking, count - sum(levels.values()))):
        levels[_neediest(levels, needed, spared)] += 1
    return levels


def _give_up(levels: dict[str, int], needed: Mapping[str, int], floors: Mapping[str, int], num_replicas: int) -> None:
    """Take so many replicas, if there are, from slots that have more than they need.

    Idle ones give first, then the one that keeps the largest share of what it had.
    """
    had = dict(levels)
    for _ in range(num_replicas):
        donors = [slot for slot, level in levels.items() if level > max(needed[slot], floors.get(slot, 0))]
        if not donors:
            return
        levels[max(donors, key=lambda slot: (slot not in floors, (levels[slot] - 1) / had[slot]))] -= 1


def _neediest(levels: Mapping[str, int], needed: Mapping[str, int], spared: Mapping[str, int]) -> str:
    """The stage that has the least share of its working replicas; slots without a stage come last."""

    def has(slot: str) -> float:
        return (levels[slot] - spared[slot]) / (needed[slot] - spared[slot]) if slot in spared else 1.0

    return min((slot for slot, level in levels.items() if level < needed[slot]), key=has)
