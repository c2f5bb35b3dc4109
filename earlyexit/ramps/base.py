"""The contract of a ramp: an exit head after a block."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn

from earlyexit.layout import Layout
from earlyexit.ramps.pooling import Pooling, pool


class Ramp(nn.Module, ABC):
    """Pools an input's hidden state to one vector and makes the exit's outputs of it; so does the full model's head."""

    pooling: Pooling

    @abstractmethod
    def classify(self, pooled_BD: Tensor) -> Tensor:
        """Outputs (B, C) of pooled hidden states (B, D)."""

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        """Outputs (B, C) of a packed hidden state (N, D), or (N, ...)."""
        return self.classify(pool(hidden, layout, self.pooling))
