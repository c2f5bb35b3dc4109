"""Regression: one number per input."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from earlyexit.errors import DataError, raising
from earlyexit.network.boundary import Column
from earlyexit.tasks.base import FloatArray, Task, ValueArray

if TYPE_CHECKING:
    from torch import Tensor


class RegressionTask(Task):
    """An answer is a number. An exit's two outputs are the number and the logarithm of its expected error.

    Both are in units of `scale`, the smallest difference whose loss is 1. The loss of an answer is its difference from
    the right one in this unit, at most 1. A checkpoint's own head has no second output, which is then set to 0.
    """

    name = "regression"
    zero_one = False
    num_outputs = 2
    columns = (Column(name="value", datatypes=("FP32",)), Column(name="score", datatypes=("FP32",)))

    def __init__(self, scale: float, offset: float = 0.0) -> None:
        """`offset`: the answer for a first output of 0. Raises ValueError unless `scale` is positive and finite."""
        if not (math.isfinite(scale) and scale > 0 and math.isfinite(offset)):
            raise ValueError(f"scale must be positive and finite, and offset finite, not {scale} and {offset}")
        self.scale = float(scale)
        self.offset = float(offset)

    def compares(self, other: Task) -> bool:
        """Returns True for any regression, because answers do not depend on the scale of the outputs."""
        return isinstance(other, RegressionTask)

    def answer(self, outputs_BC: Tensor) -> Tensor:
        """Returns the number, float32 (B,)."""
        return outputs_BC[:, 0] * self.scale + self.offset

    def score(self, outputs_BC: Tensor) -> Tensor:
        """Returns 1 / (1 + expected error in units of `scale`)."""
        return (-outputs_BC[:, 1]).sigmoid()

    def loss(self, early: ValueArray, full: ValueArray) -> FloatArray:
        return np.minimum(np.abs(np.asarray(early, dtype=np.float64) - full) / self.scale, 1.0)

    @property
    def json_schema(self) -> Mapping[str, Any]:
        return {
            "value": {"type": "number"},
            "score": {"type": "number", "description": f"1 / (1 + expected error / {self.scale:g})."},
        }

    def targets(self, labels: Sequence[str]) -> ValueArray:
        with raising(DataError, "labels of a regression must be numbers", ValueError):
            numbers = np.array([float(label) for label in labels])
        if not np.isfinite(numbers).all():
            raise DataError("labels of a regression must be finite numbers")
        return numbers

    def training_loss(self, outputs_BC: Tensor, targets_B: Tensor) -> Tensor:
        """Returns the negative log likelihood of a Laplace distribution, whose width is the expected absolute error."""
        outputs_BC = outputs_BC.float()
        error_B = (outputs_BC[:, 0] - (targets_B.float() - self.offset) / self.scale).abs()
        return (error_B * (-outputs_BC[:, 1]).exp() + outputs_BC[:, 1]).mean()
