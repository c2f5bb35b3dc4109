"""How long splits take: what the engine must know to keep deadlines.

What a batch costs is its tokens: where inputs have none, it holds as many tokens as inputs.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import Protocol

from earlyexit.counts import BySplit
from earlyexit.split import Split

SMOOTHING = 0.2
"""Weight of the newest observation: a change is followed within about ten batches, one odd batch is not."""
BUCKET_BITS = 4
"""Leading bits of a number of tokens that tell its bucket: buckets are 7 to 13 % wide, so that every one that full
batches fall into is learnt within a few dozen of them, and batches of one take about as long."""
ROUNDING = 1e-9
"""Relative: means of equal lengths are equal but for it, and must not fall into the next bucket, which may be far."""


class Times(Protocol):
    """Expected seconds; zero while nothing is known, so that nothing is dropped on a guess."""

    def batch_s(self, split: Split, tokens: float) -> float:
        """Seconds that a batch of so many tokens takes to the split's end."""
        ...

    def mean_tokens(self, split: Split) -> float:
        """Of an input that runs there; 1 while nothing is known."""
        ...

    def soonest_s(self, split: Split) -> float:
        """Seconds after which the first answer of a batch can leave the split, at best."""
        ...

    def observe(self, split: Split, size: int, tokens: int, first_s: float, total_s: float) -> None:
        """A batch of `size` inputs gave its first answers, or its end, after `first_s` and ended after `total_s`."""
        ...


@dataclass(slots=True)
class _Known:
    ends: list[int] = field(default_factory=list)
    """Of the buckets that ever ran, ascending."""
    total_s: dict[int, float] = field(default_factory=dict)
    """By the end of a bucket."""
    inputs: float = 0.0
    """Of a batch, on average."""
    tokens: float = 0.0
    """Of the same batches."""
    soonest_s: float = math.nan
    """NaN before the first batch."""
    soonest_tokens: int = 0
    """Of the batch that was it."""


class ObservedTimes(BySplit[_Known]):
    """Times learnt from the batches that ran: a moving average per split and bucket of tokens.

    The split that has not run for longest makes room for a new one.
    """

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(_Known)

    def batch_s(self, split: Split, tokens: float) -> float:
        known = self.find(split)
        if known is None:
            return 0.0
        position = bisect_left(known.ends, tokens * (1 - ROUNDING))
        if position < len(known.ends):
            return known.total_s[known.ends[position]]
        return known.total_s[known.ends[-1]] * tokens / known.ends[-1]

    def mean_tokens(self, split: Split) -> float:
        known = self.find(split)
        return 1.0 if known is None else known.tokens / known.inputs

    def soonest_s(self, split: Split) -> float:
        known = self.latest if split is self.latest_split else self.find(split)
        return 0.0 if known is None else known.soonest_s

    def observe(self, split: Split, size: int, tokens: int, first_s: float, total_s: float) -> None:
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
        elif size == 1 and tokens <= known.soonest_tokens:  # a longer one says nothing of how soon a short one can be
            known.soonest_s += SMOOTHING * (min(first_s, 2 * known.soonest_s) - known.soonest_s)


def bucket_end(size: int, tokens: int) -> int:
    """The most tokens of a batch that is taken to last as long as this one.

    Inputs of one token each have a bucket for every number of them; lengths hardly ever make the same sum twice.
    """
    if size == tokens:
        return size
    width = 1 << max(0, tokens.bit_length() - BUCKET_BITS)
    return -(-tokens // width) * width
