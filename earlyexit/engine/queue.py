"""One input in the batch engine, and the queue in which it waits for a split."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Generic, TypeVar

from earlyexit.engine.order import Order, take_from
from earlyexit.network.boundary import Budget, Split

P = TypeVar("P")
NO_SEQUENCE = 0
"""The sequence number of inputs without a sequence: those of networks that keep nothing, warm-ups, profiles."""


@dataclass(slots=True, kw_only=True)
class Member(Generic[P]):
    """One input, in one replica."""

    sample_id: str
    payload: P
    """Its hidden state; the engine passes it on untouched."""
    tokens: int = 1
    """Its length, which is its cost; 1 where inputs have no tokens."""
    deadline_s: float = math.inf
    """When its answer must be out, on the engine's clock."""
    reserve_s: float = 0.0
    """Time before the deadline that is reserved for what comes after this engine."""
    origin: object = None
    """The call by which it came."""
    probe: bool = False
    """Whether every ramp looks at it; probes and other inputs are never in one batch."""
    sequence: int = NO_SEQUENCE
    """The number of its sequence, for which the network keeps memory until the sequence is ended."""
    answered: bool = False
    """Whether its answer was released already: it then stays, and no later ramp answers it again."""
    since_s: float = 0.0
    """When it began to wait for its split."""
    queued_serial: int = 0
    """The number of its submission to the engine; equal for members of one submission."""
    queue_s: float = 0.0
    """Time spent waiting here so far."""
    compute_s: float = 0.0
    """Time spent running here so far."""


by_deadline = attrgetter("deadline_s")
_by_order = attrgetter("deadline_s", "queued_serial")


@dataclass(slots=True)
class SplitCounts:
    """What a hosted split has done since it was first hosted, its probes included."""

    budget: Budget
    """What its batches are fused to."""
    batches: int = 0
    inputs: int = 0
    tokens: int = 0
    busy_s: float = 0.0
    """Seconds of the device; those in which two batches ran count half for each."""
    dropped: int = 0

    @property
    def capacity(self) -> int:
        """Inputs that full batches would have held."""
        return self.batches * self.budget.inputs

    @property
    def fill(self) -> float | None:
        """Mean share of the target batch that was filled; None before the first batch."""
        return self.inputs / self.capacity if self.batches else None

    @property
    def token_fill(self) -> float | None:
        """Mean share of the token budget that was filled; None without one, and before the first batch.

        Above 1 where many inputs are larger than the budget.
        """
        budget = self.budget.tokens
        return self.tokens / (self.batches * budget) if self.batches and budget is not None else None


@dataclass(slots=True, eq=False)
class Queue(Generic[P]):
    """Members of one kind, probes or plain ones."""

    split: Split
    probe: bool = False
    counts: SplitCounts = field(init=False)
    # Earliest deadline first; members with equal deadlines in the order of their arrival. Nearly all arrive in this
    # order, so that a sorted list is faster than a heap.
    members: list[Member[P]] = field(default_factory=list)
    budget: Budget = field(init=False)
    """Of a batch."""
    full_at: int = field(init=False)
    """The number of inputs with which a batch starts at once."""
    probes: Queue[P] | None = None
    """For a queue of plain members: the queue of the same split's probes, once there was a probe."""

    def __post_init__(self) -> None:
        self.budget = budget = self.split.budget
        # Probes never wait for others: near full load some plain queue is always full, and none would be run.
        self.full_at = 1 if self.probe else budget.inputs
        self.counts = SplitCounts(budget)

    @property
    def is_full(self) -> bool:
        """Whether a batch starts at once: the inputs, or their tokens, fill it."""
        most_tokens = self.budget.tokens
        return len(self.members) >= self.full_at or (most_tokens is not None and _sum_of(self.members) >= most_tokens)

    @property
    def is_drained(self) -> bool:
        """Whether no member waits, probes included."""
        return not self.members and (self.probes is None or not self.probes.members)

    def tokens_when_full(self, mean_tokens: float) -> float:
        """Expected tokens of its next batch, if it fills: waiting members' own tokens, and `mean_tokens` for others."""
        return self.budget.tokens_when_full(mean_tokens, len(self.members), _sum_of(self.members))

    def take(self, order: Order, now_s: float) -> tuple[tuple[Member[P], ...], int]:
        """Returns the next batch and its tokens, and counts it as run; at least one member must wait."""
        counts = self.counts
        members = tuple(take_from(self.members, order, self.budget, now_s))
        num_tokens = _sum_of(members)
        counts.batches += 1
        counts.inputs += len(members)
        counts.tokens += num_tokens
        return members, num_tokens

    def drop_before(self, earliest_s: float) -> list[Member[P]]:
        """Remove, count and return the members whose deadline is before the earliest end."""
        num_late = bisect_left(self.members, earliest_s, key=by_deadline)
        late = self.members[:num_late]
        del self.members[:num_late]
        self.counts.dropped += num_late
        return late

    def forget(self, origin: object) -> int:
        """Remove the members of an origin; returns their number."""
        before = len(self.members)
        self.members = [member for member in self.members if member.origin is not origin]
        return before - len(self.members)

    def take_out(self, sequences: Collection[int]) -> list[Member[P]]:
        """Remove and return the members of some sequences."""
        found = [member for member in self.members if member.sequence in sequences]
        if found:
            self.members = [member for member in self.members if member.sequence not in sequences]
        return found

    def move_to(self, other: Queue[P]) -> None:
        """Move all members to another queue."""
        other.members = sorted(other.members + self.members, key=_by_order)
        self.members = []


def _sum_of(members: Sequence[Member[P]]) -> int:
    """Their tokens together."""
    return sum([member.tokens for member in members])  # faster than `map` with an attrgetter
