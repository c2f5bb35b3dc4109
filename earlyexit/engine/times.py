"""How long the batches of each split take. The engine uses these times to keep deadlines.

The size of a batch is its number of tokens. Inputs without tokens count as one token each.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from earlyexit.network.boundary import AfterAnswer, Split

V = TypeVar("V")

MOST_SPLITS = 64
"""The most splits whose times are kept. A few dozen plans need a few kilobytes."""

Work = tuple[int, int, tuple[int, ...], AfterAnswer]
"""A split's computation: its first block, end, ramps, and whether answered inputs leave. The first block alone is no
key, since splits of two plans may start with the same block."""


@dataclass(frozen=True, slots=True, kw_only=True)
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


class BySplit(Generic[V]):
    """A value per split; a new split replaces the least recently run one. One thread may write while another reads."""

    def __init__(self, new: Callable[[], V]) -> None:
        self._new = new
        self.values: dict[Work, V] = {}
        self._by_last_run: dict[Work, None] = {}
        # Most replicas run the same split again and again. `latest` saves the lookup.
        self.latest_split: Split | None = None
        self.latest: V = new()

    def find(self, split: Split) -> V | None:
        """Returns the split's value; None if it never ran or was replaced."""
        return self.latest if split is self.latest_split else self.values.get(_work(split))

    def of_run(self, split: Split) -> V:
        """Returns the value of a split that has just run; adds one if it has none."""
        if split is not self.latest_split:
            work = _work(split)
            if work not in self.values:
                if len(self.values) >= MOST_SPLITS:
                    oldest = next(iter(self._by_last_run))
                    del self.values[oldest], self._by_last_run[oldest]
                self.values[work] = self._new()
            self._by_last_run.pop(work, None)
            self._by_last_run[work] = None
            self.latest_split, self.latest = split, self.values[work]
        return self.latest


class RunSums(BySplit[dict[tuple[int, bool], tuple[int, int, float]]]):
    """Batches, tokens and seconds in total, by split, batch size, and whether another batch ran beside."""

    def __init__(self) -> None:
        super().__init__(dict)

    def add(self, split: Split, size: int, tokens: int, seconds: float, *, shared: bool = False) -> None:
        """Adds a batch to the sums."""
        by_size = self.latest if split is self.latest_split else self.of_run(split)
        batches, sum_tokens, sum_s = by_size.get((size, shared), (0, 0, 0.0))
        by_size[size, shared] = (batches + 1, sum_tokens + tokens, sum_s + seconds)

    def all(self) -> tuple[TimesRun, ...]:
        """Returns the sums of every split and size."""
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
            for (first, end, ramps, after_answer), by_size in self.values.copy().items()
            for (size, shared), (batches, tokens, seconds) in by_size.copy().items()
        )


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
class _Averages:
    """The moving averages of one split."""

    ends: list[int] = field(default_factory=list)
    """The ends of the buckets that have a batch, ascending."""
    total_s: dict[int, float] = field(default_factory=dict)
    """Seconds of a batch, by the end of its bucket."""
    first_s: dict[int, float] = field(default_factory=dict)
    """Seconds until a batch's first answers, or until its end without any, by the end of its bucket."""
    inputs: float = 0.0
    """Inputs per batch."""
    tokens: float = 0.0
    """Tokens per batch."""


class ObservedTimes(BySplit[_Averages]):
    """Expected seconds of batches: moving averages of measured batches, per split and bucket of tokens.

    They are zero until a batch was measured, so that no input is dropped because of a guess.
    """

    def __init__(self) -> None:
        super().__init__(_Averages)

    def batch_s(self, split: Split, tokens: float) -> float:
        """Returns the seconds of a batch of `tokens` tokens. Above the largest bucket they grow in proportion."""
        known = self.find(split)
        if known is None:
            return 0.0
        position = bisect_left(known.ends, tokens * (1 - ROUNDING))
        if position < len(known.ends):
            return known.total_s[known.ends[position]]
        return known.total_s[known.ends[-1]] * tokens / known.ends[-1]

    def mean_tokens(self, split: Split) -> float:
        """Returns the mean tokens per input of a split; 1 while unknown."""
        known = self.find(split)
        return 1.0 if known is None else known.tokens / known.inputs

    def first_s(self, split: Split, tokens: float) -> float:
        """Returns the seconds until a batch's first answers: the least over the bucket of `tokens` and larger ones."""
        known = self.find(split)
        if known is None:
            return 0.0
        position = bisect_left(known.ends, tokens * (1 - ROUNDING))
        return min([known.first_s[end] for end in known.ends[position:] or known.ends[-1:]])

    def observe(
        self, split: Split, size: int, tokens: int, first_s: float, total_s: float, *, weight: float = SMOOTHING
    ) -> None:
        """Adds a batch to the averages. `first_s`: seconds until its first answers, or until its end without any."""
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
    """Returns the end of a batch's bucket: the most tokens of a batch that counts as equally long.

    If all inputs have one token, each batch size has its own bucket.
    """
    if size == tokens:
        return size
    width = 1 << max(0, tokens.bit_length() - BUCKET_BITS)
    return -(-tokens // width) * width
