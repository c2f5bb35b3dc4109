"""How long splits take: what the engine must know to keep deadlines."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from earlyexit.counts import BySplit
from earlyexit.split import Split

SMOOTHING = 0.2
"""Weight of the newest observation: a change is followed within about ten batches, one odd batch is not."""


class Times(Protocol):
    """Expected seconds; zero while nothing is known, so that nothing is dropped on a guess."""

    def batch_s(self, split: Split, size: int) -> float:
        """Seconds that a batch of `size` inputs takes to the split's end."""
        ...

    def soonest_s(self, split: Split) -> float:
        """Seconds after which the first answer of a batch can leave the split, at best."""
        ...

    def observe(self, split: Split, size: int, first_s: float, total_s: float) -> None:
        """A batch gave its first answers, or its end, after `first_s` and ended after `total_s`."""
        ...


@dataclass(slots=True)
class _Known:
    total_s: dict[int, float] = field(default_factory=dict)
    """By batch size."""
    soonest_s: float = math.nan
    """NaN before the first batch."""


class ObservedTimes:
    """Times learnt from the batches that ran: a moving average per split and batch size.

    The split that has not run for longest makes room for a new one.
    """

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: BySplit[_Known] = BySplit(_Known)

    def batch_s(self, split: Split, size: int) -> float:
        known = self._known.find(split)
        if known is None:
            return 0.0
        total_s = known.total_s
        above = [other for other in total_s if other >= size]
        if above:
            return total_s[min(above)]
        largest = max(total_s)
        return total_s[largest] * size / largest

    def soonest_s(self, split: Split) -> float:
        by_split = self._known
        known = by_split.latest if split is by_split.latest_split else by_split.find(split)
        return 0.0 if known is None else known.soonest_s

    def observe(self, split: Split, size: int, first_s: float, total_s: float) -> None:
        by_split = self._known
        known = by_split.latest if split is by_split.latest_split else by_split.of_run(split)
        before_s = known.total_s.get(size)
        known.total_s[size] = total_s if before_s is None else before_s + SMOOTHING * (total_s - before_s)
        if not first_s >= known.soonest_s:  # nothing was known, or it was sooner than ever
            known.soonest_s = first_s
        elif size == 1:
            known.soonest_s += SMOOTHING * (min(first_s, 2 * known.soonest_s) - known.soonest_s)
