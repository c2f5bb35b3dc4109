"""When answers are released at each exit of a model, and what ramps cost on the way."""

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
    """Seconds of the model's blocks and ramps, at one batch size: the "one-time profile" of Apparate, section 3.3.

    The batch keeps its size: inputs stay when they are answered. Waiting is not counted, it is the same for all exits.
    """

    block_s: tuple[float, ...]
    """One per block."""
    ramp_s: Mapping[int, float]
    """One per ramp of the model, active or not."""

    def __post_init__(self) -> None:
        seconds = np.array([*self.block_s, *self.ramp_s.values()])
        if not self.block_s or not np.isfinite(seconds).all() or (seconds < 0).any() or not sum(self.block_s):
            raise DataError("blocks and ramps need seconds: finite numbers, none below 0, and not 0 altogether")
        outside = sorted(ramp for ramp in self.ramp_s if not 0 <= ramp < len(self.block_s) - 1)
        if outside:
            raise DataError(f"ramps {outside} are not before the last of {len(self.block_s)} blocks")

    @classmethod
    def of(cls, table: LatencyTable, ramps: Sequence[int], batch: float) -> ExitTimes:
        """From a latency profile; `ramps` are all of the model, in the table's order."""
        at = np.array(batch, dtype=np.float64)
        ramp_s = dict(zip(ramps, table.ramps_at(at).tolist(), strict=True))
        return cls(block_s=tuple(table.blocks_at(at).tolist()), ramp_s=ramp_s)

    @property
    def whole_s(self) -> float:
        """Of the model without ramps."""
        return sum(self.block_s)

    def released_s(self, active: Collection[int]) -> FloatArray:
        """Per block, the seconds after which an input answered there has its answer."""
        on_the_way_s = [self.ramp_s[block] if block in active else 0.0 for block in range(len(self.block_s))]
        return np.cumsum(np.add(self.block_s, on_the_way_s))

    def saved(self, outcome: ExitOutcome, active: Collection[int]) -> float:
        """Share of the model's time that answers come earlier, on average; negative where ramps cost more."""
        return 1 - float(self.released_s(active)[outcome.exits_N].mean()) / self.whole_s
