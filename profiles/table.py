"""Seconds per block and ramp over batch sizes, on one accelerator at one input length: what a planner reads.

A batch of inputs of several lengths counts as that many inputs of the table's length as hold its tokens; seconds are
linear between measured sizes. This is exact for all that costs the same per token. Attention costs squares of lengths:
at equal tokens a batch of shorter inputs is faster than the table says, and one of longer inputs slower. Costs per
input, such as pooling, are counted per input of the table's length (`experiments.tokens.times@654e280` measures both).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from earlyexit.errors import DataError

FloatArray = npt.NDArray[np.float64]
Rows = Sequence[Sequence[float]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatencyTable:
    """Rows are blocks (N) and ramps (E), columns measured batch sizes (B); refuses what contradicts itself."""

    batches: tuple[int, ...]
    """Measured batch sizes in inputs, ascending."""
    block_s_NB: FloatArray
    ramp_s_EB: FloatArray
    """One row per ramp of the model, active or not, in the order of the model's ramps."""
    length: int | None = None
    """Tokens of every input it was measured with; None where that is not known."""
    context: int | None = None
    """Of steps of sequences: tokens that each had come to; None where that is not known, or inputs are no steps."""
    context_s: float = 0.0
    """What a block takes longer for each further token that a step's sequence has come to."""

    @classmethod
    def of_rows(cls, batches: Sequence[int], block_s: Rows, ramp_s: Rows) -> LatencyTable:
        """From lists of seconds; no rows at all still have a width."""
        blocks, ramps = (
            np.array(rows, dtype=np.float64).reshape(len(rows), len(batches)) for rows in (block_s, ramp_s)
        )
        return cls(batches=tuple(batches), block_s_NB=blocks, ramp_s_EB=ramps)

    def __post_init__(self) -> None:
        if not self.batches or list(self.batches) != sorted(set(self.batches)) or self.batches[0] < 1:
            raise DataError(f"batch sizes must ascend from at least 1, not {list(self.batches)}")
        for called, tokens in (("length", self.length), ("context", self.context)):
            if tokens is not None and tokens < 1:
                raise DataError(f"the {called} of a table is at least 1 token, not {tokens}")
        if not (np.isfinite(self.context_s) and self.context_s >= 0):
            raise DataError(f"context_s must be a finite number of seconds from 0 on, not {self.context_s}")
        for name, seconds in (("block_s", self.block_s_NB), ("ramp_s", self.ramp_s_EB)):
            if seconds.ndim != 2 or seconds.shape[1] != len(self.batches):
                raise DataError(f"{name} needs {len(self.batches)} values a row, one per batch size")
            if not np.isfinite(seconds).all() or (seconds < 0).any():
                raise DataError(f"{name} must hold seconds: finite numbers, none below 0")

    def blocks_at(self, batch_X: FloatArray) -> FloatArray:
        """Seconds of every block (N) at any batch sizes (X): linear between measured sizes, constant outside.

        Expected batches are not whole. Above the largest measured size nothing is known: callers stay below it.
        """
        return _interpolate(batch_X, self.batches, self.block_s_NB)

    def ramps_at(self, batch_X: FloatArray) -> FloatArray:
        """The same for every ramp (E)."""
        return _interpolate(batch_X, self.batches, self.ramp_s_EB)


def _interpolate(batch_X: FloatArray, batches: tuple[int, ...], seconds_RB: FloatArray) -> FloatArray:
    rows = [np.interp(batch_X, batches, row) for row in seconds_RB]
    return np.array(rows).reshape(len(seconds_RB), *np.shape(batch_X))


def check_ramps(ramps: tuple[int, ...], num_blocks: int) -> None:
    """Raise DataError unless ramps ascend and sit below the last block."""
    if list(ramps) != sorted(set(ramps)) or any(not 0 <= ramp < num_blocks - 1 for ramp in ramps):
        raise DataError(f"ramps must ascend and sit below block {num_blocks - 1}, not {list(ramps)}")
