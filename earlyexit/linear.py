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
