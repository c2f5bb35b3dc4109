"""The contract of a ramp: an exit head after a block."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Literal

from torch import Tensor, nn

from earlyexit.layout import Layout

Pooling = Literal["mean", "first"]


class Ramp(nn.Module, ABC):
    """Pools an input's tokens to one vector, and makes the exit's outputs of it; so does the full model's head."""

    pooling: Pooling

    @abstractmethod
    def classify(self, pooled_BD: Tensor) -> Tensor:
        """Outputs (B, C) of pooled hidden states (B, D)."""

    def forward(self, hidden_ND: Tensor, layout: Layout) -> Tensor:
        """Outputs (B, C) of a packed hidden state (N, D), or (N, ...)."""
        return self.classify(pool(hidden_ND, layout, self.pooling))


def pooled_size(row: tuple[int, ...]) -> int:
    """D of a pooled vector, of rows of a shape."""
    return math.prod(row)


def pool(hidden_ND: Tensor, layout: Layout, pooling: Pooling) -> Tensor:
    """The mean of every input's tokens, or its first token, as one vector (B, D) whatever the shape of a row."""
    if hidden_ND.ndim > 2:
        hidden_ND = hidden_ND.flatten(1)
    if layout.single:
        return hidden_ND
    if pooling == "first":
        return hidden_ND[layout.first_token_B]
    # Over the padded form, in float32: bfloat16 stops counting at 256, and adding scattered rows is a race in ONNX
    # Runtime (measured: one input in a few batches got a neighbour's sum) and unordered on a GPU.
    means_BD = layout.pad(hidden_ND.float()).sum(1) / layout.lengths_B1
    return means_BD.to(hidden_ND.dtype)
