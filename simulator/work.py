"""What a split is to the replicas of one kind of accelerator: who leaves where, and how long its batches take."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from cluster.pace import Pace
from deployments.ingress.core.flights import Flight
from earlyexit.counts import SplitCounts
from earlyexit.engine import Batch
from earlyexit.split import Split
from simulator.decisions import NOWHERE
from simulator.trip import Input

Exit = tuple[int, list[Input]]
"""A block, and who leaves after it."""


class Work:
    """Of one split."""

    __slots__ = ("_counts", "_leaves", "split", "until_s")

    def __init__(self, split: Split, leaves: array[int], pace: Pace, counts: SplitCounts) -> None:
        """`leaves`: by an input's number modulo their number, the ramp at which it leaves, or NOWHERE."""
        self.split = split
        blocks = range(split.first, split.end + 1)
        self.until_s = [
            [pace.seconds(split.first, block, size, split.ramps) for block in blocks]
            for size in range(1, split.batch + 1)
        ]
        """By batch size less 1 and by number of blocks, while nobody leaves."""
        self._leaves = leaves
        self._counts = counts

    def part(self, members: Sequence[Input]) -> tuple[list[Exit], list[Input]]:
        """Who leaves at which of the split's ramps, in their order, and who goes on to its end."""
        if not self.split.ramps:
            return [], list(members)
        leaves, cycle = self._leaves, len(self._leaves)
        by_ramp: dict[int, list[Input]] = {}
        going_on: list[Input] = []
        for member in members:
            ramp = leaves[member.payload.input % cycle]
            if ramp == NOWHERE:
                going_on.append(member)
            elif ramp in by_ramp:
                by_ramp[ramp].append(member)
            else:
                by_ramp[ramp] = [member]
        return sorted(by_ramp.items()), going_on

    def count(self, batch: Batch[Flight[int]], seconds: float) -> None:
        """A batch was run."""
        counts = self._counts
        counts.batches += 1
        counts.inputs += len(batch.members)
        counts.tokens += batch.tokens
        counts.busy_s += seconds


class Works:
    """Of all splits, for replicas of one pace."""

    __slots__ = ("_make", "_of", "pace")

    def __init__(self, pace: Pace, make: Callable[[Split, Pace], Work]) -> None:
        self.pace = pace
        self._make = make
        self._of: dict[int, Work] = {}

    def of(self, split: Split) -> Work:
        """Of one, made when it is first asked for."""
        # By identity: a split's hash is as dear as the rest of a batch.
        work = self._of.get(id(split))
        if work is None or work.split is not split:
            work = self._of[id(split)] = self._make(split, self.pace)
        return work

    def forget(self) -> None:
        """Other ramps are active, so inputs leave elsewhere."""
        self._of.clear()
