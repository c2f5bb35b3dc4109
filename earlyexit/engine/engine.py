"""The batch engine. It decides which split a free device runs next, and on which inputs.

The engine neither computes nor waits: it only keeps state and decides. It keeps deadlines by the times that batches of
each split took. The live replica, the simulator and the tests drive the same class with different clocks.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort, insort_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Generic, Literal

from earlyexit.engine.queue import DEFAULT, NO_SEQUENCE, Member, OrderSpec, PayloadT, Queue, SplitCounts, deadline_of
from earlyexit.network.boundary import AfterAnswer, Split, rest_of

# How long batches take. The size of a batch is its number of tokens. Inputs without tokens count as one token each.

MOST_SPLITS = 64
"""The most splits whose times are kept. A few dozen plans need a few kilobytes."""

Work = tuple[int, int, tuple[int, ...], AfterAnswer]
"""A split's computation: its first block, end, ramps, and whether answered inputs leave. The first block alone is no
key, since splits of two plans may start with the same block."""


@dataclass(frozen=True, slots=True)
class TimesRun:
    """The total duration of the batches of one split and one size."""

    first: int
    end: int
    ramps: tuple[int, ...]
    size: int
    """Inputs per batch, at the split's first block."""
    batches: int
    tokens: int
    """The tokens of all these batches at the split's first block. Inputs without tokens count as one token each."""
    seconds: float
    """Device seconds. While two batches run at once, each is charged half."""
    after_answer: AfterAnswer = "stop"
    shared: bool = False
    """Whether another batch ran beside them. Their seconds then do not measure the device's speed."""

    def is_of(self, split: Split) -> bool:
        """Whether these batches computed the same as `split`."""
        return _work(split) == (self.first, self.end, self.ramps, self.after_answer)


def _work(split: Split) -> Work:
    return split.first, split.end, split.ramps, split.after_answer


SMOOTHING = 0.2
"""Weight of the newest batch in the moving averages. The averages follow a change within about ten batches, and a
single outlier hardly changes them."""
BUCKET_BITS = 4
"""The number of leading bits of a token count that select its bucket. Buckets are 7 to 13 % wide. Batches of one bucket
take about equally long, and a few dozen full batches fill all buckets that occur."""
ROUNDING = 1e-9
"""Relative rounding error of a mean number of tokens. It must not move the mean into the next bucket."""


@dataclass(slots=True)
class _Measured:
    """The measured batches of one split."""

    sums: dict[tuple[int, bool], tuple[int, int, float]] = field(default_factory=dict)
    """Batches, tokens and device seconds in total, by batch size and whether another batch ran beside."""
    ends: list[int] = field(default_factory=list)
    """The ends of the buckets that have a batch, ascending."""
    total_s: dict[int, float] = field(default_factory=dict)
    """Mean seconds of a batch, by the end of its bucket. This and the following are moving averages."""
    first_s: dict[int, float] = field(default_factory=dict)
    """Seconds until a batch's first answers, or until its end without any, by the end of its bucket."""
    inputs: float = 0.0
    """Inputs per batch."""
    tokens: float = 0.0
    """Tokens per batch."""
    mean_first_s: float = 0.0
    """Seconds until a batch's first answers, over all sizes."""


