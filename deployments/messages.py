"""What ingress and stages say to each other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from earlyexit.engine import Dispatch
from earlyexit.errors import OfframpError
from earlyexit.order import DEFAULT, OrderSpec
from earlyexit.split import Split
from earlyexit.wire import Answer, Seen, WirePiece
from optimizer.dispatch import dispatch_on
from optimizer.plan import Plan, PolicySpec, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a replica takes calls, and the word by which it knows who may call."""

    host: str
    port: int
    word: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """What a replica does under one plan. It travels with every call, so that no replica can be without it."""

    epoch: int
    """The plan it belongs to; a replica follows the highest it has seen."""
    stage: Stage
    policy: PolicySpec | None
    dispatch: Dispatch
    order: OrderSpec = DEFAULT
    detours: tuple[Split, ...] = ()
    """Networks that the plan leaves out, of which probes alone run the blocks here: else nobody would know what they
    would answer."""

    entry: int = 0
    """The block at which new inputs enter the plan."""

    @property
    def known(self) -> tuple[Split, ...]:
        """All that may be asked for under this plan."""
        return (*self.stage.splits, *self.detours)

    @classmethod
    def of(cls, plan: Plan, stage: Stage) -> Assignment:
        """What a plan has one of its stages do."""
        return cls(
            epoch=plan.epoch,
            stage=stage,
            policy=plan.policy,
            dispatch=dispatch_on(stage.device, plan.dispatch),
            order=plan.order,
            detours=_detours(plan, stage),
            entry=plan.entry,
        )


def _detours(plan: Plan, stage: Stage) -> tuple[Split, ...]:
    """The networks left out before those that begin in a stage, each as one split with the batches of what follows."""
    found, end = [], 0
    for split in plan.splits:
        if split in stage.splits:
            skipped = [bound for bound in plan.networks if end < bound <= split.first]
            for first, bound in pairwise((end, *skipped)):
                found.append(replace(split, first=first, end=bound, ramps=()))
        end = split.end
    return tuple(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCall:
    """A batch of inputs, or of survivors, for a stage."""

    piece: WirePiece
    remaining_s: tuple[float, ...]
    """Per input, the seconds left until its deadline; durations, because machines do not share a clock."""
    reserve_s: float
    """What the stages after this one are expected to take, and what is kept in hand."""
    assignment: Assignment
    """What the sender's plan has the stage do."""
    probe: bool = False
    """Whether its inputs are probes: every ramp looks at them, and they go on to the model's end when answered."""
    traced: tuple[int, ...] = ()
    """Positions of the inputs whose runs are to be told."""
    sequences: tuple[int, ...] = ()
    """Per input, the number of the sequence that it belongs to, of which the replica keeps something until it is ended;
    empty where inputs belong to none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Where an input's time in a stage went."""

    queue_s: float
    compute_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRun:
    """What one split of a stage was to an input, in the order of the splits: a wait, then a batch."""

    first: int
    end: int
    batch: int
    """Inputs of the batch."""
    tokens: int
    """Theirs together."""
    target: int
    """What its batches are fused to."""
    queue_s: float
    compute_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GoingOn:
    """Survivors for the next stage."""

    piece: WirePiece
    timings: tuple[Timing, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One part of a stage's streamed reply.

    Every input of the call is in exactly one part, as an answer, among those going on, or lost. What is said early, or
    seen, of inputs that stay comes beside that.
    """

    answers: tuple[tuple[Answer, Timing], ...] = ()
    early: tuple[tuple[Answer, Timing], ...] = ()
    """Answers of inputs that stay inside the model all the same."""
    seen: tuple[Seen, ...] = ()
    """What ramps, and the full model, said of inputs that stay."""
    going_on: GoingOn | None = None
    lost: tuple[tuple[str, OfframpError], ...] = ()
    runs: tuple[tuple[str, tuple[SplitRun, ...]], ...] = ()
    """Of traced inputs among the others, where their `Timing` went."""
    busy: float = 0.0
    """Share of its time that the replica was busy, of late."""

    @property
    def timings(self) -> tuple[Timing, ...]:
        """Of the inputs that it lets go of, early answers and lost ones left out."""
        return tuple(timing for _, timing in self.answers) if self.going_on is None else self.going_on.timings

    @property
    def settled(self) -> tuple[str, ...]:
        """Sample ids of the inputs that this part settles."""
        survivors = () if self.going_on is None else self.going_on.piece.sample_ids
        answered = tuple(answer.sample_id for answer, _ in self.answers)
        return (*answered, *survivors, *(sample_id for sample_id, _ in self.lost))

    @property
    def num_inputs(self) -> int:
        """Number of inputs that this part settles."""
        survivors = 0 if self.going_on is None else len(self.going_on.timings)
        return len(self.answers) + survivors + len(self.lost)
