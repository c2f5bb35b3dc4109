"""What batches cost, and the dispatch rule `filling`: when a batch that is not full begins. Pure.

The cost of a batch is its number of tokens; where inputs have no tokens, each counts as one. The engine needs the times
of splits to keep deadlines.

A device of its own loses nothing by running whatever waits. On shared processors an input that starts alone takes the
cores from the inputs behind it: a batch of 16 costs three to five times a batch of 1. So batches wait, and the busier
the device was, the longer: up to half of what their deadlines leave. Below a load of two fifths they do not wait. Full
batches leave the device less to do, so that the wait settles where it is needed.

Devices may share processors with each other, with the ingress and with other programs. Two replicas of one thread then
look half busy on two cores that are full. The sign of it is the time that the device's own thread waits for a
processor. The load of the machine is no sign: idle-priority work keeps processors busy and makes no thread wait.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from earlyexit.engine.queue import P, Queue
from earlyexit.network.boundary import AfterAnswer, Split

V = TypeVar("V")

MOST_SPLITS = 64
"""Splits whose times are kept: a few dozen plans, at some kilobytes in all."""

Work = tuple[int, int, tuple[int, ...], AfterAnswer]
"""What a batch of a split computes: first block, end, ramps, and whether it shrinks at them. Splits of two plans may
start with the same block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimesRun:
    """Batches of one split and one size, and their seconds."""

    first: int
    end: int
    ramps: tuple[int, ...]
    size: int
    """Inputs at the split's first block."""
    batches: int
    tokens: int
    """Of all these batches together, at the split's first block; the number of inputs where these have no tokens."""
    seconds: float
    """Seconds of the device; those in which two batches ran count half for each."""
    after_answer: AfterAnswer = "stop"
    shared: bool = False
    """Whether another batch ran beside them: their seconds are then no measure of the device."""

    def is_of(self, split: Split) -> bool:
        """Whether a split computes what these batches did."""
        return _work(split) == (self.first, self.end, self.ramps, self.after_answer)


@dataclass(slots=True)
class _Kept(Generic[V]):
    value: V
    serial: int


class BySplit(Generic[V]):
    """A value per split; a new split replaces the one that has not run for longest.

    One thread adds while another may read.
    """

    def __init__(self, new: Callable[[], V]) -> None:
        self._new = new
        self._kept: dict[Work, _Kept[V]] = {}
        self._serial = 0
        # Most replicas run one split again and again, so `latest` saves the look-up.
        self.latest_split: Split | None = None
        self.latest: V = new()

    def find(self, split: Split) -> V | None:
        """Returns the split's value; None for a split that never ran, or not for long."""
        if split is self.latest_split:
            return self.latest
        kept = self._kept.get(_work(split))
        return None if kept is None else kept.value

    def of_run(self, split: Split) -> V:
        """Returns the value of a split that has run now."""
        if split is not self.latest_split:
            self.latest_split, self.latest = split, self._found(_work(split))
        return self.latest

    def items(self) -> Iterator[tuple[Work, V]]:
        """Yields all values that are kept."""
        for work, kept in self._kept.copy().items():
            yield work, kept.value

    def _found(self, work: Work) -> V:
        self._serial += 1
        kept = self._kept.get(work)
        if kept is None:
            if len(self._kept) >= MOST_SPLITS:
                del self._kept[min(self._kept, key=lambda other: self._kept[other].serial)]
            kept = self._kept[work] = _Kept(self._new(), 0)
        kept.serial = self._serial
        return kept.value


class RunSums(BySplit[dict[tuple[int, bool], tuple[int, int, float]]]):
    """Batches, their tokens and seconds by split, size, and whether another batch ran beside."""

    def __init__(self) -> None:
        super().__init__(dict)

    def add(self, split: Split, size: int, tokens: int, seconds: float, *, shared: bool = False) -> None:
        """Count a batch."""
        by_size = self.latest if split is self.latest_split else self.of_run(split)
        batches, before, before_s = by_size.get((size, shared), (0, 0, 0.0))
        by_size[size, shared] = (batches + 1, before + tokens, before_s + seconds)

    def all(self) -> tuple[TimesRun, ...]:
        """Returns the sums of every split and size that are still kept."""
        return tuple(
            TimesRun(
                first=first,
                end=end,
                ramps=ramps,
                size=size,
                batches=batches,
                tokens=tokens,
                seconds=seconds,
                after_answer=after_answer,
                shared=shared,
            )
            for (first, end, ramps, after_answer), by_size in self.items()
            for (size, shared), (batches, tokens, seconds) in by_size.copy().items()
        )


def _work(split: Split) -> Work:
    return split.first, split.end, split.ramps, split.after_answer


