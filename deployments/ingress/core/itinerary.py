"""A placed plan as whoever sends inputs through it needs it: which slot takes which block, and what it takes."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar

from deployments.ingress.core.homes import Layout
from deployments.ingress.core.routing import weight_of
from deployments.messages import Assignment
from earlyexit.errors import ExecutionError, PlanError
from earlyexit.split import Budget, Split
from optimizer.placement import PlacedPlan
from optimizer.plan import Plan, Stage

W = TypeVar("W")
"""The way to a stage: the live service's is a `Transport`."""

SMOOTHING = 0.1
"""Weight of the newest call in what a stage is expected to take."""


class Sized(Protocol):
    """An input, as far as it fills a batch."""

    @property
    def tokens(self) -> int: ...


class Crossing(NamedTuple):
    """Where inputs enter a network: encoded anew, before its first block."""

    block: int
    network: int
    """Its place in the chain."""


@dataclass(slots=True, kw_only=True, eq=False)
class Leg(Generic[W]):
    """One stage of a plan on its slot; of a stage with blocks of several networks, those of one."""

    index: int
    slot: str
    first: int
    """Its first block."""
    stage: Stage
    assignment: Assignment
    """Made once per plan: every call to the stage carries it."""
    transport: W
    budgets: tuple[Budget, ...]
    """Of the splits' batches, by its blocks."""
    expected_s: float
    """What a call takes until its inputs are answered or go on; 0 while nothing is known."""

    @property
    def epoch(self) -> int:
        return self.assignment.epoch

    @property
    def num_blocks(self) -> int:
        return len(self.budgets)

    def weigh(self, block: int, inputs: Sequence[Sized]) -> tuple[int, int]:
        """What inputs that wait for a block weigh, as one piece, and what a full batch there does; see `weight_of`."""
        budget = self.budgets[block - self.first if block > self.first else 0]
        tokens = 0 if budget.tokens is None else sum([each.tokens for each in inputs])
        return weight_of(budget, len(inputs), tokens)

    def learn(self, took_s: float) -> None:
        """Take note of a part of a call's reply, in which inputs were answered or go on."""
        self.expected_s += (SMOOTHING if self.expected_s else 1.0) * (took_s - self.expected_s)


