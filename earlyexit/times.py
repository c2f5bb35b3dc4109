"""How long splits take: what the engine must know to keep deadlines."""

from __future__ import annotations

import math
from array import array
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
    total_s: array[float] = field(default_factory=lambda: array("d"))
    """By batch size; NaN of those that never ran."""
    soonest_s: float = math.nan
    """NaN before the first batch."""


class ObservedTimes(BySplit[_Known]):
    """Times learnt from the batches that ran: a moving average per split and batch size.

    The split that has not run for longest makes room for a new one.
    """

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(_Known)

    def batch_s(self, split: Split, size: int) -> float:
        known = self.find(split)
        if known is None:
            return 0.0
        ran = [other for other, seconds in enumerate(known.total_s) if seconds == seconds]
        above = [other for other in ran if other >= size]
        return known.total_s[above[0]] if above else known.total_s[ran[-1]] * size / ran[-1]

    def soonest_s(self, split: Split) -> float:
        known = self.latest if split is self.latest_split else self.find(split)
        return 0.0 if known is None else known.soonest_s

    def observe(self, split: Split, size: int, first_s: float, total_s: float) -> None:
        known = self.latest if split is self.latest_split else self.of_run(split)
        by_size = known.total_s
        while size >= len(by_size):
            by_size.append(math.nan)
        before_s = by_size[size]
        by_size[size] = before_s + SMOOTHING * (total_s - before_s) if before_s == before_s else total_s
        if not first_s >= known.soonest_s:  # nothing was known, or it was sooner than ever
            known.soonest_s = first_s
        elif size == 1:
            known.soonest_s += SMOOTHING * (min(first_s, 2 * known.soonest_s) - known.soonest_s)
