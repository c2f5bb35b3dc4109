"""One input in the batch engine, and who waits with it for a split."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, TypeVar

from earlyexit.engine.order import Order, take_from
from earlyexit.engine.times import SplitCounts
from earlyexit.network.split import Budget, Split

P = TypeVar("P")
NO_SEQUENCE = 0
"""The number of the sequence of inputs that belong to none: those of networks that keep nothing, warm-ups, profiles."""


@dataclass(slots=True, kw_only=True)
class Member(Generic[P]):
    """One input, in one replica."""

    sample_id: str
    payload: P
    """Its hidden state; the engine hands it on untouched."""
    tokens: int = 1
    """Its length, which is what it costs; 1 where inputs have none."""
    deadline_s: float = math.inf
    """When its answer must be out, on the engine's clock."""
    reserve_s: float = 0.0
    """What must be left until the deadline for whatever comes after this engine."""
    origin: object = None
    """Whoever gave it to the engine."""
    probe: bool = False
    """Whether every ramp looks at it; it is never in one batch with inputs that are no probes."""
    sequence: int = NO_SEQUENCE
    """The number of its sequence, of which the network keeps something until it is ended."""
    answered: bool = False
    """Whether its answer was released already: then it stays, and no later ramp answers it again."""
    since_s: float = 0.0
    """When it began to wait for its split."""
    queued_serial: int = 0
    """Counts what was submitted to the engine; the same for all that came at once."""
    queue_s: float = 0.0
    """Time spent waiting here so far."""
    compute_s: float = 0.0
    """Time spent running here so far."""


by_deadline = attrgetter("deadline_s")
_by_order = attrgetter("deadline_s", "queued_serial")


@dataclass(slots=True, eq=False)
class Queue(Generic[P]):
    """Members of one kind, probes or plain ones."""

    split: Split
    probe: bool = False
    counts: SplitCounts = field(init=False)
    # Earliest deadline first; members with equal deadlines in the order of their arrival. Nearly all come in this
    # order, so that a sorted list is faster than a heap. Whoever the order has go first is found in it.
    members: list[Member[P]] = field(default_factory=list)
    budget: Budget = field(init=False)
    """Of a batch."""
    full_at: int = field(init=False)
    """With so many inputs, a batch waits for nobody else."""
    probes: Queue[P] | None = None
    """Of a queue of plain members: that of the same split's probes, once there was one."""

    def __post_init__(self) -> None:
        self.budget = budget = self.split.budget
        # Probes never wait for others: near full load some plain queue is always full, and none would be run.
        self.full_at = 1 if self.probe else budget.inputs
        self.counts = SplitCounts(budget)

    @property
    def is_full(self) -> bool:
        """Whether a batch waits for nobody else: as many inputs are there as it holds, or as many tokens."""
        most_tokens = self.budget.tokens
        return len(self.members) >= self.full_at or (most_tokens is not None and _sum_of(self.members) >= most_tokens)

    @property
    def is_drained(self) -> bool:
        """Whether nobody waits, probes included."""
        return not self.members and (self.probes is None or not self.probes.members)

    def tokens_when_full(self, mean_tokens: float) -> float:
        """Expected of its next batch, should it fill: who waits counts as he is, others have `mean_tokens`."""
        return self.budget.tokens_when_full(mean_tokens, len(self.members), _sum_of(self.members))

    def take(self, order: Order, now_s: float) -> tuple[tuple[Member[P], ...], int]:
        """The next batch and its tokens, counted as run from now on; somebody must wait."""
        counts = self.counts
        members = tuple(take_from(self.members, order, self.budget, now_s))
        num_tokens = _sum_of(members)
        counts.batches += 1
        counts.inputs += len(members)
        counts.tokens += num_tokens
        return members, num_tokens

    def drop_before(self, earliest_s: float) -> list[Member[P]]:
        """Take out, and count, those whose deadline is before the earliest end."""
        num_late = bisect_left(self.members, earliest_s, key=by_deadline)
        late = self.members[:num_late]
        del self.members[:num_late]
        self.counts.dropped += num_late
        return late

    def forget(self, origin: object) -> int:
        """Throw out those of an origin; how many there were."""
        before = len(self.members)
        self.members = [member for member in self.members if member.origin is not origin]
        return before - len(self.members)

    def take_out(self, sequences: Collection[int]) -> list[Member[P]]:
        """Throw out, and give, those of some sequences."""
        found = [member for member in self.members if member.sequence in sequences]
        if found:
            self.members = [member for member in self.members if member.sequence not in sequences]
        return found

    def move_to(self, other: Queue[P]) -> None:
        """Have everyone wait in another queue."""
        other.members = sorted(other.members + self.members, key=_by_order)
        self.members = []


def _sum_of(members: Sequence[Member[P]]) -> int:
    """Their tokens together."""
    return sum([member.tokens for member in members])  # faster than `map` with an attrgetter
