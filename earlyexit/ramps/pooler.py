"""DeeBERT's ramp: the whole BERT pooler (dense and activation), dropout, linear (Apparate section 3.1 compares it)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from earlyexit.ramps.base import Ramp
from earlyexit.ramps.pooling import Pooling


class PoolerRamp(Ramp):
    """Pooling, dense, activation, dropout (training only), linear; `transformers`' classifiers end in the same."""

    def __init__(
        self,
        size: int,
        num_outputs: int,
        *,
        pooling: Pooling = "first",
        activation: Literal["tanh", "relu"] = "tanh",
        dropout: float = 0.1,
    ) -> None:
        super().__init__()
        self.pooling = pooling
        self.activation = torch.tanh if activation == "tanh" else torch.relu
        self.dense = nn.Linear(size, size)
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(size, num_outputs)

    def classify(self, pooled_BD: Tensor) -> Tensor:
        outputs_BC: Tensor = self.classifier(self.dropout(self.activation(self.dense(pooled_BD))))
        return outputs_BC
