"""The time of an emulated accelerator: a latency profile, read between its batch sizes, and stretched."""

from __future__ import annotations

from collections.abc import Collection

import numpy as np

from earlyexit.errors import PlanError
from earlyexit.split import Budget, Split
from profiles.table import LatencyTable


class Pace:
    """Seconds of consecutive blocks at any number of inputs, up to the largest measured batch.

    Where lengths count, a batch is as large as so many inputs of the profile's length hold its tokens; that is no whole
    number. Interpolated once, here: a batch then costs its replica additions only.
    """

    def __init__(
        self, table: LatencyTable, ramps: tuple[int, ...], stretch: float, *, length: int | None = None
    ) -> None:
        """`length`: tokens of the inputs that the profile was measured with; None: inputs cost alike."""
        self.length = length
        sizes_X = np.arange(1, table.batches[-1] + 1, dtype=np.float64)
        block_s_NX = table.blocks_at(sizes_X) * stretch
        # Per number of inputs, the seconds before every block and, last, those of all blocks.
        self._before_s = np.vstack([np.zeros(len(sizes_X)), block_s_NX.cumsum(0)]).T.tolist()
        self._ramp_s = dict(zip(ramps, (table.ramps_at(sizes_X) * stretch).tolist(), strict=True))
        self._largest = table.batches[-1]

    def check_budget(self, budget: Budget) -> None:
        """Raise PlanError for batches about which the profile says nothing."""
        if self.length is None or budget.tokens is None:
            self.check_batch(budget.inputs)
        elif budget.tokens > self._largest * self.length:
            raise PlanError(
                f"the profile knows no batch of {budget.tokens} tokens: its largest is {self._largest} inputs of "
                f"{self.length}"
            )

    def check_batch(self, size: int) -> None:
        """Raise PlanError for a batch of so many inputs about which the profile says nothing."""
        if size > self._largest:
            raise PlanError(f"the profile knows no batch of {size}: its largest is {self._largest}")

    def size_of(self, num_inputs: int, num_tokens: int) -> float:
        """In inputs as the profile has them, how large a batch is."""
        return num_inputs if self.length is None else num_tokens / self.length

    def seconds(self, first: int, end: int, size: float, ramps: Collection[int]) -> float:
        """Of blocks first to end - 1 with `size` inputs inside, with those of the given ramps that are among them.

        Linear between whole numbers, as the profile is between its batch sizes; below 1 as at 1.
        """
        whole = int(size)
        at_s = self._whole_s(first, end, max(1, whole), ramps)
        if whole == size or whole < 1:
            return at_s
        return at_s + (size - whole) * (self._whole_s(first, end, whole + 1, ramps) - at_s)

    def seconds_of_any(self, first: int, end: int, size: float, ramps: Collection[int]) -> float:
        """The same for more inputs, too, than were ever measured: then as many times those of the largest batch."""
        measured = min(size, self._largest)
        return self.seconds(first, end, measured, ramps) * (size / measured)

    def split_s(self, split: Split, size: float) -> tuple[float, float]:
        """Until a split's first active ramp, or its end, and to its end, when nobody leaves."""
        first_end = split.segments()[0].end
        return (
            self.seconds_of_any(split.first, first_end, size, split.ramps),
            self.seconds_of_any(split.first, split.end, size, split.ramps),
        )

    def _whole_s(self, first: int, end: int, size: int, ramps: Collection[int]) -> float:
        before_s = self._before_s[size - 1]
        ramp_s = sum([self._ramp_s[ramp][size - 1] for ramp in ramps if first <= ramp < end])
        return float(before_s[end] - before_s[first] + ramp_s)