class ObservedTimes:
    """Sums of the seconds of batches by split and size, and expected seconds of batches.

    Expected seconds are moving averages of measured batches, per split and bucket of tokens. They are zero until a
    batch was measured, so that no input is dropped because of a guess. If there are too many splits, a new one replaces
    the least recently run one. One thread may write while another reads.
    """

    def __init__(self) -> None:
        self.is_warm_up = False
        """Whether a warm-up is running. Expected seconds follow its batches, but they do not count as work."""
        self._by_work: OrderedDict[Work, _Measured] = OrderedDict()
        """The least recently run split is first."""

    def runs(self) -> tuple[TimesRun, ...]:
        """Returns the sums of every split and size, without probes, which run more ramps.

        They cover splits that are no longer hosted. The sums of a split that has not run for long may start at zero.
        """
        return tuple(
            TimesRun(first, end, ramps, size, batches, tokens, seconds, after_answer, shared)
            for (first, end, ramps, after_answer), measured in self._by_work.copy().items()
            for (size, shared), (batches, tokens, seconds) in measured.sums.copy().items()
        )

    def batch_s(self, split: Split, tokens: float) -> float:
        """Returns the seconds of a batch of `tokens` tokens. Above the largest bucket they grow in proportion."""
        known = self._by_work.get(_work(split))
        if known is None:
            return 0.0
        position = bisect_left(known.ends, tokens * (1 - ROUNDING))
        if position < len(known.ends):
            return known.total_s[known.ends[position]]
        return known.total_s[known.ends[-1]] * tokens / known.ends[-1]

    def mean_tokens(self, split: Split) -> float:
        """Returns the mean tokens per input of a split; 1 while unknown."""
        known = self._by_work.get(_work(split))
        return 1.0 if known is None else known.tokens / known.inputs

    def first_s(self, split: Split, tokens: float) -> float:
        """Returns the seconds until a batch's first answers: the least over the bucket of `tokens` and larger ones.

        A batch above the mean size takes at most in proportion longer than the mean batch. Otherwise, one slow batch of
        a size could make the engine drop inputs whenever that many wait, so that it would never run that size again.
        """
        known = self._by_work.get(_work(split))
        if known is None:
            return 0.0
        position = bisect_left(known.ends, tokens * (1 - ROUNDING))
        least_s = min([known.first_s[end] for end in known.ends[position:] or known.ends[-1:]])
        return min(least_s, known.mean_first_s * tokens / known.tokens) if tokens > known.tokens else least_s

    def observe(
        self,
        split: Split,
        size: int,
        tokens: int,
        first_s: float,
        total_s: float,
        *,
        shared_s: float = 0.0,
        weight: float = SMOOTHING,
    ) -> None:
        """Adds a batch. `first_s`: seconds until its first answers, or until its end without any.

        `shared_s`: the seconds in which another batch ran beside it. `weight`: of this batch in its bucket's averages.
        """
        known = self._of_run(split)
        if not self.is_warm_up:
            batches, sum_tokens, sum_s = known.sums.get((size, shared_s > 0), (0, 0, 0.0))
            known.sums[size, shared_s > 0] = batches + 1, sum_tokens + tokens, sum_s + total_s - shared_s / 2
        end = bucket_end(size, tokens)
        if end not in known.total_s:  # the averages begin with the first batch
            insort(known.ends, end)
            known.total_s[end], known.first_s[end] = total_s, first_s
        known.total_s[end] += weight * (total_s - known.total_s[end])
        known.first_s[end] += weight * (first_s - known.first_s[end])
        if not known.inputs:
            known.inputs, known.tokens, known.mean_first_s = size, tokens, first_s
        known.inputs += SMOOTHING * (size - known.inputs)
        known.tokens += SMOOTHING * (tokens - known.tokens)
        known.mean_first_s += SMOOTHING * (first_s - known.mean_first_s)

    def _of_run(self, split: Split) -> _Measured:
        """Returns the batches of a split that has just run."""
        work = _work(split)
        if work not in self._by_work:
            if len(self._by_work) >= MOST_SPLITS:
                self._by_work.popitem(last=False)
            self._by_work[work] = _Measured()
        self._by_work.move_to_end(work)
        return self._by_work[work]


