"""The messages between ingresses, replicas and the controller."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise

from earlyexit.engine.engine import Dispatch
from earlyexit.engine.queue import DEFAULT, OrderSpec
from earlyexit.engine.times import TimesRun
from earlyexit.errors import OfframpError
from earlyexit.network.boundary import Answer, Seen, Split, WirePiece
from earlyexit.sequences.memory import MemoryUse
from optimizer.dispatch import dispatch_on
from optimizer.placement import PlacedPlan
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
    """What a replica does under one plan. It travels with every call, so that no replica can miss it."""

    epoch: int
    """The plan it belongs to; a replica follows the highest it has seen."""
    slot: str
    """The name of the stage: its place among the plan's stages on its accelerator type."""
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
        """The splits that calls of this plan may ask for."""
        return (*self.stage.splits, *self.detours)

    @classmethod
    def of(cls, plan: Plan, stage: Stage, slot: str) -> Assignment:
        """Returns what a plan has one of its stages do."""
        return cls(
            epoch=plan.epoch,
            slot=slot,
            stage=stage,
            policy=plan.policy,
            dispatch=dispatch_on(stage.device, plan.dispatch),
            order=plan.order,
            detours=_detours(plan, stage),
            entry=plan.entry,
        )


def assignments_of(placed: PlacedPlan) -> dict[str, Assignment]:
    """Returns the assignment of every slot of a plan."""
    chains = [chain for chain in placed.plan.chains for _ in chain.stages]
    return {
        slot: Assignment.of(chain, stage, slot)
        for chain, (slot, stage) in zip(chains, placed.stage_of.items(), strict=True)
    }


def assignments_on(device: str, plans: Iterable[PlacedPlan]) -> list[Assignment]:
    """Returns the assignments of some plans on an accelerator type; stages with equal splits appear once."""
    found: dict[tuple[Split, ...], Assignment] = {}
    for assignment in [each for placed in plans for each in assignments_of(placed).values()]:
        if assignment.stage.device == device:
            found.setdefault(assignment.stage.splits, assignment)
    return list(found.values())


def _detours(plan: Plan, stage: Stage) -> tuple[Split, ...]:
    """Returns the networks left out before a stage's, each as one split with the batches of the next network."""
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
    """The seconds that the stages after this one are expected to take, and the slack."""
    assignment: Assignment
    """What the stage does under the sender's plan."""
    probe: bool = False
    """Whether its inputs are probes: every ramp looks at them, and they run to the model's end even when answered."""
    traced: tuple[int, ...] = ()
    """Positions of the inputs whose runs are to be reported."""
    sequences: tuple[int, ...] = ()
    """Per input, the number of its sequence, which the replica keeps until the sequence is ended; empty for inputs that
    belong to no sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How an input's time in a stage was spent."""

    queue_s: float
    compute_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRun:
    """One split that an input ran in a stage: its wait, then its batch."""

    first: int
    end: int
    batch: int
    """Inputs of the batch."""
    tokens: int
    """The tokens of these inputs together."""
    target: int
    """The split's batch size."""
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

    Every input of the call is in exactly one part: answered, going on, or lost. Early answers and observations of
    inputs that stay come in addition.
    """

    answers: tuple[tuple[Answer, Timing], ...] = ()
    early: tuple[tuple[Answer, Timing], ...] = ()
    """Answers of inputs that stay inside the model."""
    seen: tuple[Seen, ...] = ()
    """What ramps and the full model say of inputs that stay."""
    going_on: GoingOn | None = None
    lost: tuple[tuple[str, OfframpError], ...] = ()
    runs: tuple[tuple[str, tuple[SplitRun, ...]], ...] = ()
    """The splits that traced inputs ran, which add up to their `Timing`."""
    busy: float = 0.0
    """The share of its recent time that the replica was busy."""

    @property
    def timings(self) -> tuple[Timing, ...]:
        """The timings of the inputs that it settles, without lost ones."""
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
class Counts:
    """What became of inputs at one or several ingresses."""

    arrived: int = 0
    """Inputs of well-formed requests, including refused ones."""
    answered: int = 0
    answered_tokens: int = 0
    """The tokens of answered inputs; 1 each where inputs have no tokens."""
    in_slo: int = 0
    """Answers within the SLO; all of them where there is none."""
    exits: Mapping[int, int] = field(default_factory=dict)
    """Answers by the block they left after, under the present epoch."""
    drops: Mapping[str, int] = field(default_factory=dict)
    """Inputs without an answer, by reason."""
    latencies: Mapping[int, int] = field(default_factory=dict)
    """Answers by latency: bucket k holds those from `BUCKET ** k` to `BUCKET ** (k + 1)` seconds."""
    crossings: Mapping[int, int] = field(default_factory=dict)
    """Inputs that went on to another network of the chain, by its first block; the next three are by that block too."""
    crossing_s: Mapping[int, float] = field(default_factory=dict)
    """The total seconds that they waited at the ingress for it, including encoding."""
    words: Mapping[int, int] = field(default_factory=dict)
    """The words of texts that could be pruned."""
    pruned_words: Mapping[int, int] = field(default_factory=dict)
    """The pruned words among them."""


COUNTED = tuple(each.name for each in fields(Counts))


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressReport(Counts):
    """Counts since the ingress started, and what was observed since the last report.

    Counts only grow, so a lost report costs nothing but time. Observations are handed over once.
    """

    name: str
    """Unique per ingress process: another name means that the counts begin at zero."""
    epoch: int
    """The plan it follows."""
    suspended: bool = False
    """Whether it has no plan, and refuses everything."""
    oldest_epoch: int
    """The epoch by which its oldest call under way was sent; its own where there is none."""
    at_s: float
    """Wall clock."""
    unanswered: int
    """Inputs that wait here or are under way now."""
    unanswered_tokens: int = 0
    """The tokens of these inputs."""
    waiting: int
    """The inputs among them that were not sent to a stage yet."""
    oldest_s: dict[int, float] = field(default_factory=dict)
    """The longest wait so far, by length class: the most tokens of its inputs."""
    probes: Observations | None = None
    """Records of probes, and of inputs that stayed, at wall-clock times; None where there were none."""


BUCKET = 1.05
"""Ratio of a latency bucket's ends: a quantile read from buckets is at most 5 % off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReport:
    """What a replica has done since its start; counts only grow."""

    slot: str
    """The stage that it hosts; empty before it follows a plan."""
    replica: str
    """Serve's unique id of the replica."""
    node: str
    """Ray's id of its node."""
    pid: int
    device: str
    epoch: int
    waiting: int
    """Inputs queued in its engine now."""
    times: tuple[TimesRun, ...]
    """The batches that ran, without probes, which do more work than other inputs."""
    memory: MemoryUse | None = None
    """The memory that sequences use; None where the network keeps nothing of sequences."""