SMOOTHING = 0.2
"""Weight of the newest observation: a change is followed within about ten batches, a single odd batch hardly."""
BUCKET_BITS = 4
"""Leading bits of a number of tokens that make its bucket. Buckets are 7 to 13 % wide: batches of one bucket take about
as long, and a few dozen full batches teach all buckets that they fall into."""
ROUNDING = 1e-9
"""Relative error of means of equal lengths, by which they must not fall into the next bucket."""


@dataclass(slots=True)
class _Known:
    ends: list[int] = field(default_factory=list)
    """Ends of the buckets that ever ran, ascending."""
    total_s: dict[int, float] = field(default_factory=dict)
    """By the end of a bucket."""
    inputs: float = 0.0
    """Of a batch, on average."""
    tokens: float = 0.0
    """Of the same batches."""
    soonest_s: float = math.nan
    """NaN before the first batch."""
    soonest_tokens: int = 0
    """Tokens of the batch with the soonest answer."""


class ObservedTimes(BySplit[_Known]):
    """Expected seconds, learnt from the batches that ran: a moving average per split and bucket of tokens.

    They are zero while nothing is known, so that no input is dropped on a guess.
    """

    def __init__(self) -> None:
        super().__init__(_Known)

    def batch_s(self, split: Split, tokens: float) -> float:
        """Returns the seconds of a batch of so many tokens until the split's end."""
        known = self.find(split)
        if known is None:
            return 0.0
        position = bisect_left(known.ends, tokens * (1 - ROUNDING))
        if position < len(known.ends):
            return known.total_s[known.ends[position]]
        return known.total_s[known.ends[-1]] * tokens / known.ends[-1]

    def mean_tokens(self, split: Split) -> float:
        """Returns the mean tokens of an input that runs there; 1 while they are unknown."""
        known = self.find(split)
        return 1.0 if known is None else known.tokens / known.inputs

    def soonest_s(self, split: Split) -> float:
        """Returns the seconds after which a batch's first answer can leave the split, at best."""
        known = self.latest if split is self.latest_split else self.find(split)
        return 0.0 if known is None else known.soonest_s

    def observe(self, split: Split, size: int, tokens: int, first_s: float, total_s: float) -> None:
        """Learn that a batch of `size` inputs had its first answers, or its end, after `first_s`; it took `total_s`."""
        known = self.latest if split is self.latest_split else self.of_run(split)
        end = bucket_end(size, tokens)
        before_s = known.total_s.get(end)
        if before_s is None:
            insort(known.ends, end)
            known.total_s[end] = total_s
        else:
            known.total_s[end] = before_s + SMOOTHING * (total_s - before_s)
        if known.inputs:
            known.inputs += SMOOTHING * (size - known.inputs)
            known.tokens += SMOOTHING * (tokens - known.tokens)
        else:
            known.inputs, known.tokens = size, tokens
        if not first_s >= known.soonest_s:  # nothing was known, or it was sooner than ever
            known.soonest_s, known.soonest_tokens = first_s, tokens
        elif size == 1 and tokens <= known.soonest_tokens:  # a longer input says nothing about a shorter one
            known.soonest_s += SMOOTHING * (min(first_s, 2 * known.soonest_s) - known.soonest_s)


