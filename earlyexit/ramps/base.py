"""The contract of a ramp: an exit head after a block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

from torch import Tensor, nn

from earlyexit.layout import Layout

Pooling = Literal["mean", "first"]


class Ramp(nn.Module, ABC):
    """Pools an input's tokens to one vector and classifies it. The full model's head has the same shape."""

    pooling: Pooling

    @abstractmethod
    def classify(self, pooled_BD: Tensor) -> Tensor:
        """Logits (B, C) of pooled hidden states (B, D)."""

    def forward(self, hidden_ND: Tensor, layout: Layout) -> Tensor:
        """Logits (B, C) of a packed hidden state (N, D)."""
        return self.classify(pool(hidden_ND, layout, self.pooling))


def pool(hidden_ND: Tensor, layout: Layout, pooling: Pooling) -> Tensor:
    """The mean of every input's tokens, or its first token; (B, D)."""
    if pooling == "first":
        return hidden_ND[layout.first_token_B]
    # Over the padded form, in float32: bfloat16 stops counting at 256, and adding scattered rows is a race in ONNX
    # Runtime (measured: one input in a few batches got a neighbour's sum) and unordered on a GPU.
    means_BD = layout.pad(hidden_ND.float()).sum(1) / layout.lengths_B1
    return means_BD.to(hidden_ND.dtype)
