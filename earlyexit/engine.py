"""The batch engine: which split a free device runs next, and on whom.

Pure state and decisions; it neither computes nor waits. The live replica, the simulator and the tests drive the same
object with different clocks and different ways of spending a split's time.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

from earlyexit.errors import PlanError
from earlyexit.split import Split
from earlyexit.times import Times

P = TypeVar("P")
Dispatch = Literal["work-conserving", "deferred"]

DOUBT = 0.9
"""What is left of the trust in the times whenever they left an idle device without work: two seconds, learnt from a
cold start, are tried again after about thirty inputs with 0.1 s each."""


@dataclass(slots=True, kw_only=True)
class Member(Generic[P]):
    """One input in the engine."""

    sample_id: str
    payload: P
    """Its hidden state; the engine hands it on untouched."""
    deadline_s: float = math.inf
    """When its answer must be out, on the engine's clock."""
    reserve_s: float = 0.0
    """What must be left until the deadline for whatever comes after this engine."""
    origin: object = None
    """Whoever gave it to the engine."""
    queued_since_s: float = 0.0
    queue_s: float = 0.0
    """Time spent waiting here so far."""
    compute_s: float = 0.0
    """Time spent running here so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(Generic[P]):
    """Members fused for one run of a split."""

    split: Split
    members: tuple[Member[P], ...]
    started_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Generic[P]):
    """What a free device does now."""

    batch: Batch[P] | None
    """None: nothing to start yet."""
    dropped: tuple[Member[P], ...]
    """Members whose deadline can no longer be met."""
    wake_s: float | None
    """With no batch: when to ask again at the latest; None until something is submitted."""


@dataclass(slots=True)
class SplitCounts:
    """What a split has done since the start."""

    batches: int = 0
    inputs: int = 0
    capacity: int = 0
    """Inputs that full batches would have held."""
    busy_s: float = 0.0
    dropped: int = 0

    @property
    def fill(self) -> float | None:
        """Mean share of the target batch that was filled; None before the first batch."""
        return self.inputs / self.capacity if self.capacity else None


@dataclass(slots=True)
class _Queue(Generic[P]):
    split: Split
    # Earliest deadline first; members with equal deadlines in the order of their arrival.
    heap: list[tuple[float, int, Member[P]]] = field(default_factory=list)
    counts: SplitCounts = field(default_factory=SplitCounts)

    @property
    def is_full(self) -> bool:
        return len(self.heap) >= self.split.batch


class BatchEngine(Generic[P]):
    """Queues and dispatch of one replica's splits.

    A free device takes a full batch first, the deepest, so that work in progress drains; else, by the dispatch rule:

    - *work-conserving*: the most urgent queue at once, whatever it holds;
    - *deferred* (E3 section 4): it waits for a full batch until the most urgent member would miss its deadline.

    A batch is closed only when the device asks, so members that arrive while it computes still fit.
    """

    def __init__(self, splits: Sequence[Split], times: Times, *, dispatch: Dispatch = "work-conserving") -> None:
        self._queues: dict[int, _Queue[P]] = {split.first: _Queue(split) for split in splits}
        self._deepest_first = sorted(self._queues.values(), key=lambda queue: -queue.split.first)
        self.times = times
        self._dispatch = dispatch
        self._serial = 0
        self._trust = 1.0

    @property
    def splits(self) -> tuple[Split, ...]:
        return tuple(queue.split for queue in self._queues.values())

    @property
    def counts(self) -> dict[int, SplitCounts]:
        """What every split has done, by its first block."""
        return {first: queue.counts for first, queue in self._queues.items()}

    def waiting(self) -> dict[int, int]:
        """Members queued, by first block of their split."""
        return {first: len(queue.heap) for first, queue in self._queues.items()}

    def hosts(self, block: int) -> bool:
        """Whether members that wait for `block` can be submitted here."""
        return block in self._queues

    def submit(self, next_block: int, members: Iterable[Member[P]], now_s: float) -> None:
        """Queue members that wait for `next_block`; raises PlanError if no split here starts with it."""
        if next_block not in self._queues:
            raise PlanError(f"no split here starts at block {next_block}; splits start at {sorted(self._queues)}")
        heap = self._queues[next_block].heap
        for member in members:
            member.queued_since_s = now_s
            self._serial += 1
            heapq.heappush(heap, (member.deadline_s, self._serial, member))

    def forget(self, origin: object) -> int:
        """Throw out the queued members of an origin that no longer wants them; how many there were."""
        forgotten = 0
        for queue in self._deepest_first:
            kept = [entry for entry in queue.heap if entry[2].origin is not origin]
            forgotten += len(queue.heap) - len(kept)
            queue.heap = kept
            heapq.heapify(queue.heap)
        return forgotten

    def choose(self, now_s: float) -> Choice[P]:
        """The next batch of a device that is free at `now_s`, taken off its queue."""
        dropped = tuple(member for queue in self._deepest_first for member in self._drop_late(queue, now_s))
        full = next((queue for queue in self._deepest_first if queue.is_full), None)
        if full is not None:
            return Choice(batch=self._take(full, now_s), dropped=dropped, wake_s=None)
        waiting = [queue for queue in self._deepest_first if queue.heap]
        if not waiting:
            if dropped:  # without a batch the times would never be corrected, and everything be dropped for ever
                self._trust *= DOUBT
            return Choice(batch=None, dropped=dropped, wake_s=None)
        urgent = min(waiting, key=lambda queue: (self._latest_start_s(queue), queue.heap[0][1]))
        start_s = self._start_s(urgent, now_s)
        if start_s > now_s:
            return Choice(batch=None, dropped=dropped, wake_s=start_s)
        return Choice(batch=self._take(urgent, now_s), dropped=dropped, wake_s=None)

    def finished(self, batch: Batch[P], *, first_s: float, total_s: float) -> None:
        """Learn how long a batch took until its first answers, or its end, and in all."""
        self.times.observe(batch.split, len(batch.members), first_s, total_s)
        self._trust = 1.0
        self._queues[batch.split.first].counts.busy_s += total_s

    def _drop_late(self, queue: _Queue[P], now_s: float) -> Iterable[Member[P]]:
        # Clockwork's rule (E3 section 3.1): no work for an answer that would come too late even if run alone, now.
        earliest_s = now_s + self._trust * self.times.soonest_s(queue.split)
        while queue.heap and queue.heap[0][0] < earliest_s:
            queue.counts.dropped += 1
            yield heapq.heappop(queue.heap)[2]

    def _latest_start_s(self, queue: _Queue[P]) -> float:
        ahead_s = sum(
            self.times.batch_s(other.split, other.split.batch)
            for other in self._deepest_first
            if other.split.first >= queue.split.first
        )
        return queue.heap[0][0] - ahead_s - queue.heap[0][2].reserve_s

    def _start_s(self, queue: _Queue[P], now_s: float) -> float:
        latest_s = self._latest_start_s(queue)
        waits = self._dispatch == "deferred" and math.isfinite(latest_s)
        return latest_s if waits else now_s

    def _take(self, queue: _Queue[P], now_s: float) -> Batch[P]:
        size = min(queue.split.batch, len(queue.heap))
        members = tuple(heapq.heappop(queue.heap)[2] for _ in range(size))
        for member in members:
            member.queue_s += now_s - member.queued_since_s
        queue.counts.batches += 1
        queue.counts.inputs += size
        queue.counts.capacity += queue.split.batch
        return Batch(split=queue.split, members=members, started_s=now_s)
