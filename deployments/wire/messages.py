"""What ingress and stages say to each other."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

from earlyexit.engine.engine import Dispatch
from earlyexit.engine.order import DEFAULT, OrderSpec
from earlyexit.engine.times import TimesRun
from earlyexit.errors import OfframpError
from earlyexit.network.split import Split
from earlyexit.network.wire import Answer, Seen, WirePiece
from earlyexit.sequences.memory import MemoryUse
from optimizer.dispatch import dispatch_on
from optimizer.plan import Plan, PolicySpec, Stage
from profiles.stream import Observations


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where a replica takes calls, and the secret that callers must send."""

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
    """Networks that the plan does not use. Only probes run their blocks, to observe what they would answer."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressReport:
    """Counts since the ingress started, and what was seen of probes, and of inputs that stayed, since the last report.

    Counts only grow: a report that is lost loses nothing but time. What was seen is handed over once.
    """

    name: str
    """Unique per ingress process: another name means that the counts begin at zero."""
    epoch: int
    """The plan it follows."""
    suspended: bool = False
    """Whether it refuses everything, as it was told."""
    oldest_epoch: int
    """Of the plan by which its oldest call under way was sent; its own where none is."""
    at_s: float
    """Wall clock."""
    unanswered: int
    """Inputs that wait here or are under way, now."""
    unanswered_tokens: int = 0
    """Of these."""
    waiting: int
    """Of these, the inputs that no stage has been sent yet."""
    oldest_s: dict[int, float] = field(default_factory=dict)
    """How long the first of these have waited, by the longest that inputs of their class are, in tokens."""
    arrived: int
    """Inputs of well-formed requests, refused ones too."""
    answered: int
    answered_tokens: int = 0
    """Of these inputs; as many where inputs have no tokens."""
    in_slo: int
    """Answers that came within the SLO; all of them where there is none."""
    exits: dict[int, int]
    """Answers by the block they left after, under the present epoch."""
    drops: dict[str, int]
    """Inputs without an answer, by reason."""
    latencies: dict[int, int] = field(default_factory=dict)
    """Answers by latency: bucket k holds those from `BUCKET ** k` to `BUCKET ** (k + 1)` seconds."""
    crossings: dict[int, int] = field(default_factory=dict)
    """Inputs that went on to another network of the chain, by its first block; as are the next three."""
    crossing_s: dict[int, float] = field(default_factory=dict)
    """What they waited for it here, encoding anew included: their seconds together."""
    words: dict[int, int] = field(default_factory=dict)
    """Of the texts that words could be pruned of."""
    pruned_words: dict[int, int] = field(default_factory=dict)
    """Of these, the pruned ones."""
    probes: Observations | None = None
    """Records of probes, and of inputs that stayed, at wall-clock times; None where there were none."""


BUCKET = 1.05
"""Ratio of a latency bucket's ends: a quantile read from buckets is at most 5 % off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """What a stage's replica has done since its start; counts only grow."""

    slot: str
    replica: str
    """Serve's unique id of it."""
    node: str
    """Ray's id of the node it runs on."""
    pid: int
    device: str
    epoch: int
    waiting: int
    """Inputs queued in its engine, now."""
    times: tuple[TimesRun, ...]
    """Probes left out: they do more work than others."""
    memory: MemoryUse | None = None
    """What sequences have of it; None where the network keeps nothing of any."""
