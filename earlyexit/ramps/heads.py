"""Exit heads: an input's hidden state pooled to one vector, and the exit's outputs of it."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from earlyexit.errors import ModelFolderError
from earlyexit.layout import Layout
from earlyexit.ramps.pooling import Pooling, pool

WIDTH = 64
"""Of `MlpRamp`'s hidden layer. ResNet-20 on CIFAR-10, a grid, budget 1 %: 6.6 of 9 blocks, 7.1 with a linear ramp."""
DROPOUT = 0.1
"""The share of numbers that training leaves out before the last layer."""


class Ramp(nn.Module, ABC):
    """An exit head after a block; the full model's head is one too."""

    def __init__(self, pooling: Pooling) -> None:
        super().__init__()
        self.pooling = pooling

    @abstractmethod
    def classify(self, pooled_BD: Tensor) -> Tensor:
        """Outputs (B, C) of pooled hidden states (B, D)."""

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        """Outputs (B, C) of a packed hidden state (N, D), or (N, ...)."""
        return self.classify(pool(hidden, layout, self.pooling))


class LightRamp(Ramp):
    """One linear layer. Apparate's (section 3.1) pools the first token; a frozen sentence encoder wants the mean."""

    def __init__(self, size: int, num_outputs: int, pooling: Pooling) -> None:
        super().__init__(pooling)
        self.classifier = nn.Linear(size, num_outputs)

    def classify(self, pooled_BD: Tensor) -> Tensor:
        outputs_BC: Tensor = self.classifier(pooled_BD)
        return outputs_BC


class MlpRamp(Ramp):
    """One narrow hidden layer: what a linear ramp cannot tell from early features, at a fraction of a block."""

    def __init__(self, size: int, num_outputs: int, pooling: Pooling) -> None:
        super().__init__(pooling)
        self.norm = nn.LayerNorm(size)
        self.dense = nn.Linear(size, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.classifier = nn.Linear(WIDTH, num_outputs)

    def classify(self, pooled_BD: Tensor) -> Tensor:
        hidden_BW = torch.relu(self.dense(self.norm(pooled_BD)))
        outputs_BC: Tensor = self.classifier(self.dropout(hidden_BW))
        return outputs_BC


class PoolerRamp(Ramp):
    """DeeBERT's: BERT's whole pooler, then linear (Apparate section 3.1 compares it). BERT's classifiers end so."""

    def __init__(self, size: int, num_outputs: int, pooling: Pooling) -> None:
        super().__init__(pooling)
        self.dense = nn.Linear(size, size)
        self.dropout = nn.Dropout(DROPOUT)
        self.classifier = nn.Linear(size, num_outputs)

    def classify(self, pooled_BD: Tensor) -> Tensor:
        outputs_BC: Tensor = self.classifier(self.dropout(self.activation(self.dense(pooled_BD))))
        return outputs_BC

    def activation(self, values: Tensor) -> Tensor:
        return torch.tanh(values)


class ReluPoolerRamp(PoolerRamp):
    """The same with the activation of DistilBERT's classifiers."""

    def activation(self, values: Tensor) -> Tensor:
        return torch.relu(values)


class GivenHead(Ramp):
    """None at all: what crosses before it is the outputs already, of a network that brings its own classifier."""

    def __init__(self, size: int, num_outputs: int, pooling: Pooling) -> None:
        """Raise ModelFolderError where what is given is not one number per output of the task."""
        super().__init__(pooling)
        if size != num_outputs:
            raise ModelFolderError(f"the network gives {size} outputs, the task has {num_outputs}")

    def classify(self, pooled_BD: Tensor) -> Tensor:
        return pooled_BD
