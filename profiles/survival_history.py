"""Survival over past windows: what a forecast reads."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from earlyexit.errors import DataError

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]

ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivalHistory:
    """Survival over past windows (W), oldest first, per block (K); refuses what cannot be."""

    survival_WK: FloatArray
    """Share of a window's inputs that reach block k: 1 at block 0, never rising. Anything where missing."""
    inputs_WK: FloatArray
    """Inputs that each share is worth: their number where all were seen, else the effective sample size."""
    missing_W: BoolArray
    """Windows that nothing is known of."""
    worth_WR: FloatArray | None = None
    """Inputs reaching each ramp (R: one after every block but the last) that the share going on there is worth. None
    where survival is that of one sample of inputs: then those of the sample that reach it. Where one ramp's share is
    counted and the next one's is from probes, no single sample size says both."""

    def __post_init__(self) -> None:
        if self.survival_WK.ndim != 2 or not self.survival_WK.shape[1]:
            raise DataError("survival needs a row per window and a column per block")
        if self.inputs_WK.shape != self.survival_WK.shape or self.missing_W.shape != self.survival_WK.shape[:1]:
            raise DataError("survival, inputs and missing windows must have as many windows and blocks")
        survival_WK, inputs_WK = self.survival_WK[~self.missing_W], self.inputs_WK[~self.missing_W]
        if not (np.isfinite(survival_WK).all() and np.isfinite(inputs_WK).all()):
            raise DataError("survival and inputs must be numbers in every window that is not missing")
        if (inputs_WK < 0).any():
            raise DataError("a window cannot have fewer than no inputs")
        self._check_worth()
        if (np.abs(survival_WK[:, 0] - 1) > ROUNDING).any() or (survival_WK < 0).any():
            raise DataError("survival must be 1 at the first block and at least 0 after it")
        if (np.diff(survival_WK, axis=1) > ROUNDING).any():
            raise DataError("survival rises: more inputs reach a block than the one before it")

    def _check_worth(self) -> None:
        if self.worth_WR is None:
            return
        num_windows, num_blocks = self.survival_WK.shape
        if self.worth_WR.shape != (num_windows, num_blocks - 1):
            raise DataError("the worth of shares needs a row per window and a column per block but the last")
        worth_WR = self.worth_WR[~self.missing_W]
        if not np.isfinite(worth_WR).all() or (worth_WR < 0).any():
            raise DataError("shares must be worth a number of inputs, at least 0, in every window that is not missing")

    @classmethod
    def from_counts(cls, reach_WK: FloatArray) -> SurvivalHistory:
        """From numbers of inputs that reached each block; a window without inputs is missing, as is one of NaN."""
        reach_WK = np.asarray(reach_WK, dtype=np.float64)
        if reach_WK.ndim != 2 or not reach_WK.shape[1]:
            raise DataError("counts need a row per window and a column per block")
        if (reach_WK < 0).any():
            raise DataError("a window cannot have fewer than no inputs")
        missing_W = np.isnan(reach_WK).all(1) | (reach_WK[:, 0] == 0)
        inputs_W1 = np.where(missing_W, 1.0, reach_WK[:, 0])[:, None]
        return cls(
            survival_WK=reach_WK / inputs_W1,
            inputs_WK=np.where(missing_W[:, None], 0.0, np.broadcast_to(inputs_W1, reach_WK.shape)),
            missing_W=missing_W,
        )

    def __len__(self) -> int:
        return len(self.missing_W)

    @property
    def num_blocks(self) -> int:
        return int(self.survival_WK.shape[1])

    @property
    def reach_WR(self) -> FloatArray:
        """Inputs' worth that reach each ramp (R: one after every block but the last); 0 in missing windows."""
        worth_WR = self.inputs_WK[:, 1:] * self.survival_WK[:, :-1] if self.worth_WR is None else self.worth_WR
        return np.where(self.missing_W[:, None], 0.0, worth_WR)

    @property
    def go_on_WR(self) -> FloatArray:
        """The same, of those that do not leave there."""
        before_WR, after_WR = self.survival_WK[:, :-1], self.survival_WK[:, 1:]
        some_WR = ~self.missing_W[:, None] & (before_WR > 0)
        share_WR = np.divide(np.minimum(after_WR, before_WR), before_WR, out=np.zeros_like(before_WR), where=some_WR)
        return np.asarray(self.reach_WR * share_WR)
