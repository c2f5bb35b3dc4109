"""A placed plan as whoever sends inputs through it needs it: which slot takes which block, and what it takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from deployments.ingress.core.routing import weight_of
from deployments.messages import Assignment
from earlyexit.errors import PlanError
from earlyexit.split import Budget
from optimizer.placement import PlacedPlan
from optimizer.plan import Stage

W = TypeVar("W")
"""The way to a stage: the live service's is a `Transport`."""

SMOOTHING = 0.1
"""Weight of the newest call in what a stage is expected to take."""


class Sized(Protocol):
    """An input, as far as it fills a batch."""

    @property
    def tokens(self) -> int: ...


@dataclass(slots=True, kw_only=True, eq=False)
class Leg(Generic[W]):
    """One stage of a plan on its slot."""

    index: int
    slot: str
    stage: Stage
    assignment: Assignment
    """Made once per plan: every call to the stage carries it."""
    transport: W
    budgets: tuple[Budget, ...]
    """Of the splits' batches, by the stage's blocks."""
    expected_s: float
    """What a call takes until its inputs are answered or go on; 0 while nothing is known."""

    @property
    def epoch(self) -> int:
        return self.assignment.epoch

    @property
    def num_blocks(self) -> int:
        return self.stage.end - self.stage.first

    def weigh(self, block: int, inputs: Sequence[Sized]) -> tuple[int, int]:
        """What inputs that wait for a block weigh, as one piece, and what a full batch there does; see `weight_of`."""
        budget = self.budgets[block - self.stage.splits[0].first]
        tokens = 0 if budget.tokens is None else sum([each.tokens for each in inputs])
        return weight_of(budget, len(inputs), tokens)

    def learn(self, took_s: float) -> None:
        """Take note of a part of a call's reply, in which inputs were answered or go on."""
        self.expected_s += (SMOOTHING if self.expected_s else 1.0) * (took_s - self.expected_s)


class Itinerary(Generic[W]):
    """The stages of one plan, in their order."""

    def __init__(self, placed: PlacedPlan, legs: tuple[Leg[W], ...]) -> None:
        self.placed = placed
        self.legs = legs
        self.order = placed.plan.order.build()
        self.avoided = placed.avoided_ids
        self.ramps = frozenset(placed.plan.ramps)
        self.stays = placed.plan.after_answer == "stay"
        self.last_split = placed.plan.splits[-1].first
        self._later = tuple(legs[leg.index + 1 :] for leg in legs)
        self._leg_of = tuple(leg for leg in legs for _ in range(leg.num_blocks))

    @property
    def epoch(self) -> int:
        return self.placed.epoch

    @property
    def first(self) -> Leg[W]:
        return self.legs[0]

    def at(self, block: int) -> Leg[W]:
        """The stage that hosts a block."""
        return self._leg_of[block]

    def reserve_s(self, leg: Leg[W]) -> float:
        """What the stages after this one are expected to take; infinite where a stage might wait, not knowing."""
        sum_s = 0.0
        for later in self._later[leg.index]:
            if not later.expected_s and leg.assignment.dispatch == "deferred":
                return math.inf
            sum_s += later.expected_s
        return sum_s


def lay_out(placed: PlacedPlan, transports: Mapping[str, W], before: Itinerary[W] | None = None) -> Itinerary[W]:
    """A plan's itinerary, with what the one before it has learnt.

    Raises PlanError for a slot that nobody can reach, and for a plan of another model.
    """
    missing = sorted(set(placed.slots) - set(transports))
    if missing:
        raise PlanError(f"the plan needs slots {missing}; there are {sorted(transports)}")
    plan = placed.plan
    if before is not None and before.placed.plan.num_blocks != plan.num_blocks:
        raise PlanError(f"a plan of {plan.num_blocks} blocks cannot follow one of {before.placed.plan.num_blocks}")
    block_s = [0.0] * plan.num_blocks if before is None else seconds_per_block(before)
    legs = (
        Leg(
            index=index,
            slot=slot,
            stage=stage,
            assignment=Assignment.of(plan, stage),
            transport=transports[slot],
            budgets=tuple(split.budget for split in stage.splits for _ in range(split.first, split.end)),
            expected_s=sum(block_s[stage.first : stage.end]),
        )
        for index, (slot, stage) in enumerate(zip(placed.slots, plan.stages, strict=True))
    )
    return Itinerary(placed, tuple(legs))


def seconds_per_block(itinerary: Itinerary[W]) -> list[float]:
    """Every stage's expected time, spread evenly over its blocks.

    From it follows what a new plan's stages take until they were seen: exact for those that stay as they are, near
    enough for the others.
    """
    return [leg.expected_s / leg.num_blocks for leg in itinerary.legs for _ in range(leg.num_blocks)]