class Itinerary(Generic[W]):
    """The stages of one plan, in their order."""

    def __init__(self, placed: PlacedPlan, legs: tuple[Leg[W], ...], block_s: Sequence[float]) -> None:
        """`block_s`: what blocks were expected to take before, those too that this plan leaves out."""
        self.placed = placed
        self.legs = legs
        self.order = placed.plan.order.build()
        self.avoided = placed.avoided_ids
        self.ramps = frozenset(placed.plan.ramps)
        self.stays = placed.plan.after_answer == "stay"
        self.last_split = placed.plan.splits[-1].first
        plan = placed.plan
        self.entry = plan.entry
        self.used = plan.used
        self.network = self.used[0]
        """Which inputs enter first."""
        self.crossings: Mapping[int, Crossing] = crossings_of(plan)
        """Where survivors go that wait for a block to which no hidden state can be sent: a network's first, and any of
        a network that the plan leaves out. None where there is one network."""
        self._all_crossings = crossings_of_all(plan)
        self._block_s = tuple(block_s)
        self._later = tuple(legs[leg.index + 1 :] for leg in legs)
        self.layout: Layout = tuple((leg.slot, leg.first, leg.first + leg.num_blocks) for leg in legs)
        """Where sequences have their keys and values."""
        hosting = {leg.first + k: leg for leg in legs for k in range(leg.num_blocks)}
        self._leg_of = tuple(hosting[self.hosted(block)] for block in range(plan.num_blocks))

    @property
    def epoch(self) -> int:
        return self.placed.epoch

    @property
    def first(self) -> Leg[W]:
        return self.legs[0]

    def check(self, block: int) -> None:
        """Raise ExecutionError for a block that the model does not have."""
        if not 0 <= block < len(self._leg_of):
            raise ExecutionError(f"a reply names block {block}; the model has blocks 0 to {len(self._leg_of) - 1}")

    def at(self, block: int) -> Leg[W]:
        """The stage that hosts a block; of a network that is left out, the one that hosts the next one's first."""
        return self._leg_of[block]

    def crossing(self, block: int, *, probe: bool) -> Crossing | None:
        """Where those enter a network that wait for a block; None where hidden states go on. Probes enter all."""
        return (self._all_crossings if probe else self.crossings).get(block)

    def entrance(self, *, probe: bool) -> tuple[int, None, int]:
        """The block at which new inputs enter, that they bring nothing, and the network; probes enter the first."""
        return (0, None, 0) if probe else (self.entry, None, self.network)

    def hosted(self, block: int) -> int:
        """Where inputs go on that wait for a block: there or, if its network is left out, at the next one's start."""
        crossing = self.crossings.get(block)
        return block if crossing is None else crossing.block

    @property
    def seconds_per_block(self) -> list[float]:
        """Every stage's expected time, spread evenly over its blocks; of blocks that none hosts, what was known before.

        From it follows what a new plan's stages take until they were seen: exact for those that stay as they are, near
        enough for the others.
        """
        block_s = list(self._block_s)
        for leg in self.legs:
            block_s[leg.first : leg.first + leg.num_blocks] = [leg.expected_s / leg.num_blocks] * leg.num_blocks
        return block_s

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
    if before is not None:
        _check_follows(plan, before.placed.plan)
    block_s = [0.0] * plan.num_blocks if before is None else before.seconds_per_block
    legs: list[Leg[W]] = []
    for slot, stage in zip(placed.slots, plan.stages, strict=True):
        assignment = Assignment.of(plan, stage)
        for splits in _by_network(stage, plan.networks):
            first, end = splits[0].first, splits[-1].end
            leg = Leg(
                index=len(legs),
                slot=slot,
                first=first,
                stage=stage,
                assignment=assignment,
                transport=transports[slot],
                budgets=tuple(split.budget for split in splits for _ in range(split.first, split.end)),
                expected_s=sum(block_s[first:end]),
            )
            legs.append(leg)
    return Itinerary(placed, tuple(legs), block_s)


def crossings_of(plan: Plan) -> dict[int, Crossing]:
    """By block, where who waits for it enters a network: the block's own, or the next that is used."""
    found: dict[int, Crossing] = {}
    used, starts = plan.used, (0, *plan.networks[:-1])
    for network, (start, end) in enumerate(zip(starts, plan.networks, strict=False)):
        entered = next(each for each in used if each >= network)
        for block in range(start, start + 1 if entered == network else end):
            found[block] = Crossing(starts[entered], entered)
    return found


def crossings_of_all(plan: Plan) -> dict[int, Crossing]:
    """By block, the network that probes enter there: every one, used or not, for what it would answer."""
    starts = (0, *plan.networks[:-1]) if plan.networks else ()
    return {start: Crossing(start, network) for network, start in enumerate(starts)}


def _by_network(stage: Stage, networks: Sequence[int]) -> list[list[Split]]:
    """A stage's splits, those of every network together."""
    by_network: dict[int, list[Split]] = {}
    for split in stage.splits:
        by_network.setdefault(bisect_right(networks, split.first), []).append(split)
    return list(by_network.values())


def _check_follows(plan: Plan, before: Plan) -> None:
    if before.num_blocks != plan.num_blocks:
        raise PlanError(f"a plan of {plan.num_blocks} blocks cannot follow one of {before.num_blocks}")
    if before.networks != plan.networks:
        ends = list(plan.networks), list(before.networks)
        raise PlanError(f"a plan of networks that end at {ends[0]} cannot follow one of {ends[1]}")
