"""Where to cut, and which ramps to switch on: the best of all plans for one device, by the cost model.

An own small search and not `optimizer.planner`, which needs numba: this bench runs where only torch is. The cost model
is the same in all but two terms. What a split costs beside its blocks (fusing, queues, launches) has a row of its own.
And a batch that everybody has left is not run on: small batches end early more often than they shrink.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from earlyexit.errors import DataError
from earlyexit.split import Split


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds by batch size, of a model whose blocks are alike."""

    batches: tuple[int, ...]
    """Measured sizes, ascending."""
    block_s: tuple[float, ...]
    """One block; embedding and head are spread over them."""
    ramp_s: tuple[float, ...]
    """One active ramp, and the decision it takes, when nobody leaves."""
    split_s: tuple[float, ...]
    """One more split: its batch has to be queued, fused and started."""

    def __post_init__(self) -> None:
        if not self.batches or list(self.batches) != sorted(set(self.batches)) or self.batches[0] < 1:
            raise DataError(f"measured batch sizes must ascend from at least 1, not {list(self.batches)}")
        for name in ("block_s", "ramp_s", "split_s"):
            if len(getattr(self, name)) != len(self.batches):
                raise DataError(f"{name} needs {len(self.batches)} values, one per batch size")

    def at(self, batch: float) -> tuple[float, float, float]:
        """Block, ramp and split at any batch: linear between measured sizes, constant outside."""
        block_s, ramp_s, split_s = (
            float(np.interp(batch, self.batches, seconds)) for seconds in (self.block_s, self.ramp_s, self.split_s)
        )
        return block_s, ramp_s, split_s

    def inside(self, batch: int, share: float) -> tuple[float, float]:
        """Expected seconds of a block and of a ramp that each of a batch's inputs reaches with this probability.

        What the mean batch of those that anybody reaches takes, times their probability.
        """
        reached = 1 - (1 - share) ** batch
        if reached == 0:
            return 0.0, 0.0
        block_s, ramp_s, _ = self.at(batch * share / reached)
        return reached * block_s, reached * ramp_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Splits of a whole model at one batch size, and the seconds they take per input."""

    splits: tuple[Split, ...]
    work_s: float

    @property
    def rate_per_s(self) -> float:
        """What a device gives that always has work."""
        return 1 / self.work_s


def best_splits(
    costs: Costs, survival: Sequence[float], ramps: Sequence[int], batch: int, *, most_splits: int | None = None
) -> Choice:
    """The splits and active ramps of the least work per input, w = sum of s(i) * T / b over the splits.

    `survival` is nested: with every ramp active, per block. A cut is only ever worth it where inputs leave, so splits
    end at active ramps. Exact: shortest paths over the splits, and inside each over its ramps.
    """
    num_blocks = len(survival)
    most = num_blocks if most_splits is None else most_splits
    stops = [0, *(ramp + 1 for ramp in ramps), num_blocks]
    # Least work of the blocks before a stop, by the number of splits it takes; who had the last split's start.
    best: dict[tuple[int, int], Choice] = {(0, 0): Choice(splits=(), work_s=0.0)}
    for number in range(most):
        for first in stops[:-1]:
            before = best.get((first, number))
            if before is None:
                continue
            for end, (split_s, active) in _from(costs, survival, stops, first, batch).items():
                split = Split(first=first, end=end, batch=batch, ramps=active)
                work_s = before.work_s + survival[first] * split_s / batch
                if work_s < _work(best.get((end, number + 1))):
                    best[end, number + 1] = Choice(splits=(*before.splits, split), work_s=work_s)
    return min((choice for (end, _), choice in best.items() if end == num_blocks), key=_work)


def work_of(costs: Costs, survival: Sequence[float], splits: Sequence[Split]) -> float:
    """Seconds per input of given splits, of the same model."""
    work_s, inside = 0.0, 1.0  # inside: share of inputs that active ramps before have left
    for split in splits:
        seconds, at_start = costs.at(split.batch)[2], inside
        for segment in split.segments():
            block_s, ramp_s = costs.inside(split.batch, inside / at_start if at_start else 0.0)
            seconds += (segment.end - segment.first) * block_s
            if segment.ramp is not None:
                seconds += ramp_s
                inside = survival[segment.end]
        work_s += at_start * seconds / split.batch
    return work_s


def _from(
    costs: Costs, survival: Sequence[float], stops: Sequence[int], first: int, batch: int
) -> dict[int, tuple[float, tuple[int, ...]]]:
    """Of the splits that start with a block, by end: the least seconds of a batch, and the ramps that give them."""
    least: dict[int, tuple[float, tuple[int, ...]]] = {first: (costs.at(batch)[2], ())}
    for at in [stop for stop in stops if stop >= first][:-1]:
        seconds, active = least[at]
        share = survival[at] / survival[first] if survival[first] else 0.0  # where nobody comes, nothing is spent
        block_s, ramp_s = costs.inside(batch, share)
        for end in [stop for stop in stops if stop > at]:
            last = end == stops[-1]
            through_s = seconds + (end - at) * block_s + (0.0 if last else ramp_s)
            if end not in least or through_s < least[end][0]:
                least[end] = (through_s, active if last else (*active, end - 1))
    return {end: found for end, found in least.items() if end != first}


def _work(choice: Choice | None) -> float:
    return math.inf if choice is None else choice.work_s
