"""What a split is to the replicas of one kind of accelerator."""

from __future__ import annotations

from cluster.pace import Pace
from earlyexit.counts import SplitCounts
from earlyexit.engine import Batch
from earlyexit.split import Split


class Work:
    """Who leaves where in a split, how long its batches take, and what they were."""

    __slots__ = ("_counts", "leaves", "split", "whole_s")

    def __init__(self, split: Split, leaves: list[int], pace: Pace, counts: SplitCounts) -> None:
        self.split = split
        self.leaves = leaves
        """By an input's number modulo the service's cycle: the ramp at which it leaves, or STAYS."""
        sizes = range(1, split.batch + 1)
        self.whole_s = [pace.seconds(split.first, split.end, size, split.ramps) for size in sizes]
        """By batch size less 1, when nobody leaves inside."""
        self._counts = counts

    def count(self, batch: Batch[int], seconds: float) -> None:
        """A batch was run."""
        counts = self._counts
        counts.batches += 1
        counts.inputs += len(batch.members)
        counts.capacity += batch.split.batch
        counts.busy_s += seconds
