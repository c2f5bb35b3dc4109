"""How long splits take: what the engine must know to keep deadlines."""

from __future__ import annotations

from typing import Protocol

from earlyexit.counts import MOST_SPLITS
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


Work = tuple[int, int, tuple[int, ...]]
"""What a batch of a split computes: blocks and ramps. Splits of two plans may start with the same block."""


class ObservedTimes:
    """Times learnt from the batches that ran: a moving average per split and batch size.

    The split that has not run for longest makes room for a new one.
    """

    def __init__(self) -> None:
        self._total_s: dict[Work, dict[int, float]] = {}
        self._first_s: dict[Work, float] = {}

    def batch_s(self, split: Split, size: int) -> float:
        known = self._total_s.get(_work(split))
        if not known:
            return 0.0
        above = [other for other in known if other >= size]
        if above:
            return known[min(above)]
        largest = max(known)
        return known[largest] * size / largest

    def soonest_s(self, split: Split) -> float:
        return self._first_s.get(_work(split), 0.0)

    def observe(self, split: Split, size: int, first_s: float, total_s: float) -> None:
        work = _work(split)
        known = self._total_s[work] = self._total_s.pop(work, {})  # those that ran last come last
        known[size] = _smooth(known.get(size), total_s)
        soonest = self._first_s.get(work)
        if soonest is None or first_s < soonest:
            self._first_s[work] = first_s
        else:
            self._first_s[work] = _smooth(soonest, min(first_s, 2 * soonest)) if size == 1 else soonest
        if len(self._total_s) > MOST_SPLITS:
            longest_ago = next(iter(self._total_s))
            del self._total_s[longest_ago], self._first_s[longest_ago]


def _work(split: Split) -> Work:
    return split.first, split.end, split.ramps


def _smooth(before: float | None, now: float) -> float:
    return now if before is None else before + SMOOTHING * (now - before)
