"""The time of an emulated accelerator: a latency profile, read between its batch sizes, and stretched."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from earlyexit.errors import PlanError
from earlyexit.split import Split
from profiles.table import LatencyTable


class Pace:
    """Seconds of consecutive blocks at any number of inputs, up to the largest measured batch.

    Interpolated once, here: a batch then costs its replica additions only.
    """

    def __init__(self, table: LatencyTable, ramps: tuple[int, ...], stretch: float) -> None:
        sizes_X = np.arange(1, table.batches[-1] + 1, dtype=np.float64)
        block_s_NX = table.blocks_at(sizes_X) * stretch
        # Per number of inputs, the seconds before every block and, last, those of all blocks.
        self._before_s = np.vstack([np.zeros(len(sizes_X)), block_s_NX.cumsum(0)]).T.tolist()
        self._ramp_s = dict(zip(ramps, (table.ramps_at(sizes_X) * stretch).tolist(), strict=True))
        self._largest = table.batches[-1]

    def check_batch(self, size: int) -> None:
        """Raise PlanError for a batch about which the profile says nothing."""
        if size > self._largest:
            raise PlanError(f"the profile knows no batch of {size}: its largest is {self._largest}")

    def seconds(self, first: int, end: int, size: int, ramps: Collection[int]) -> float:
        """Of blocks first to end - 1 with `size` inputs inside, with those of the given ramps that are among them."""
        before_s = self._before_s[size - 1]
        ramp_s = sum([self._ramp_s[ramp][size - 1] for ramp in ramps if first <= ramp < end])
        return float(before_s[end] - before_s[first] + ramp_s)

    def seconds_of_any(self, first: int, end: int, size: int, ramps: Collection[int]) -> float:
        """The same for more inputs, too, than were ever measured: then as many times those of the largest batch."""
        measured = min(size, self._largest)
        return self.seconds(first, end, measured, ramps) * (size / measured)

    def split_s(self, split: Split, size: int) -> tuple[float, float]:
        """Until a split's first active ramp, or its end, and to its end, when nobody leaves."""
        first_end = split.segments()[0].end
        return (
            self.seconds(split.first, first_end, size, split.ramps),
            self.seconds(split.first, split.end, size, split.ramps),
        )
