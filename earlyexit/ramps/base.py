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
    sums_BD = hidden_ND.new_zeros(layout.num_inputs, hidden_ND.shape[1]).index_add_(0, layout.sample_N, hidden_ND)
    return (sums_BD / layout.lengths_B1).to(hidden_ND.dtype)
