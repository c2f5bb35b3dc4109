"""What a split is to the replicas of one kind of accelerator: who leaves where, and how long its batches take."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection, Sequence
from typing import Any

from cluster.pace import Pace
from deployments.ingress.core.flights import Flight
from earlyexit.counts import SplitCounts
from earlyexit.engine import Batch
from earlyexit.split import Split
from simulator.decisions import NOWHERE
from simulator.trip import Input

Exit = tuple[int, list[Input]]
"""A block, and who leaves after it."""
Size = Any
"""What members cost together: a number of inputs, or where lengths count, of tokens; of steps a `StepSize`."""


class Work:
    """Of one split."""

    __slots__ = ("_counts", "_leaves", "_pace", "_took_s", "_until_s", "is_late", "size_of", "split")

    def __init__(
        self,
        split: Split,
        leaves: array[int],
        pace: Pace,
        counts: SplitCounts,
        took_s: array[float] | None = None,
    ) -> None:
        """`leaves`: by an input's number modulo their number, the ramp at which it leaves, or NOWHERE.

        `took_s`: gets the seconds of every batch.
        """
        self.split = split
        self.size_of: Callable[[Sequence[Input]], Size] = len if pace.length is None else tokens_of
        self.is_late = False
        """Whether who leaves early is answered at the batch's end."""
        self._pace = pace
        self._until_s: dict[int, list[float]] = {}
        self._leaves = leaves
        self._counts = counts
        self._took_s = took_s

    def until_s(self, size: Size) -> list[float]:
        """Seconds by number of blocks, while members of such a size are inside and nobody leaves."""
        until_s = self._until_s.get(size)
        if until_s is None:
            split, inputs = self.split, self._pace.size_of(size, size)
            blocks = range(split.first, split.end + 1)
            until_s = [self._pace.seconds_of_any(split.first, block, inputs, split.ramps) for block in blocks]
            self._until_s[size] = until_s
        return until_s

    def end_s(self, size: Size | None, num_waiting: int) -> float:
        """What comes after a batch's last block, which members of such a size have reached; None: nobody has.

        `num_waiting`: those who have left, and wait for the end.
        """
        return 0.0

    def seconds(self, block: int, size: Size, ramps: Collection[int]) -> float:
        """From the split's begin until after a block, with members of such a size inside and these ramps evaluated."""
        inputs = self._pace.size_of(size, size)
        return self._pace.seconds_of_any(self.split.first, block + 1, inputs, ramps)

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
        if self._took_s is not None:
            self._took_s.append(seconds)


def tokens_of(members: Sequence[Input]) -> int:
    """Of all together."""
    return sum([member.tokens for member in members])


class Works:
    """Of all splits, for replicas of one pace."""

    __slots__ = ("_hop_length", "_make", "_of", "pace")

    def __init__(self, pace: Pace, make: Callable[[Split, Pace], Work], hop_length: int | None = None) -> None:
        """`hop_length`: tokens of the input that `bytes_per_sample_N` is of; None: inputs cost alike."""
        self.pace = pace
        self._hop_length = hop_length
        self._make = make
        self._of: dict[int, Work] = {}

    def of(self, split: Split) -> Work:
        """Of one, made when it is first asked for."""
        # By identity: a split's hash is as dear as the rest of a batch.
        work = self._of.get(id(split))
        if work is None or work.split is not split:
            work = self._of[id(split)] = self._make(split, self.pace)
        return work

    def inputs_of(self, members: Sequence[Input]) -> float:
        """As many inputs of the length that hidden states are told of, as hold what these hold."""
        return len(members) if self._hop_length is None else tokens_of(members) / self._hop_length

    def known(self, split: Split) -> list[tuple[int, int]]:
        """Inputs and tokens of the batches that a replica has run when it is ready: the least, and a full one."""
        length, budget = self.pace.length, split.tokens
        if length is None:
            return [(size, size) for size in sorted({1, split.batch})]
        full = split.batch if budget is None else max(1, min(split.batch, budget // length))
        return [(size, size * length) for size in sorted({1, full})]

    def forget(self, pace: Pace) -> None:
        """Other ramps are active, or other networks used, so inputs leave elsewhere and may be longer or shorter."""
        self.pace = pace
        self._of.clear()
