"""Seconds of every block and ramp by batch size, on one accelerator at one input length.

The size of a batch of other lengths is its tokens divided by the table's length, and seconds are interpolated linearly
between measured sizes. This is exact for operations whose cost per token is constant. The cost of attention grows with
the square of the length, so that batches of shorter inputs are faster than estimated, and of longer inputs slower.
Costs per input, such as pooling, are counted per input of the table's length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationInfo

from earlyexit.data.strict import FromFile, checked
from earlyexit.errors import DataError

FloatArray = npt.NDArray[np.float64]
Rows = Sequence[Sequence[float]]
MAX_BATCH = 1_000_000
"""Far above what any accelerator holds. Up to this size all computed integers are exact."""
BatchSize = Annotated[int, Field(le=MAX_BATCH)]
MOST_SECONDS = 1e9
"""Far above any measurement. With larger numbers, sums and quotients overflow or lose precision."""
Seconds = Annotated[float, Field(ge=0, le=MOST_SECONDS)]


def _rows(rows: Rows, info: ValidationInfo) -> FloatArray:
    """Returns lists of seconds as an array with a column per batch size, also for no rows."""
    batches = info.data.get("batches", ())  # missing if they are invalid, which is reported first
    for row, seconds in enumerate(rows):
        if batches and len(seconds) != len(batches):
            needed = f"{len(batches)} are needed, one for each batch size of {list(batches)}"
            raise DataError(f"{len(seconds)} values; {needed}", at=(row,))
    return np.array(rows, dtype=np.float64).reshape(len(rows), len(batches))


if TYPE_CHECKING:
    FileRows = FloatArray
else:
    FileRows = Annotated[list[list[Seconds]], checked(_rows)]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LatencyTable(FromFile):
    """Seconds of blocks (N) and ramps (E) at measured batch sizes (B). Raises DataError for invalid values."""

    batches: Annotated[tuple[BatchSize, ...], Field(alias="batch", strict=False, min_length=1)]
    """Measured batch sizes in inputs, ascending."""
    block_s_NB: Annotated[FileRows, Field(alias="block_s")]
    ramp_s_EB: Annotated[FileRows, Field(alias="ramp_s")]
    """One row per ramp of the model, active or not, in the order of the model's ramps."""
    length: Annotated[int | None, Field(ge=1)] = None
    """Tokens per input in the measurement; None if unknown."""
    context: Annotated[int | None, Field(ge=1)] = None
    """For decode steps: tokens that precede the step in each sequence. None if unknown, or if inputs are not steps."""
    context_s: Seconds = 0.0
    """For decode steps: seconds that each further token of context adds to a block."""

    @classmethod
    def of_rows(cls, batches: Sequence[int], block_s: Rows, ramp_s: Rows) -> LatencyTable:
        """Returns the table of lists of seconds. Empty lists become arrays with a column per batch size."""
        blocks, ramps = (
            np.array(rows, dtype=np.float64).reshape(len(rows), len(batches)) for rows in (block_s, ramp_s)
        )
        return cls(batches=tuple(batches), block_s_NB=blocks, ramp_s_EB=ramps)

    def __post_init__(self) -> None:
        if not self.batches or list(self.batches) != sorted(set(self.batches)) or self.batches[0] < 1:
            raise DataError(f"batch sizes must ascend from at least 1, not {list(self.batches)}", at=("batch",))
        for name, tokens in (("length", self.length), ("context", self.context)):
            if tokens is not None and tokens < 1:
                raise DataError(f"the {name} of a table must be at least 1 token, not {tokens}")
        if not (np.isfinite(self.context_s) and self.context_s >= 0):
            raise DataError(f"context_s must be a finite number of seconds, at least 0, not {self.context_s}")
        for name, seconds in (("block_s", self.block_s_NB), ("ramp_s", self.ramp_s_EB)):
            if seconds.ndim != 2 or seconds.shape[1] != len(self.batches):
                raise DataError(f"{name} needs {len(self.batches)} values per row, one per batch size")
            if not np.isfinite(seconds).all() or (seconds < 0).any():
                raise DataError(f"{name} must be finite seconds, at least 0")

    def check_rows(self, num_blocks: int, num_ramps: int) -> None:
        """Raises DataError unless the table has a row for each of these blocks and ramps."""
        for name, rows, needed in (("block_s", self.block_s_NB, num_blocks), ("ramp_s", self.ramp_s_EB, num_ramps)):
            if len(rows) != needed:
                unit = name.removesuffix("_s")
                raise DataError(f"{name} has {len(rows)} rows; {needed} are needed, one per {unit}", at=(name,))

    def document(self, *, as_measured: bool = True) -> dict[str, Any]:
        """Returns the table as plain data of a file. `as_measured`: with the length and context of the measurement."""
        seconds = {"block_s": self.block_s_NB.tolist(), "ramp_s": self.ramp_s_EB.tolist()}
        document: dict[str, Any] = {"batch": list(self.batches), **seconds}
        if as_measured and self.length is not None:
            document["length"] = self.length
        if as_measured and self.context is not None:
            document |= {"context": self.context, "context_s": self.context_s}
        return document

    def times(self, factor: float) -> LatencyTable:
        """Returns the table with all seconds multiplied."""
        block_s_NB, ramp_s_EB = self.block_s_NB * factor, self.ramp_s_EB * factor
        return replace(self, block_s_NB=block_s_NB, ramp_s_EB=ramp_s_EB, context_s=self.context_s * factor)

    def blocks_at(self, batch_X: FloatArray) -> FloatArray:
        """Returns the seconds of every block (N) at batch sizes (X), also fractional ones, by linear interpolation.

        Outside the measured sizes, they are constant. Callers must not ask above the largest one, which is unknown.
        """
        return _interpolate(batch_X, self.batches, self.block_s_NB)

    def ramps_at(self, batch_X: FloatArray) -> FloatArray:
        """Returns the seconds of every ramp (E) at batch sizes (X); see `blocks_at`."""
        return _interpolate(batch_X, self.batches, self.ramp_s_EB)


def _interpolate(batch_X: FloatArray, batches: tuple[int, ...], seconds_RB: FloatArray) -> FloatArray:
    """Returns what `np.interp` returns for each row, but for all rows together, which is much faster."""
    known_B, inside_X = np.array(batches, dtype=np.float64), np.clip(batch_X, batches[0], batches[-1])
    cell_X = np.searchsorted(known_B, inside_X, side="right") - 1
    slope_RB = np.diff(seconds_RB, append=seconds_RB[:, -1:]) / np.diff(known_B, append=np.inf)
    return np.asarray(slope_RB[:, cell_X] * (inside_X - known_B[cell_X]) + seconds_RB[:, cell_X])


def check_ramps(ramps: tuple[int, ...], num_blocks: int) -> None:
    """Raises DataError unless ramps ascend and are before the last block."""
    if list(ramps) != sorted(set(ramps)) or any(not 0 <= ramp < num_blocks - 1 for ramp in ramps):
        raise DataError(f"ramps must ascend and be before block {num_blocks - 1}, not {list(ramps)}")
