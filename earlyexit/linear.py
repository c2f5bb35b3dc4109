"""Linear layers together with what follows them, so that inference may compute both at once (`earlyexit.reordered`)."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
"""By the names that `transformers` has for them."""
LEAST_STEP = 4
STEPS_PER_OCTAVE = 16


class ActivatedLinear(nn.Linear):
    """An activation of a linear layer."""

    def __init__(self, inputs: int, outputs: int, activation: str) -> None:
        """Raises KeyError for an activation that is not in `ACTIVATIONS`."""
        super().__init__(inputs, outputs)
        self.activation = activation

    def forward(self, values: Tensor) -> Tensor:
        """(N, inputs) to (N, outputs)."""
        return ACTIVATIONS[self.activation](super().forward(values))


class SummedLinear(nn.Linear):
    """A linear layer of some values, and others added to it: the end of a residual branch."""

    def forward(self, values: Tensor, others: Tensor) -> Tensor:  # type: ignore[override] # has one input more
        """(N, inputs) and (N, outputs) to (N, outputs)."""
        return super().forward(values) + others


def rows_run(rows: int) -> int:
    """How many rows are multiplied for so many: a few more, so that the same numbers come again and again.

    oneDNN makes code for every number of rows, in 0.3 ms (bfloat16) or 0.6 ms (float32), and about 0.6 MB for each; it
    keeps 1024. Packed batches of mixed lengths hardly ever have the same number of rows twice, least of all when they
    shrink at every ramp.
    """
    step = max(LEAST_STEP, 1 << (max(rows, 1).bit_length() - 1) >> STEPS_PER_OCTAVE.bit_length() - 1)
    return -(-rows // step) * step


def filled_up(values: Tensor) -> Tensor:
    """With as many rows of zeros behind (N, D) as `rows_run` says."""
    rows, width = values.shape
    more = rows_run(rows) - rows
    if not more:
        return values
    filled = values.new_empty(rows + more, width)
    filled[:rows] = values
    filled[rows:] = 0
    return filled