def bucket_end(size: int, tokens: int) -> int:
    """Returns the end of a batch's bucket: the most tokens of a batch that counts as equally long.

    If all inputs have one token, each batch size has its own bucket.
    """
    if size == tokens:
        return size
    width = 1 << max(0, tokens.bit_length() - BUCKET_BITS)
    return -(-tokens // width) * width


Dispatch = Literal["work-conserving", "deferred", "filling"]

DOUBT = 0.9
"""Factor by which the trust in a split's learned times falls whenever they made the engine drop every waiting input.
After a cold start of 2 s, the split is tried again once about thirty inputs with deadlines of 0.1 s were dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(Generic[PayloadT]):
    """Members that run a split together."""

    split: Split
    members: tuple[Member[PayloadT], ...]
    tokens: int
    """The sum over all members."""
    started_s: float
    probe: bool = False
    """Whether all members are probes. Batches never mix probes with other inputs."""
    lane: int = 0
    """0 or 1. Two batches that run at once have different lanes."""

    @property
    def stays(self) -> bool:
        """Whether members run on after their answer. Probes do, and so do all members of a split with that setting."""
        return self.probe or self.split.stays


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Generic[PayloadT]):
    """The engine's decision for a free device."""

    batch: Batch[PayloadT] | None
    """The batch to run now. None: no batch can start yet."""
    dropped: tuple[Member[PayloadT], ...]
    """Members whose deadline can no longer be met."""
    wake_s: float | None
    """If there is no batch, the time of the next decision. None: after the next submission."""


RETURN_SHARE = 0.05
"""Share of a batch's duration that the next batch waits at most for the next steps of the sequences which that batch
answered. For a decode step of 40 ms it is 2 ms, which covers the way to the ingress and back.

Without this wait the sequences would split into two groups that take turns: the steps which arrive while a batch runs
form the next batch at once. Each group reads all weights, so every step would cost twice as much."""


MOST_RUNNING: Final = 2
"""The most batches that a device runs at once. A third batch would only slow down the others (PAME figure 5)."""


@dataclass(slots=True, eq=False)
class _Running(Generic[PayloadT]):
    """A batch on the device."""

    batch: Batch[PayloadT]
    num_inside: int
    """The number of inputs that are not answered or that stay."""
    beside_since_s: float | None = None
    """When the batch that runs beside it began. None: it runs alone."""
    shared_s: float = 0.0
    """Seconds during which batches that have ended ran beside it."""


class BatchEngine(Generic[PayloadT]):
    """The queues and the dispatch of one replica's splits.

    A free device runs full batches first, the deepest split before others, so that work in progress drains. If no batch
    is full, the dispatch rule decides:

    - *work-conserving*: the most urgent queue runs at once, even with a single input;
    - *deferred* (E3 section 4): the device waits for a full batch until the most urgent member would miss its deadline.
      It does not wait while the times of the splits are unknown;
    - *filling*: as work-conserving, but a batch begins beside a running one only if it is full or of a later split. The
      ingress also fills the batch of one replica before it sends inputs to another.

    Under every rule, a batch that is not full waits a moment for steps that are about to return (`RETURN_SHARE`). The
    plan's order selects the queued inputs of the batch. A batch is closed only when the device asks for it, so it
    includes inputs that arrive while the device computes. Probes have their own queues. They are rare, so one waiting
    probe counts as a full batch.

    The device calls `begin`, `end`, then `go_on` for the survivors, and `leave`. It normally runs one batch at a time.
    If the running batch's split has `overlap_below`, the next batch may begin as soon as fewer inputs than that remain
    in the running one (PAME section 4.2). At most two batches run at once. The split of the running batch decides, even
    if a newer plan has arrived.
    """

    def __init__(self, splits: Sequence[Split], times: ObservedTimes, *, starts: Collection[int] = ()) -> None:
        """`starts`: the first block of each network of a cascade. Inputs are encoded again before these blocks."""
        self.times = times
        self._starts = tuple(sorted(starts))
        self._serial = 0
        self._trust: dict[int, float] = {}
        """The trust in the learned times by a split's first block; 1 if there is no entry."""
        self.awaited: set[int] = set()
        """Sequences whose next steps are about to arrive and are worth waiting for."""
        self._awaits_until_s = -math.inf
        self._ended: set[int] = set()
        """Sequences that ended since a batch answered steps. A batch that still runs may answer steps of them."""
        self._running: list[_Running[PayloadT]] = []
        self._ran_probed_steps = False
        """Whether the latest batch consisted of steps of probed sequences. Such a step starts at once, and the next one
        arrives soon after its batch. Two probed sequences would always occupy the device, so others run next."""
        self._hosted: dict[int, Queue[PayloadT]] = {}
        """The queues of the hosted splits, by first block."""
        self._passing: dict[tuple[Split, bool], Queue[PayloadT]] = {}
        """The queues of probes, and of splits that are not hosted. They are removed once they are empty."""
        self.follow(splits, "work-conserving")

    @property
    def counts(self) -> dict[int, SplitCounts]:
        """The counters of every hosted split, by its first block."""
        return {first: queue.counts for first, queue in self._hosted.items()}

    @property
    def num_waiting(self) -> int:
        return sum(len(queue.members) for queue in self._deepest_first)

    def hosts(self, block: int) -> bool:
        """Whether survivors can wait here for `block`. A hosted split must contain it.

        Survivors never wait for the first block of a cascade's next network, because only an ingress can encode them.
        """
        for first, end in self._survivor_spans:  # noqa: SIM110 - `any` of a generator is five times slower, for every batch
            if first <= block < end:
                return True
        return False

    def follow(self, splits: Sequence[Split], dispatch: Dispatch, order: OrderSpec = DEFAULT) -> None:
        """Applies a plan: from now on, hosts these splits and forms batches in this order.

        Queued members stay queued. They move to the new split that starts at their next block. If no new split starts
        there, their old split runs them.
        """
        before = [*self._hosted.values(), *self._passing.values()]
        unchanged = {queue.split: queue for queue in self._hosted.values()}
        self.splits = tuple(splits)
        """The hosted splits."""
        # The blocks of each hosted split for which survivors may wait: see `hosts`.
        self._survivor_spans = tuple((split.first + (split.first in self._starts), split.end) for split in splits)
        self._dispatch = dispatch
        self._order = order
        self._hosted = {split.first: unchanged.get(split) or Queue(split) for split in splits}
        self._passing = {}
        for queue in before:
            successor = self._hosted.get(queue.split.first)
            if queue is not successor:
                queue.move_to(self._queue_of(queue.split if successor is None else successor.split, probe=queue.probe))
        self._remove_drained()

    def submit(
        self, next_block: int, members: Iterable[Member[PayloadT]], now_s: float, fallback: Sequence[Split] = ()
    ) -> None:
        """Queues members for `next_block`.

        If a hosted split contains the block but does not start with it, the rest of that split runs as a split of its
        own. If no hosted split contains it, a split of `fallback` is used. Raises PlanError if none contains it.
        """
        queue = self._hosted.get(next_block) or self._queue_of(rest_of(next_block, self.splits, fallback))
        self._serial = serial = self._serial + 1
        for member in members:
            member.since_s = now_s
            member.queued_serial = serial
            waiting = self._queue_of(queue.split, probe=True).members if member.probe else queue.members
            if waiting and member.deadline_s < waiting[-1].deadline_s:
                insort_right(waiting, member, key=deadline_of)
            else:
                waiting.append(member)

    def forget(self, origin: object) -> int:
        """Removes the queued members of a call that was cancelled. Returns their number."""
        return len(self._remove(lambda member: member.origin is origin))

    def remove_sequences(self, sequences: Collection[int]) -> list[Member[PayloadT]]:
        """Removes and returns the queued members of sequences that ended, perhaps before their batch."""
        self.awaited.difference_update(sequences)
        self._ended.update(sequences)
        return self._remove(lambda member: member.sequence in sequences)

    def _remove(self, is_removed: Callable[[Member[PayloadT]], bool]) -> list[Member[PayloadT]]:
        removed = [member for queue in self._deepest_first for member in queue.remove(is_removed)]
        self._remove_drained()
        return removed

    @property
    def may_begin(self) -> bool:
        """Whether the device may begin a batch now."""
        running = self._running
        if not running:
            return True
        below = running[0].batch.split.overlap_below
        return len(running) < MOST_RUNNING and below is not None and running[0].num_inside < below

    @property
    def running_sequences(self) -> set[int]:
        """The sequences of the batches on the device."""
        return {member.sequence for running in self._running for member in running.batch.members}

    @property
    def running(self) -> list[Batch[PayloadT]]:
        """The batches on the device."""
        return [each.batch for each in self._running]

    def begin(self, now_s: float) -> Choice[PayloadT]:
        """Returns the next batch if the device may begin one, and notes that it runs."""
        if not self.may_begin:
            return Choice(batch=None, dropped=(), wake_s=None)
        choice = self.choose(now_s)
        if choice.batch is None:
            return choice
        for member in choice.batch.members:
            member.queue_s += now_s - member.since_s
        for other in self._running:
            other.beside_since_s = now_s
        self._running.append(_Running(choice.batch, len(choice.batch.members), now_s if self._running else None))
        return choice

    def shrink(self, batch: Batch[PayloadT], by: int) -> None:
        """Notes that `by` inputs have finally left a running batch."""
        self._running_of(batch).num_inside -= by

    def again(self, batch: Batch[PayloadT], members: Sequence[Member[PayloadT]], now_s: float) -> Batch[PayloadT]:
        """Returns a batch of some members of a failed batch. It runs in place of the failed one."""
        running, tokens = self._running_of(batch), sum(member.tokens for member in members)
        running.shared_s = 0.0
        if running.beside_since_s is not None:
            running.beside_since_s = now_s
        return replace(batch, members=tuple(members), tokens=tokens, started_s=now_s)

    def end(
        self,
        batch: Batch[PayloadT],
        *,
        first_s: float | None,
        total_s: float,
        now_s: float,
        answered: Iterable[int] | None = None,
    ) -> float:
        """Notes that a batch has run. Returns its device seconds: time beside another batch counts half.

        `first_s`: seconds until its first answers; None if no input was answered before the end. `answered`: the
        sequences whose steps it answered; None for a network without memory of sequences.
        """
        running = self._running_of(batch)
        shared_s = running.shared_s
        if running.beside_since_s is not None:
            shared_s += now_s - running.beside_since_s
        shared_s = min(shared_s, total_s)
        busy_s = total_s - shared_s / 2
        hosted = self._hosted.get(batch.split.first)
        if hosted is not None and (hosted.split is batch.split or hosted.split == batch.split):  # identity is fast
            hosted.counts.busy_s += busy_s
        if not batch.probe:  # probes run more ramps, so their times are not representative
            was_trusted = self._trust.pop(batch.split.first, None) is None
            weight = SMOOTHING if was_trusted else 1.0  # otherwise it replaces the misleading times
            size, first_s = len(batch.members), total_s if first_s is None else first_s
            self.times.observe(batch.split, size, batch.tokens, first_s, total_s, shared_s=shared_s, weight=weight)
        if answered is not None:
            self.awaited = set(answered) - self._ended
            self._ended.clear()
            self._awaits_until_s = now_s + RETURN_SHARE * total_s
        return busy_s

    def leave(self, batch: Batch[PayloadT], now_s: float) -> None:
        """Removes a batch from the device, after all its parts have run."""
        self._running.remove(self._running_of(batch))
        for other in self._running:
            if other.beside_since_s is not None:
                other.shared_s += now_s - other.beside_since_s
                other.beside_since_s = None

    def go_on(self, block: int, members: Sequence[Member[PayloadT]], now_s: float) -> bool:
        """Queues the survivors of a batch for their next block. Returns False if no split here hosts that block.

        A plan that arrived while the batch ran may have changed the hosted splits.
        """
        if not self.hosts(block):
            return False
        self.submit(block, members, now_s)
        return True

    def choose(self, now_s: float) -> Choice[PayloadT]:
        """Returns the decision for a device that is free at `now_s`, and removes the batch from its queue."""
        waiting = [queue for queue in self._deepest_first if queue.members]
        if self._running and self._dispatch == "filling":  # only full batches and later splits begin beside a batch
            first = self._deepest_first[-1]
            may_run = first.is_full or any(member.counts_as_full for member in first.members)
            waiting = [queue for queue in waiting if queue is not first or may_run]
        dropped = self._drop_late(waiting, now_s)
        if dropped:
            waiting = [queue for queue in waiting if queue.members]
        chosen: Queue[PayloadT] | float | None = None
        if self._ran_probed_steps and (others := [queue for queue in waiting if not queue.probe]):
            chosen = self._choose_among(others, now_s)
        if waiting and not isinstance(chosen, Queue):
            chosen = self._choose_among(waiting, now_s)
        if not isinstance(chosen, Queue):
            return Choice(batch=None, dropped=dropped, wake_s=chosen)
        members, tokens = chosen.take(self._order, now_s)
        self._ran_probed_steps = chosen.probe and members[0].sequence != NO_SEQUENCE
        if self._passing and not chosen.members:
            self._remove_drained()
        batch = Batch(
            split=chosen.split,
            members=members,
            tokens=tokens,
            started_s=now_s,
            probe=chosen.probe,
            lane=1 - self._running[0].batch.lane if self._running else 0,
        )
        return Choice(batch=batch, dropped=dropped, wake_s=None)

    def _running_of(self, batch: Batch[PayloadT]) -> _Running[PayloadT]:
        running = self._running
        return running[0] if running[0].batch.lane == batch.lane else running[1]

    def _queue_of(self, split: Split, *, probe: bool = False) -> Queue[PayloadT]:
        """Returns the queue of a split's probes or other members. Creates it if there is none.

        A split that begins with the first block of a hosted split must be that split.
        """
        hosted = self._hosted.get(split.first)
        if hosted is not None and not probe:
            return hosted
        if (split, probe) not in self._passing:
            queue = self._passing[split, probe] = Queue(split, probe=probe)
            if hosted is not None:
                queue.counts = hosted.counts
            self._sort()
        return self._passing[split, probe]

    def _remove_drained(self) -> None:
        self._passing = {key: queue for key, queue in self._passing.items() if queue.members}
        self._sort()

    def _sort(self) -> None:
        queues = [*self._hosted.values(), *self._passing.values()]
        self._deepest_first = sorted(queues, key=lambda queue: (-queue.split.first, not queue.probe))

    def _choose_among(self, waiting: Sequence[Queue[PayloadT]], now_s: float) -> Queue[PayloadT] | float:
        """Returns the queue of the next batch, or the time of the next decision."""
        for queue in waiting:
            if queue.is_full:
                return queue
        if self.awaited and not self._ran_probed_steps:
            self.awaited.difference_update(member.sequence for queue in waiting for member in queue.members)
            if self.awaited and now_s < self._awaits_until_s:
                return self._awaits_until_s
            self.awaited.clear()
        if self._dispatch != "deferred" and len(waiting) == 1:
            return waiting[0]
        urgent = min(waiting, key=lambda queue: (self._latest_start_s(queue), queue.members[0].queued_serial))
        latest_s = self._latest_start_s(urgent)
        # Unknown times are 0: inputs would wait until they are dropped, and no batch would measure the times.
        if self._dispatch == "deferred" and now_s < latest_s < math.inf and all(self._remaining_batch_s(urgent)):
            return latest_s
        return urgent

    def _drop_late(self, waiting: Sequence[Queue[PayloadT]], now_s: float) -> tuple[Member[PayloadT], ...]:
        # Clockwork's rule (E3 section 3.1): an input is dropped if it would be late at the first exit of a batch that
        # starts now. By the time of a single input, an overloaded device would run batches whose answers are all late.
        # Answered inputs that stay are dropped too. Else the device would spend time on their records instead of
        # answers, and records would hold too many early exits.
        dropped: list[Member[PayloadT]] = []
        for queue in waiting:
            trust = self._trust.get(queue.split.first, 1.0)
            mean_tokens = self.times.mean_tokens(queue.split)
            tokens = min(queue.counts.budget.tokens_when_full(mean_tokens), mean_tokens * len(queue.members))
            earliest_s = now_s + trust * self.times.first_s(queue.split, tokens)
            if queue.members[0].deadline_s < earliest_s:
                dropped += queue.drop_before(earliest_s)
                if not queue.members and dropped[-1].deadline_s > now_s:  # no batch runs, which could correct the times
                    self._trust[queue.split.first] = trust * DOUBT
        if dropped and self._passing:
            self._remove_drained()
        return tuple(dropped)

    def _latest_start_s(self, queue: Queue[PayloadT]) -> float:
        """Returns when a batch of the queue must start so that its most urgent member meets its deadline."""
        return queue.members[0].deadline_s - sum(self._remaining_batch_s(queue)) - queue.members[0].reserve_s

    def _remaining_batch_s(self, queue: Queue[PayloadT]) -> list[float]:
        """Returns the seconds of a full batch of the queue's split, and of each later hosted split of its network."""
        times = self.times
        own_s = times.batch_s(queue.split, queue.tokens_when_full(times.mean_tokens(queue.split)))
        ends_at = min((start for start in self._starts if start >= queue.split.end), default=math.inf)
        deeper = [split for split in self.splits if queue.split.end < split.end <= ends_at]
        later_s = [times.batch_s(split, split.budget.tokens_when_full(times.mean_tokens(split))) for split in deeper]
        return [own_s, *later_s]
