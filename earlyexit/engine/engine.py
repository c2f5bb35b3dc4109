"""The batch engine: which split a free device runs next, and on which inputs.

It is pure state and decisions; it neither computes nor waits. The live replica, the simulator and the tests drive the
same object with different clocks and different ways of spending a split's time.
"""

from __future__ import annotations

import math
from bisect import insort_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Generic, Literal

from earlyexit.engine.queue import DEFAULT, NO_SEQUENCE, Member, OrderSpec, P, Queue, SplitCounts, by_deadline
from earlyexit.engine.times import SMOOTHING, ObservedTimes, RunSums, TimesRun
from earlyexit.network.boundary import Split, rest_of

Dispatch = Literal["work-conserving", "deferred", "filling"]

DOUBT = 0.9
"""Factor on the trust in a split's times each time that they made the engine drop every waiting input. Two seconds that
a cold start taught are tried again after about thirty inputs with deadlines of 0.1 s."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(Generic[P]):
    """Members fused for one run of a split."""

    split: Split
    members: tuple[Member[P], ...]
    tokens: int
    """The sum over all members."""
    started_s: float
    probe: bool = False
    """Whether its members, all of them, are probes."""
    lane: int = 0
    """1 for a batch that began beside one of lane 0; two that run at once have different lanes."""

    @property
    def stays(self) -> bool:
        """Whether its members run on after they are answered: probes do, and all members where the split says so."""
        return self.probe or self.split.stays


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice(Generic[P]):
    """What a free device does now."""

    batch: Batch[P] | None
    """None: nothing to start yet."""
    dropped: tuple[Member[P], ...]
    """Members whose deadline can no longer be met."""
    wake_s: float | None
    """With no batch: when to ask again at the latest; None until something is submitted."""


NOTHING: Final[Choice[Any]] = Choice(batch=None, dropped=(), wake_s=None)
"""The choice of idle and of busy devices, made once."""


SHARE = 0.05
"""Share of a batch's seconds that the next batch waits at most for the sequences whose steps it answered: 2 ms of a
step of 40 ms, for the way to the ingress and back."""


class Returning:
    """The sequences whose next steps are worth waiting for.

    Without a wait, steps that came while a batch ran would form the next batch at once, and so on by turns: two groups
    of sequences, each of which reads all weights.
    """

    def __init__(self) -> None:
        self._sequences: set[int] = set()
        self._over: set[int] = set()
        """Sequences that ended since a batch last answered steps; a running batch may still answer steps of theirs."""
        self.until_s = -math.inf
        """When the wait is over."""

    def __bool__(self) -> bool:
        """Whether any sequence may be awaited."""
        return bool(self._sequences)

    def answered(self, sequences: Iterable[int], *, took_s: float, now_s: float) -> None:
        """Note that a batch of `took_s` seconds has answered steps of these sequences."""
        self._sequences = set(sequences) - self._over
        self._over.clear()
        self.until_s = now_s + SHARE * took_s

    def remove_sequences(self, sequences: Collection[int]) -> None:
        """Note that sequences are over; one that left early may be over before its batch."""
        self._sequences.difference_update(sequences)
        self._over.update(sequences)

    def are_awaited(self, waiting: Sequence[Queue[Any]], now_s: float) -> bool:
        """Whether some are not queued yet, and may still come in time."""
        self._sequences.difference_update(member.sequence for queue in waiting for member in queue.members)
        if now_s >= self.until_s:
            self._sequences.clear()
        return bool(self._sequences)


MOST_RUNNING: Final = 2
"""Batches that a device runs at once. A third would find the device no emptier and slow down the others (PAME figure
5)."""


@dataclass(slots=True, eq=False)
class _Running(Generic[P]):
    """A batch on the device."""

    batch: Batch[P]
    inside: int
    """Inputs that are not answered, or stay."""
    beside_since_s: float | None = None
    """When another batch began to run beside it; None while it is alone."""
    shared_s: float = 0.0
    """Seconds that batches ran beside it which have ended."""

    @property
    def leaves_room(self) -> bool:
        below = self.batch.split.overlap_below
        return below is not None and self.inside < below


class BatchEngine(Generic[P]):
    """Queues and dispatch of one replica's splits.

    A free device takes a full batch first, the deepest, so that work in progress drains; else, by the dispatch rule:

    - *work-conserving*: the most urgent queue at once, whatever it holds;
    - *deferred* (E3 section 4): it waits for a full batch until the most urgent member would miss its deadline; not
      while nothing is known of how long its splits take;
    - *filling*: as work-conserving, but beside a running batch only a full one begins, or one of a later split; and the
      ingress fills one replica's batch before another replica gets any input.

    Under each rule, a batch that is not full waits a moment for steps that are about to return (`Returning`). The
    plan's order selects which queued inputs form the batch. A batch is closed only when the device asks for it, so
    inputs that arrive while the device computes still fit. Probes have queues of their own. Because probes are few,
    one waiting probe counts as a full batch.

    The device runs one batch at a time: `begin`, `end`, then `go_on` with its survivors, and `leave`. Where the running
    batch's split has `overlap_below`, the next batch may begin beside it as soon as fewer inputs than that remain
    inside (PAME section 4.2). Never more than two batches run at once. The running batch's own split decides, even if a
    newer plan has come since.
    """

    def __init__(self, splits: Sequence[Split], times: ObservedTimes, *, starts: Collection[int] = ()) -> None:
        """`starts`: the first blocks of a chain's networks; inputs that wait for one are encoded anew, elsewhere."""
        self.times = times
        self._starts = tuple(sorted(starts))
        self._serial = 0
        self._trust: dict[int, float] = {}  # by a split's first block, where it is not 1
        self._run_sums = RunSums()
        self.returning = Returning()
        self._running: list[_Running[P]] = []
        self._ran_probed_steps = False
        """Whether the latest batch was of probes of sequences. Such a probe waits for no other input, and its next step
        is back a moment after its batch: two would take turns on the device for ever. So other queues go first then."""
        # By first block; in `_passing` of splits that are not hosted, or no longer: they vanish when they are empty.
        self._hosted: dict[int, Queue[P]] = {}
        self._passing: dict[Split, Queue[P]] = {}
        self.follow(splits, "work-conserving")

    @property
    def counts(self) -> dict[int, SplitCounts]:
        """What every hosted split has done, by its first block."""
        return {first: queue.counts for first, queue in self._hosted.items()}

    @property
    def times_run(self) -> tuple[TimesRun, ...]:
        """What batches took since the start, by split, hosted or not, and inputs; without probes, which run more ramps.

        Sums only grow, but those of a split that has not run for long may be removed and begin again at zero.
        """
        return self._run_sums.all()

    @property
    def num_waiting(self) -> int:
        return sum(len(queue.members) for queue in self._deepest_first)

    def hosts(self, block: int) -> bool:
        """Whether survivors wait here for `block`: a hosted split holds it, and it begins no network of a chain.

        Survivors leave at the end of a network, even if the next one is hosted here: only an ingress can encode them.
        """
        for first, end in self._hosting:  # noqa: SIM110 - `any` of a generator takes five times as long, for every batch
            if first <= block < end:
                return True
        return False

    def follow(self, splits: Sequence[Split], dispatch: Dispatch, order: OrderSpec = DEFAULT) -> None:
        """Host other splits, and choose by another order, from now on; queued members stay queued.

        Members queued for block k move to the new split that starts there. Without such a split their old one runs
        them.
        """
        before = [*self._hosted.values(), *self._passing.values()]
        unchanged = {queue.split: queue for queue in self._hosted.values()}
        self.splits = tuple(splits)
        """The hosted ones."""
        self._hosting = tuple((split.first + (split.first in self._starts), split.end) for split in splits)
        self._dispatch = dispatch
        self._order = order
        self._hosted = {split.first: unchanged.get(split) or Queue(split) for split in splits}
        self._passing = {}
        for queue in before:
            onto = self._hosted.get(queue.split.first)
            if onto is None:
                self._passing[queue.split] = queue
            elif onto is not queue:
                queue.move_to(onto)
                if queue.probes is not None:
                    queue.probes.move_to(self._probes_of(onto))
        self._let_drained_vanish()

    def submit(
        self, next_block: int, members: Iterable[Member[P]], now_s: float, fallback: Sequence[Split] = ()
    ) -> None:
        """Queue members that wait for `next_block`.

        If no hosted split starts with it, the rest of the split that holds it runs as a split of its own. If no hosted
        split holds it, the split of `fallback` that does is used. Raises PlanError if there is none either.
        """
        queue = self._hosted.get(next_block) or self._queue_on_the_way(next_block, fallback)
        self._serial = serial = self._serial + 1
        plain = queue.members
        for member in members:
            member.since_s = now_s
            member.queued_serial = serial
            waiting = self._probes_of(queue).members if member.probe else plain
            if waiting and member.deadline_s < waiting[-1].deadline_s:
                insort_right(waiting, member, key=by_deadline)
            else:
                waiting.append(member)

    def forget(self, origin: object) -> int:
        """Remove the queued members of an origin that no longer wants them; returns their number."""
        forgotten = sum(queue.forget(origin) for queue in self._deepest_first)
        self._let_drained_vanish()
        return forgotten

    def remove_sequences(self, sequences: Collection[int]) -> list[Member[P]]:
        """Remove and return the queued members of sequences that are over."""
        self.returning.remove_sequences(sequences)
        found = [member for queue in self._deepest_first for member in queue.remove_sequences(sequences)]
        self._let_drained_vanish()
        return found

    @property
    def may_begin(self) -> bool:
        """Whether the device would begin a batch now."""
        running = self._running
        return not running or (len(running) < MOST_RUNNING and running[0].leaves_room)

    @property
    def running_sequences(self) -> set[int]:
        """The sequences of the batches on the device."""
        return {member.sequence for running in self._running for member in running.batch.members}

    @property
    def num_running(self) -> int:
        """Batches on the device."""
        return len(self._running)

    def begin(self, now_s: float) -> Choice[P]:
        """Returns what the device does now: nothing while it is busy. The members of a batch stop waiting here."""
        if not self.may_begin:
            return NOTHING
        choice = self.choose(now_s)
        if choice.batch is None:
            return choice
        batch, beside_since_s = choice.batch, None
        for member in batch.members:
            member.queue_s += batch.started_s - member.since_s
        if self._running:
            (other,) = self._running
            other.beside_since_s = beside_since_s = now_s
            batch = replace(batch, lane=1 - other.batch.lane)
            choice = replace(choice, batch=batch)
        self._running.append(_Running(batch, len(batch.members), beside_since_s))
        return choice

    def shrink(self, batch: Batch[P], by: int) -> None:
        """Note that `by` inputs have left a running batch for good."""
        self._of(batch).inside -= by

    def again(self, batch: Batch[P], members: Sequence[Member[P]], now_s: float) -> Batch[P]:
        """Returns some members of a batch that cannot run as one, as a batch in its place."""
        running, tokens = self._of(batch), sum(member.tokens for member in members)
        running.shared_s = 0.0
        if running.beside_since_s is not None:
            running.beside_since_s = now_s
        return replace(batch, members=tuple(members), tokens=tokens, started_s=now_s)

    def end(
        self,
        batch: Batch[P],
        *,
        first_s: float | None,
        total_s: float,
        now_s: float,
        answered: Iterable[int] | None = None,
    ) -> float:
        """Note that a batch has run; returns its seconds of the device, where seconds beside another count half.

        `first_s`: seconds until its first answers; None where all inputs stayed to its end. `answered`: the sequences
        whose steps it answered; None for a network that keeps nothing of sequences.
        """
        running = self._of(batch)
        shared_s, since_s = running.shared_s, running.beside_since_s
        if since_s is not None:
            shared_s += now_s - since_s
        first_s = total_s if first_s is None else first_s
        busy_s = self.finished(batch, first_s=first_s, total_s=total_s, shared_s=min(shared_s, total_s))
        if answered is not None:
            self.returning.answered(answered, took_s=total_s, now_s=now_s)
        return busy_s

    def leave(self, batch: Batch[P], now_s: float) -> None:
        """Free the place of a batch that is over, including the parts of it that ran again."""
        self._running.remove(self._of(batch))
        for other in self._running:
            if other.beside_since_s is not None:
                other.shared_s += now_s - other.beside_since_s
                other.beside_since_s = None

    def go_on(self, block: int, members: Sequence[Member[P]], now_s: float) -> bool:
        """Queue members of a batch that has run for their next block; returns False where it is not hosted here.

        Call it when members are queued rather than when the batch ends: a new plan may have come in between.
        """
        if not self.hosts(block):
            return False
        self.submit(block, members, now_s)
        return True

    def choose(self, now_s: float) -> Choice[P]:
        """Returns the next batch of a device that is free at `now_s`, and takes it off its queue."""
        waiting = [queue for queue in self._deepest_first if queue.members]
        if self._running and self._dispatch == "filling":
            waiting = [queue for queue in waiting if queue.is_full or queue is not self._deepest_first[-1]]
        if not waiting:
            return NOTHING
        dropped = self._drop_late(waiting, now_s)
        if dropped:
            waiting = [queue for queue in waiting if queue.members]
            if not waiting:
                return Choice(batch=None, dropped=dropped, wake_s=None)
        others = [queue for queue in waiting if not queue.probe] if self._ran_probed_steps else ()
        choice = self._choose_among(others, dropped, now_s) if others else NOTHING
        return self._choose_among(waiting, dropped, now_s) if choice.batch is None else choice

    def finished(self, batch: Batch[P], *, first_s: float, total_s: float, shared_s: float = 0.0) -> float:
        """Learn the seconds of a batch until its first answers, or its end, and in all; returns the device's seconds.

        `shared_s`: seconds of these in which another batch ran beside it; half of them count for each batch.
        """
        weight = SMOOTHING if self._trust.pop(batch.split.first, None) is None else 1.0  # known times have misled
        busy_s = total_s - shared_s / 2 if shared_s else total_s
        hosted = self._hosted.get(batch.split.first)
        if hosted is not None and (hosted.split is batch.split or hosted.split == batch.split):
            hosted.counts.busy_s += busy_s
        if not batch.probe:  # probes run more ramps, on more inputs
            self.times.observe(batch.split, len(batch.members), batch.tokens, first_s, total_s, weight=weight)
            self._run_sums.add(batch.split, len(batch.members), batch.tokens, busy_s, shared=shared_s > 0)
        return busy_s

    def _of(self, batch: Batch[P]) -> _Running[P]:
        running = self._running
        return running[0] if running[0].batch.lane == batch.lane else running[1]

    def _queue_on_the_way(self, block: int, fallback: Sequence[Split]) -> Queue[P]:
        split = rest_of(block, self.splits, fallback)
        if split not in self._passing:
            self._passing[split] = Queue(split)
            self._sort()
        return self._passing[split]

    def _probes_of(self, queue: Queue[P]) -> Queue[P]:
        if queue.probes is None:
            queue.probes = Queue(queue.split, probe=True)
            queue.probes.counts = queue.counts
            self._sort()
        return queue.probes

    def _let_drained_vanish(self) -> None:
        self._passing = {split: queue for split, queue in self._passing.items() if not queue.is_drained}
        self._sort()

    def _sort(self) -> None:
        plain = [*self._hosted.values(), *self._passing.values()]
        queues = plain + [queue.probes for queue in plain if queue.probes is not None]
        self._deepest_first = sorted(queues, key=lambda queue: (-queue.split.first, not queue.probe))

    def _choose_among(self, waiting: Sequence[Queue[P]], dropped: tuple[Member[P], ...], now_s: float) -> Choice[P]:
        for queue in waiting:
            if queue.is_full:
                return Choice(batch=self._take(queue, now_s), dropped=dropped, wake_s=None)
        if self.returning and not self._ran_probed_steps and self.returning.are_awaited(waiting, now_s):
            return Choice(batch=None, dropped=dropped, wake_s=self.returning.until_s)
        if self._dispatch != "deferred" and len(waiting) == 1:
            return Choice(batch=self._take(waiting[0], now_s), dropped=dropped, wake_s=None)
        urgent = min(waiting, key=lambda queue: (self._latest_start_s(queue), queue.members[0].queued_serial))
        latest_s = self._latest_start_s(urgent)
        # With no time known, inputs would wait until their deadline and be dropped, and no batch would teach the times.
        if self._dispatch == "deferred" and now_s < latest_s < math.inf and all(self._seconds_on_way_of(urgent)):
            return Choice(batch=None, dropped=dropped, wake_s=latest_s)
        return Choice(batch=self._take(urgent, now_s), dropped=dropped, wake_s=None)

    def _drop_late(self, waiting: Sequence[Queue[P]], now_s: float) -> tuple[Member[P], ...]:
        # Clockwork's rule (E3 section 3.1): no work for an answer that would be late at the first exit of the batch
        # that can begin now. By the time of an input alone, an overloaded device would run batches whose answers are
        # all late. Inputs that were answered and stay are no exception: records would otherwise hold too many early
        # exits, and the device would spend time on records rather than on answers.
        dropped: list[Member[P]] = []
        for queue in waiting:
            trust = self._trust.get(queue.split.first, 1.0)
            mean_tokens = self.times.mean_tokens(queue.split)
            tokens = min(queue.budget.tokens_when_full(mean_tokens), mean_tokens * len(queue.members))
            earliest_s = now_s + trust * self.times.first_s(queue.split, tokens)
            if queue.members[0].deadline_s < earliest_s:
                dropped += queue.drop_before(earliest_s)
                if not queue.members:  # without a batch its times would never be corrected
                    self._trust[queue.split.first] = trust * DOUBT
        if dropped and self._passing:
            self._let_drained_vanish()
        return tuple(dropped)

    def _latest_start_s(self, queue: Queue[P]) -> float:
        return queue.members[0].deadline_s - sum(self._seconds_on_way_of(queue)) - queue.members[0].reserve_s

    def _seconds_on_way_of(self, queue: Queue[P]) -> list[float]:
        """Seconds of a full batch of its split, and of each later split of the same network that is hosted here."""
        times = self.times
        own_s = times.batch_s(queue.split, queue.tokens_when_full(times.mean_tokens(queue.split)))
        ends_at = min((start for start in self._starts if start >= queue.split.end), default=math.inf)
        deeper = [split for split in self.splits if queue.split.end < split.end <= ends_at]
        return [
            own_s,
            *(times.batch_s(split, split.budget.tokens_when_full(times.mean_tokens(split))) for split in deeper),
        ]

    def _take(self, queue: Queue[P], now_s: float) -> Batch[P]:
        members, tokens = queue.take(self._order, now_s)
        self._ran_probed_steps = queue.probe and members[0].sequence != NO_SEQUENCE
        if self._passing and not queue.members:
            self._let_drained_vanish()
        return Batch(split=queue.split, members=members, tokens=tokens, started_s=now_s, probe=queue.probe)
