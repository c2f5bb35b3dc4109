"""Apparate's ramp (section 3.1): the shallowest that turns a hidden state into an answer, pooling and one linear."""

from __future__ import annotations

from torch import Tensor, nn

from earlyexit.ramps.base import Pooling, Ramp


class LightRamp(Ramp):
    """Pooling and one linear layer; Apparate pools the first token, a frozen sentence encoder wants the mean."""

    def __init__(self, hidden_size: int, num_classes: int, *, pooling: Pooling = "mean") -> None:
        super().__init__()
        self.pooling = pooling
        self.classifier = nn.Linear(hidden_size, num_classes)

    def classify(self, pooled_BD: Tensor) -> Tensor:
        logits_BC: Tensor = self.classifier(pooled_BD)
        return logits_BC
