"""Apparate's ramp (section 3.1): the shallowest that turns a hidden state into an answer, pooling and one linear."""

from __future__ import annotations

from torch import Tensor, nn

from earlyexit.ramps.base import Ramp
from earlyexit.ramps.pooling import Pooling


class LightRamp(Ramp):
    """Pooling and one linear layer; Apparate pools the first token, a frozen sentence encoder wants the mean."""

    def __init__(self, size: int, num_outputs: int, *, pooling: Pooling = "mean") -> None:
        super().__init__()
        self.pooling = pooling
        self.classifier = nn.Linear(size, num_outputs)

    def classify(self, pooled_BD: Tensor) -> Tensor:
        outputs_BC: Tensor = self.classifier(pooled_BD)
        return outputs_BC
