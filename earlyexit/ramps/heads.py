"""Exit heads: an input's hidden state pooled to one vector, and the exit's outputs of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from earlyexit.errors import ModelFolderError
from earlyexit.network.layout import Layout
from earlyexit.ramps.pooling import Pooling, of_inputs, pool_maps, pooled_size

WIDTH = 64
"""Of `MlpRamp`'s hidden layer. ResNet-20 on CIFAR-10, a grid, budget 1 %: 6.6 of 9 blocks, 7.1 with a linear ramp."""
MAP_SIDES = 2
"""Height and width: what a convolution goes over."""
DROPOUT = 0.1
"""The share of numbers that training leaves out before the last layer."""


class Ramp(nn.Module, ABC):
    """An exit head after a block; the full model's head is one too."""

    def __init__(self, pooling: Pooling) -> None:
        super().__init__()
        self.pooling = pooling

    @abstractmethod
    def classify(self, gathered: Tensor) -> Tensor:
        """Outputs (B, *output_shape) of what `gather` gives: pooled hidden states (B, D), unless a style says else."""

    def gather(self, hidden: Tensor, layout: Layout) -> Tensor:
        """What the head looks at, one row per input, of a packed hidden state; it has no weights that are trained."""
        return self.gather_rows(of_inputs(hidden, layout, self.pooling))

    def gather_rows(self, rows: Tensor) -> Tensor:
        """The same of rows that are whole inputs', (B, ...)."""
        return rows if rows.ndim == 2 else pool_maps(rows, self.pooling)

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        """Outputs (B, *output_shape) of a packed hidden state (N, D), or (N, ...)."""
        return self.classify(self.gather(hidden, layout))


def flat_outputs(output_shape: Sequence[int]) -> int:
    """How many numbers a flat head gives for an input; raises ModelFolderError where a task has maps."""
    if len(output_shape) != 1:
        raise ModelFolderError(
            f"such a head gives numbers, and the task has {_in_words(output_shape)}: take the style maps or deconv"
        )
    return output_shape[0]


def _in_words(shape: Sequence[int]) -> str:
    return f"{shape[0]} outputs" if len(shape) == 1 else f"{shape[0]} maps of {' x '.join(map(str, shape[1:]))}"


class LightRamp(Ramp):
    """One linear layer. Apparate's (section 3.1) pools the first token; a frozen sentence encoder wants the mean."""

    def __init__(self, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> None:
        super().__init__(pooling)
        self.classifier = nn.Linear(pooled_size(row, pooling), flat_outputs(output_shape))

    def classify(self, gathered: Tensor) -> Tensor:
        outputs_BC: Tensor = self.classifier(gathered)
        return outputs_BC


class MlpRamp(Ramp):
    """One narrow hidden layer: what a linear ramp cannot tell from early features, at a fraction of a block."""

    def __init__(self, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> None:
        super().__init__(pooling)
        size = pooled_size(row, pooling)
        self.norm = nn.LayerNorm(size)
        self.dense = nn.Linear(size, WIDTH)
        self.dropout = nn.Dropout(DROPOUT)
        self.classifier = nn.Linear(WIDTH, flat_outputs(output_shape))

    def classify(self, gathered: Tensor) -> Tensor:
        hidden_BW = torch.relu(self.dense(self.norm(gathered)))
        outputs_BC: Tensor = self.classifier(self.dropout(hidden_BW))
        return outputs_BC


class PoolerRamp(Ramp):
    """DeeBERT's: BERT's whole pooler, then linear (Apparate section 3.1 compares it). BERT's classifiers end so."""

    def __init__(self, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> None:
        super().__init__(pooling)
        size = pooled_size(row, pooling)
        self.dense = nn.Linear(size, size)
        self.dropout = nn.Dropout(DROPOUT)
        self.classifier = nn.Linear(size, flat_outputs(output_shape))

    def classify(self, gathered: Tensor) -> Tensor:
        outputs_BC: Tensor = self.classifier(self.dropout(self.activation(self.dense(gathered))))
        return outputs_BC

    def activation(self, values: Tensor) -> Tensor:
        return torch.tanh(values)


class ReluPoolerRamp(PoolerRamp):
    """The same with the activation of DistilBERT's classifiers."""

    def activation(self, values: Tensor) -> Tensor:
        return torch.relu(values)


class GivenHead(Ramp):
    """None at all: what crosses before it is the outputs already, of a network that brings its own classifier."""

    def __init__(self, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> None:
        """Raise ModelFolderError where what is given is not what the task has: one number per output, or maps."""
        super().__init__(pooling)
        self._maps = len(output_shape) > 1
        given = list(row) if self._maps else [pooled_size(row, pooling)]
        if given != list(output_shape):
            raise ModelFolderError(f"the network gives {_in_words(given)}, the task has {_in_words(output_shape)}")

    def gather_rows(self, rows: Tensor) -> Tensor:
        return rows if self._maps else super().gather_rows(rows)

    def classify(self, gathered: Tensor) -> Tensor:
        return gathered


class ReducedRamp(Ramp):
    """Two layers of falling width before the last: Apparate's first dearer style for texts (section 3.1, figure 9)."""

    def __init__(self, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> None:
        super().__init__(pooling)
        size = pooled_size(row, pooling)
        widths = max(1, size // 2), max(1, size // 4)
        self.dense_1 = nn.Linear(size, widths[0])
        self.dense_2 = nn.Linear(widths[0], widths[1])
        self.classifier = nn.Linear(widths[1], flat_outputs(output_shape))

    def classify(self, gathered: Tensor) -> Tensor:
        hidden_BW = torch.relu(self.dense_2(torch.relu(self.dense_1(gathered))))
        outputs_BC: Tensor = self.classifier(hidden_BW)
        return outputs_BC


class ConvRamp(Ramp):
    """A convolution before pooling: Apparate's dearer style for images (section 3.1, figure 9).

    Training keeps whole maps, N * C * H * W * 4 bytes per ramp.
    """

    def __init__(self, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> None:
        super().__init__(pooling)
        if len(row) != MAP_SIDES + 1:
            raise ModelFolderError(f"a convolution is over maps (C, H, W), not over a hidden state of {list(row)}")
        channels = row[0]
        self.convolution = nn.Conv2d(channels, channels, kernel_size=3, padding=1)
        self.classifier = nn.Linear(pooled_size(row, pooling), flat_outputs(output_shape))

    def gather_rows(self, rows: Tensor) -> Tensor:
        return rows

    def classify(self, gathered: Tensor) -> Tensor:
        maps_BCHW = torch.relu(self.convolution(gathered))
        outputs_BC: Tensor = self.classifier(pool_maps(maps_BCHW, self.pooling))
        return outputs_BC
