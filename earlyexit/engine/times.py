"""What batches cost: the times of splits, by which the engine keeps deadlines. Pure.

The cost of a batch is its number of tokens; where inputs have no tokens, each counts as one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

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


class BySplit(Generic[V]):
    """A value per split; a new split replaces the one that has not run for longest.

    One thread adds while another may read.
    """

    def __init__(self, new: Callable[[], V]) -> None:
        self._new = new
        self.kept: dict[Work, V] = {}
        self._by_last_run: dict[Work, None] = {}
        # Most replicas run one split again and again, so `latest` saves the look-up.
        self.latest_split: Split | None = None
        self.latest: V = new()

    def find(self, split: Split) -> V | None:
        """Returns the split's value; None for a split that never ran, or not for long."""
        return self.latest if split is self.latest_split else self.kept.get(_work(split))

    def of_run(self, split: Split) -> V:
        """Returns the value of a split that has run now."""
        if split is not self.latest_split:
            work = _work(split)
            if work not in self.kept:
                if len(self.kept) >= MOST_SPLITS:
                    oldest = next(iter(self._by_last_run))
                    del self.kept[oldest], self._by_last_run[oldest]
                self.kept[work] = self._new()
            self._by_last_run.pop(work, None)
            self._by_last_run[work] = None
            self.latest_split, self.latest = split, self.kept[work]
        return self.latest


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
            for (first, end, ramps, after_answer), by_size in self.kept.copy().items()
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
    first_s: dict[int, float] = field(default_factory=dict)
    """By the end of a bucket, until the first answers of a batch or, without any, its end."""
    inputs: float = 0.0
    """Of a batch, on average."""
    tokens: float = 0.0
    """Of the same batches."""


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

    def first_s(self, split: Split, tokens: float) -> float:
        """Returns the seconds until the first answers of a batch of so many tokens: no more than larger ones took."""
        known = self.find(split)
        if known is None:
            return 0.0
        position = bisect_left(known.ends, tokens * (1 - ROUNDING))
        return min([known.first_s[end] for end in known.ends[position:] or known.ends[-1:]])

    def observe(
        self, split: Split, size: int, tokens: int, first_s: float, total_s: float, *, weight: float = SMOOTHING
    ) -> None:
        """Learn that a batch of `size` inputs had its first answers, or its end, after `first_s`; it took `total_s`."""
        known = self.latest if split is self.latest_split else self.of_run(split)
        end = bucket_end(size, tokens)
        before_s = known.total_s.get(end)
        if before_s is None:
            insort(known.ends, end)
            known.total_s[end], known.first_s[end] = total_s, first_s
        else:
            known.total_s[end] = before_s + weight * (total_s - before_s)
            known.first_s[end] += weight * (first_s - known.first_s[end])
        if known.inputs:
            known.inputs += SMOOTHING * (size - known.inputs)
            known.tokens += SMOOTHING * (tokens - known.tokens)
        else:
            known.inputs, known.tokens = size, tokens


def bucket_end(size: int, tokens: int) -> int:
    """Returns the end of a batch's bucket: the most tokens of a batch that is taken to last as long as this one.

    Batches of inputs of one token each have a bucket for every size.
    """
    if size == tokens:
        return size
    width = 1 << max(0, tokens.bit_length() - BUCKET_BITS)
    return -(-tokens // width) * width
