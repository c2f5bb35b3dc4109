"""What an ingress counts: who arrived, was answered, dropped, or went on to another network, and how soon."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from deployments.reports import BUCKET

PER_BUCKET = 1 / math.log(BUCKET)
SHORTEST_S = 1e-6
"""Below, latencies are one bucket: a clock that stood still has no logarithm."""
MOST_UNCOUNTED = 4096
BY_KEY = ("exits", "drops", "latencies", "crossings", "crossing_s", "words", "pruned_words")
"""What is counted apart by blocks, reasons, buckets."""
LATENCY_ENDS_S = (
    *(0.001, 0.0015, 0.002, 0.003, 0.005, 0.007),
    *(0.01, 0.015, 0.02, 0.03, 0.05, 0.07),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.7),
    *(1.0, 1.5, 2.0, 3.0, 5.0, 7.0),
    *(10.0, 15.0, 20.0, 30.0, 60.0, math.inf),
)
"""Up to which latencies are told, six per decade."""


def bucket_of(seconds: float) -> int:
    """The latency bucket that a duration falls into."""
    return math.floor(math.log(max(seconds, SHORTEST_S)) * PER_BUCKET)


def latencies_within(latencies: Mapping[int, int], ends_s: Sequence[float]) -> list[int]:
    """Answers by the longest latency that their bucket may hold, at most each of `ends_s`."""
    between = [0] * len(ends_s)
    for bucket, count in latencies.items():
        between[bisect_left(ends_s, BUCKET ** (bucket + 1))] += count
    return list(accumulate(between))


class IngressCounts:
    """Every input that arrived is, later, answered or dropped: once, for one reason."""

    def __init__(self, slo_s: float | None) -> None:
        self._slo_s = math.inf if slo_s is None else slo_s
        self.arrived = 0
        self.answered = 0
        self.answered_tokens = 0
        """Of the answered."""
        self.exits: Counter[int] = Counter()
        self.drops: Counter[str] = Counter()
        self.refused = 0
        """Of those that arrived; their lengths are not known."""
        self.crossings: Counter[int] = Counter()
        """Inputs that went on to another network, by its first block; as are the next three."""
        self.crossing_s: defaultdict[int, float] = defaultdict(float)
        self._crossed_in: Counter[int] = Counter()
        """Of these, by latency bucket."""
        self.words: Counter[int] = Counter()
        self.pruned_words: Counter[int] = Counter()
        self._taken_tokens = 0
        self._in_slo = 0
        self._latencies: Counter[int] = Counter()
        self._uncounted_s = array("d")
        """Latencies that are not in these two yet: counted one by one they cost more than all else of an answer."""

    @property
    def in_slo(self) -> int:
        self._count()
        return self._in_slo

    @property
    def latencies(self) -> Counter[int]:
        self._count()
        return self._latencies

    def totals(self) -> dict[str, Any]:
        """All of them, by the names that an `IngressReport` has for them."""
        plain = {name: getattr(self, name) for name in ("arrived", "answered", "answered_tokens", "in_slo")}
        return plain | {name: dict(getattr(self, name)) for name in BY_KEY}

    @property
    def tokens_per_input(self) -> float | None:
        """Of those that were taken so far; None before the first."""
        taken = self.arrived - self.refused
        return self._taken_tokens / taken if taken else None

    def take(self, num_inputs: int, num_tokens: int) -> None:
        """Count inputs that arrived and were not refused."""
        self.arrived += num_inputs
        self._taken_tokens += num_tokens

    def answer(self, exit_block: int, latencies_s: Sequence[float], num_tokens: int, *, by_present_plan: bool) -> None:
        """Count answers that were given together, and the tokens of their inputs."""
        self.answered += len(latencies_s)
        self.answered_tokens += num_tokens
        self._uncounted_s.extend(latencies_s)
        if len(self._uncounted_s) > MOST_UNCOUNTED:
            self._count()
        if by_present_plan:
            self.exits[exit_block] += len(latencies_s)

    def cross(self, block: int, took_s: Sequence[float], *, words: int = 0, pruned_words: int = 0) -> None:
        """Count inputs that went on to the network that begins with a block, each with the seconds that it waited here.

        `words`: of the texts that words could be pruned of.
        """
        self.crossings[block] += len(took_s)
        self.crossing_s[block] += sum(took_s)
        for seconds, inputs in Counter(took_s).items():  # those of one call took the same
            self._crossed_in[bucket_of(seconds)] += inputs
        if words:
            self.words[block] += words
            self.pruned_words[block] += pruned_words

    def crossing_quantile_s(self, share: float) -> float | None:
        """How long so many of the crossings took at most, at most 5 % too long; None before the first."""
        left = share * self._crossed_in.total()
        for bucket, inputs in sorted(self._crossed_in.items()):
            left -= inputs
            if left <= 0:
                return BUCKET ** (bucket + 1)
        return None

    def begin_plan(self) -> None:
        self.exits.clear()

    def _count(self) -> None:
        seconds_N = np.array(self._uncounted_s)
        self._uncounted_s = array("d")
        self._in_slo += int((seconds_N <= self._slo_s).sum())
        buckets_N = np.floor(np.log(np.maximum(seconds_N, SHORTEST_S)) * PER_BUCKET).astype(np.int64)
        for bucket, number in zip(*np.unique(buckets_N, return_counts=True), strict=True):
            self._latencies[int(bucket)] += int(number)
