"""Times at which the exits of a model release their answers, including the ramps before them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from earlyexit.errors import DataError
from profiles.records import ExitOutcome
from profiles.scores import FloatArray
from profiles.table import LatencyTable


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitTimes:
    """Seconds of the model's blocks and ramps at one batch size: the "one-time profile" of Apparate, section 3.3.

    The batch keeps its size, because inputs stay after their answer. Waits are left out: they are equal for all exits.
    """

    block_s: tuple[float, ...]
    """Seconds of each block."""
    ramp_s: Mapping[int, float]
    """Seconds of each ramp of the model, active or not."""

    def __post_init__(self) -> None:
        seconds = np.array([*self.block_s, *self.ramp_s.values()])
        if not self.block_s or not np.isfinite(seconds).all() or (seconds < 0).any() or not sum(self.block_s):
            raise DataError("seconds of blocks and ramps must be finite and at least 0, and those of blocks not all 0")
        outside = sorted(ramp for ramp in self.ramp_s if not 0 <= ramp < len(self.block_s) - 1)
        if outside:
            raise DataError(f"ramps must be after blocks 0 to {len(self.block_s) - 2}, not {outside}")

    @classmethod
    def of(cls, table: LatencyTable, ramps: Sequence[int], batch: float) -> ExitTimes:
        """Returns the times by a latency table. `ramps` are all ramps of the model, in the table's order."""
        size = np.array(batch, dtype=np.float64)
        ramp_s = dict(zip(ramps, table.ramps_at(size).tolist(), strict=True))
        return cls(block_s=tuple(table.blocks_at(size).tolist()), ramp_s=ramp_s)

    @property
    def whole_s(self) -> float:
        """Seconds of the model without ramps."""
        return sum(self.block_s)

    def released_s(self, active: Collection[int]) -> FloatArray:
        """Returns, per block, the seconds until an answer given after it is released."""
        ramp_s_N = [self.ramp_s[block] if block in active else 0.0 for block in range(len(self.block_s))]
        return np.cumsum(np.add(self.block_s, ramp_s_N))

    def saved(self, outcome: ExitOutcome, active: Collection[int]) -> float:
        """Returns by which share of the model's time answers come earlier, on average; negative if ramps cost more."""
        return 1 - float(self.released_s(active)[outcome.exits_N].mean()) / self.whole_s