def bucket_end(size: int, tokens: int) -> int:
    """Returns the end of a batch's bucket: the most tokens of a batch that is taken to last as long as this one.

    Batches of inputs of one token each have a bucket for every size.
    """
    if size == tokens:
        return size
    width = 1 << max(0, tokens.bit_length() - BUCKET_BITS)
    return -(-tokens // width) * width


IDLE_ENOUGH = 0.4
"""Share of its time that a device may run before batches wait to fill."""
MOST_PATIENCE = 0.5
"""Largest share of what deadlines leave; the times of batches vary on shared processors."""
SLOPE = 2.5
"""Patience per load beyond `IDLE_ENOUGH`: it is largest from a load of three fifths on."""
SHARED = 2.0
"""Factor on the share of the time that a device waits for processors, by which it counts as busier. Example: two
devices share two processors with an ingress and its clients. Each runs half of the time and waits for a quarter of
that; a quarter of the processors is then left. The wait alone says little: a thread that seldom runs waits for its
waker."""
MOST_BATCHES = 3.0
"""What deadlines leave counts up to so many times the seconds of a batch: a longer wait saves little more, however far
the deadline is. At the largest patience a batch waits one and a half times its own seconds."""
FADE = 0.9
"""Factor on the weight of earlier batches with every new one: about ten batches say how busy a device is."""
WORTH = 1.15
"""Seconds per input, relative to a full batch, from which a wait is worth it."""
KEPT_WHEN_CHOOSING = 0.5
"""Share of the reserve for later stages that may be spent on running another queue's batch first."""


class Load:
    """How busy a device has been lately."""

    def __init__(self) -> None:
        self.waited = 0.0
        """Share of the time in which it wanted a processor that it waited for one lately; 0 with its own processor."""
        self._busy_s = 0.0
        self._span_s = 0.0
        self._ended_s: float | None = None

    def ran(self, busy_s: float, ended_s: float) -> None:
        """Note that a batch had the device for `busy_s` seconds."""
        since_s = ended_s - busy_s if self._ended_s is None else self._ended_s
        self._busy_s = FADE * self._busy_s + busy_s
        self._span_s = FADE * self._span_s + max(busy_s, ended_s - since_s)
        self._ended_s = ended_s

    def share(self, now_s: float) -> float:
        """Returns the share of its time that the device ran, plus waits for processors; 0 before the first batch."""
        if self._ended_s is None or not self._span_s:
            return 0.0
        return self._weighed_s / (self._span_s + max(0.0, now_s - self._ended_s))

    def due_s(self, since_s: float, latest_s: float) -> float:
        """Returns when a batch that waits since `since_s` and must start by `latest_s` has waited long enough.

        An idle device becomes less busy, so the wait ends sooner than it seemed when it began: at the second t at which
        t - since = patience(busy / (span + t - ended)) * (latest - since), a quadratic equation.
        """
        if self._ended_s is None:
            return since_s
        slope = SLOPE * max(0.0, latest_s - since_s)
        before_s = self._span_s - self._ended_s
        p = before_s - since_s + slope * IDLE_ENOUGH
        q = before_s * (slope * IDLE_ENOUGH - since_s) - slope * self._weighed_s
        root_s = (math.sqrt(max(0.0, p * p - 4 * q)) - p) / 2
        return max(since_s, min(root_s, since_s + MOST_PATIENCE * (latest_s - since_s)))

    @property
    def _weighed_s(self) -> float:
        return self._busy_s * (1 + SHARED * self.waited)


def patience(busy: float) -> float:
    """Returns the share of the time left by deadlines that a batch may wait, for a device with the load `busy`."""
    return min(MOST_PATIENCE, SLOPE * max(0.0, busy - IDLE_ENOUGH))


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing(Generic[P]):
    """A queue with waiting members, on a free device."""

    queue: Queue[P]
    number: int
    """Inputs of its next batch."""
    batch_s: float
    """Seconds of that batch."""
    full_each_s: float
    """Seconds per input in a full batch."""
    latest_s: float
    """When it must start at the latest; infinite without a deadline, or while its times are unknown."""
    may_wait: bool
    """Whether it may wait for a fuller batch; inputs that waited at the ingress do not wait again."""

    @property
    def order(self) -> int:
        """Its place by arrival."""
        return self.queue.members[0].queued_serial

    @property
    def press_s(self) -> float:
        """When other queues may no longer go first."""
        return self.latest_s + KEPT_WHEN_CHOOSING * self.queue.members[0].reserve_s

    @property
    def each_s(self) -> float:
        return self.batch_s / self.number

    def due_s(self, load: Load) -> float:
        """When its batch begins, full or not."""
        if not self.may_wait or math.isinf(self.latest_s) or self.each_s <= WORTH * self.full_each_s:
            return -math.inf
        since_s = self.queue.members[0].since_s
        full_s = self.full_each_s * self.queue.budget.inputs
        return load.due_s(since_s, min(self.latest_s, since_s + MOST_BATCHES * full_s))


def standing_of(queue: Queue[P], times: ObservedTimes, latest_s: float, *, may_wait: bool) -> Standing[P]:
    """Returns the standing of a queue, by the known times of batches."""
    split, budget, mean_tokens = queue.split, queue.budget, times.mean_tokens(queue.split)
    front = queue.members[: budget.inputs]
    full_tokens = budget.tokens_when_full(mean_tokens)
    return Standing(
        queue=queue,
        number=len(front),
        batch_s=times.batch_s(split, sum([member.tokens for member in front])),
        full_each_s=times.batch_s(split, full_tokens) * mean_tokens / full_tokens,
        latest_s=latest_s,
        may_wait=may_wait,
    )


def pick(standings: Sequence[Standing[P]], load: Load, now_s: float) -> tuple[Queue[P] | None, float | None]:
    """Returns the queue whose batch begins now, or None and the second at which to ask again.

    Of the queues that are due, the one with the fewest seconds per input goes first, so that the others fill meanwhile
    and most inputs get on soonest. The most urgent queue goes first if it could not wait for that.
    """
    due = [(each.due_s(load), each) for each in standings]
    ready = [each for at_s, each in due if at_s <= now_s]
    if not ready:
        return None, min(at_s for at_s, _ in due)
    urgent = min(ready, key=lambda each: (each.press_s, each.order))
    cheapest = min(ready, key=lambda each: (each.each_s, each.order))
    if cheapest is not urgent and now_s + cheapest.batch_s > urgent.press_s:
        return urgent.queue, None
    return cheapest.queue, None
