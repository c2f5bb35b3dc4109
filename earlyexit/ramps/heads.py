"""Exit heads, which compute an exit's outputs from an input's hidden state, usually pooled to one vector.

All exits of a decoder share one head over the vocabulary, because this layer is large: in SmolLM2 it has a fifth of all
weights and costs as much as eight blocks. A small classifier predicts whether the ramp's answer equals the full
model's, before the layer is computed. The layer then runs only for inputs that leave (Schuster et al. 2022, CALM,
section 3.4).

Tensor legend: B inputs, C channels or outputs, D hidden, H height, W width, V tokens of the vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import log2
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earlyexit.errors import ModelFolderError
from earlyexit.network.piece import Layout
from earlyexit.ramps.pooling import POOLINGS, Pooling, halved, pool_maps, pooled_size

WIDTH = 64
"""Width of `MlpRamp`'s hidden layer."""
MAP_SIDES = 2
"""Number of spatial dimensions of a convolution: height and width."""
MAP_WIDTH = 64
"""Channels of the inner maps of heads whose outputs are maps."""
DROPOUT = 0.1
"""Dropout probability before the last layer."""


class Ramp(nn.Module):
    """Base class of exit heads: of ramps, and of the full model's head."""

    pools: ClassVar[bool] = True
    """Whether `gather` pools maps. If not, training on a frozen backbone keeps N * C * H * W * 4 bytes per ramp."""

    def __init__(self, pooling: Pooling) -> None:
        super().__init__()
        self.pooling = pooling

    def classify(self, gathered: Tensor) -> Tensor:
        """Returns the outputs (B, *output_shape) for the result of `gather`, usually pooled hidden states (B, D).

        By default, the head's layers are applied one after the other.
        """
        for layer in self.children():
            gathered = layer(gathered)
        return gathered

    def gather(self, hidden: Tensor, layout: Layout) -> Tensor:
        """Returns the head's input, one row per input, from a packed hidden state. Uses no trained weights."""
        has_row_per_input = layout.per_input(hidden)
        return self.gather_rows(hidden if has_row_per_input else POOLINGS[self.pooling](hidden, layout))

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Returns the head's input from rows of whole inputs, (B, ...)."""
        return pool_maps(rows, self.pooling) if self.pools and rows.ndim > 2 else rows

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        """Returns the outputs (B, *output_shape) for a packed hidden state, (N, D) or (N, ...)."""
        return self.classify(self.gather(hidden, layout))


def flat_outputs(output_shape: Sequence[int]) -> int:
    """Returns C for an output shape (C,); raises ModelFolderError for tasks whose outputs are maps."""
    if len(output_shape) != 1:
        raise ModelFolderError(
            f"this ramp style gives numbers, and the task has {_in_words(output_shape)}: use the style maps or deconv"
        )
    return output_shape[0]


def _in_words(shape: Sequence[int]) -> str:
    return f"{shape[0]} outputs" if len(shape) == 1 else f"{shape[0]} maps of {' x '.join(map(str, shape[1:]))}"


class LightRamp(Ramp):
    """One linear layer. Apparate (section 3.1) uses it on the first token; frozen sentence encoders need the mean."""

    def __init__(self, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> None:
        super().__init__(pooling)
        self.classifier = nn.Linear(pooled_size(row, pooling), flat_outputs(output_shape))


class MlpRamp(Ramp):
    """One narrow hidden layer, for early features that are not linearly separable. It costs a fraction of a block."""

    def __init__(self, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> None:
        super().__init__(pooling)
        size = pooled_size(row, pooling)
        self.norm = nn.LayerNorm(size)
        self.dense = nn.Linear(size, WIDTH)
        self.activation = nn.ReLU()
        self.dropout = nn.Dropout(DROPOUT)
        self.classifier = nn.Linear(WIDTH, flat_outputs(output_shape))


class PoolerRamp(Ramp):
    """BERT's pooler and a linear layer, as in BERT's classifiers and DeeBERT (compared in Apparate, section 3.1)."""

    activations: ClassVar[type[nn.Module]] = nn.Tanh

    def __init__(self, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> None:
        super().__init__(pooling)
        size = pooled_size(row, pooling)
        self.dense = nn.Linear(size, size)
        self.activation = self.activations()
        self.dropout = nn.Dropout(DROPOUT)
        self.classifier = nn.Linear(size, flat_outputs(output_shape))


class ReluPoolerRamp(PoolerRamp):
    """A pooler with the activation of DistilBERT's classifiers."""

    activations = nn.ReLU


class IdentityHead(Ramp):
    """A head without layers, for a network whose last block already computes the outputs."""

    def __init__(self, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> None:
        """Raises ModelFolderError unless the hidden state has the shape of the task's outputs."""
        super().__init__(pooling)
        self._maps = len(output_shape) > 1
        shape = list(row) if self._maps else [pooled_size(row, pooling)]
        if shape != list(output_shape):
            raise ModelFolderError(f"the network gives {_in_words(shape)}, the task has {_in_words(output_shape)}")

    def gather_rows(self, rows: Tensor) -> Tensor:
        return rows if self._maps else super().gather_rows(rows)


class ReducedRamp(Ramp):
    """Two narrowing layers before the classifier: Apparate's more expensive style for texts (section 3.1, figure 9)."""

    def __init__(self, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> None:
        super().__init__(pooling)
        size = pooled_size(row, pooling)
        widths = max(1, size // 2), max(1, size // 4)
        self.dense_1 = nn.Linear(size, widths[0])
        self.activation_1 = nn.ReLU()
        self.dense_2 = nn.Linear(widths[0], widths[1])
        self.activation_2 = nn.ReLU()
        self.classifier = nn.Linear(widths[1], flat_outputs(output_shape))


class ConvRamp(Ramp):
    """A convolution before pooling: Apparate's more expensive style for images (section 3.1, figure 9)."""

    pools = False

    def __init__(self, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> None:
        super().__init__(pooling)
        if len(row) != MAP_SIDES + 1:
            raise ModelFolderError(f"the style conv needs maps (C, H, W), not a hidden state of the shape {list(row)}")
        channels = row[0]
        self.convolution = nn.Conv2d(channels, channels, kernel_size=3, padding=1)
        self.classifier = nn.Linear(pooled_size(row, pooling), flat_outputs(output_shape))

    def classify(self, gathered: Tensor) -> Tensor:
        maps_BCHW = torch.relu(self.convolution(gathered))
        outputs_BC: Tensor = self.classifier(pool_maps(maps_BCHW, self.pooling))
        return outputs_BC


class BridgeRamp(Ramp):
    """A bridge and a head: PAME's ramps (ICS'22, section 5.1).

    The bridge maps an early hidden state to one that resembles the last block's. The head has the full model's style.
    """

    pools = False

    def __init__(self, bridge: nn.Module, head: Ramp) -> None:
        """`bridge` maps rows of whole inputs, (B, ...), to the input of `head`."""
        super().__init__(head.pooling)
        self.bridge = bridge
        self.head = head

    def classify(self, gathered: Tensor) -> Tensor:
        return self.head.classify(self.head.gather_rows(self.bridge(gathered)))

    def transfer(self, bridge: nn.Module, head: Ramp) -> None:
        """Copy the weights of modules with the same structure (section 5.2, parameter transfer)."""
        self.bridge.load_state_dict(bridge.state_dict())
        self.head.load_state_dict(head.state_dict())


class MapHead(Ramp):
    """Base of heads whose inputs and outputs are maps."""

    pools = False

    def __init__(self, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> None:
        """Raises ModelFolderError unless hidden states and outputs are maps."""
        super().__init__(pooling)
        for name, shape in (("hidden states", row), ("outputs", output_shape)):
            if len(shape) != MAP_SIDES + 1:
                raise ModelFolderError(f"this ramp style needs maps (C, H, W); {name} are of shape {list(shape)}")
        self._sides = tuple(output_shape[1:])

    def _resized(self, maps_BCHW: Tensor) -> Tensor:
        """Returns the maps in the size of the outputs, by bilinear interpolation if the sizes differ."""
        if tuple(maps_BCHW.shape[2:]) == self._sides:
            return maps_BCHW
        return F.interpolate(maps_BCHW, size=self._sides, mode="bilinear", align_corners=False)


class MapsRamp(MapHead):
    """A 3 x 3 convolution, batch norm, ReLU, a 1 x 1 convolution, and upsampling.

    The 1 x 1 convolution comes before the upsampling, because this order is cheaper: fewer pixels are convolved and
    fewer channels interpolated. Both orders give the same result, because the weights of an interpolation sum to 1.
    """

    folds: ClassVar[Mapping[str, str]] = {"convolution": "norm"}

    def __init__(self, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> None:
        super().__init__(row, output_shape, pooling)
        self.convolution = nn.Conv2d(row[0], MAP_WIDTH, kernel_size=3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(MAP_WIDTH)
        self.classifier = nn.Conv2d(MAP_WIDTH, output_shape[0], kernel_size=1)

    def classify(self, gathered: Tensor) -> Tensor:
        inner_BCHW = F.relu(self.norm(self.convolution(gathered)))
        return self._resized(self.classifier(inner_BCHW))


class DeconvRamp(MapHead):
    """Deconvolutions that double the sides, then a 1 x 1 convolution: Simple Baselines' head (Xiao et al., ECCV 2018).

    A 3 x 3 convolution replaces the deconvolutions if the hidden maps are about as large as the outputs.
    """

    def __init__(self, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> None:
        super().__init__(row, output_shape, pooling)
        doublings = max(0, round(log2(output_shape[1] / row[1])))
        self._kept_sides = _kept_sides(row[1:], output_shape[1:], doublings)
        widths = [row[0], *[MAP_WIDTH] * max(1, doublings)]
        self.layers = nn.ModuleList(
            nn.ConvTranspose2d(before, after, kernel_size=4, stride=2, padding=1, bias=False)
            if doublings
            else nn.Conv2d(before, after, kernel_size=3, padding=1, bias=False)
            for before, after in pairwise(widths)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths[1:])
        self.classifier = nn.Conv2d(widths[-1], output_shape[0], kernel_size=1)

    def classify(self, gathered: Tensor) -> Tensor:
        hidden_BCHW = gathered
        for layer, norm, sides in zip(self.layers, self.norms, self._kept_sides, strict=True):
            hidden_BCHW = F.relu(norm(layer(hidden_BCHW)))
            if sides is not None:
                hidden_BCHW = hidden_BCHW[:, :, : sides[0], : sides[1]]
        return self._resized(self.classifier(hidden_BCHW))


def _kept_sides(before: Sequence[int], after: Sequence[int], doublings: int) -> list[tuple[int, ...] | None]:
    """Returns the height and width to which maps are cropped after each doubling; None where they are not cropped.

    A network's strides of 2 round odd sides up, so that doubling may give one row or column too many. Dropping the last
    one keeps all pixels aligned. If the sides are not such halves, nothing is cropped, and the result is interpolated.
    """
    if not doublings:
        return [None]
    if halved(after, doublings) != tuple(before):
        return [None] * doublings
    return [halved(after, remaining) for remaining in reversed(range(doublings))]


RANK = 64
"""Rank of an adapter: a ninth of SmolLM2's hidden size."""
HIDDEN = 64
"""Width of `NormedRamp`'s classifier."""
NORM_EPS = 1e-5


class VocabularyHead(Ramp):
    """A linear layer without a bias, to the logits of all tokens. It may share its weights with the embedding."""

    def __init__(self, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> None:
        super().__init__(pooling)
        self.classifier = nn.Linear(pooled_size(row, pooling), flat_outputs(output_shape), bias=False)


class BiasedVocabularyHead(VocabularyHead):
    """A vocabulary head with a bias per token, as in Marian. The bias of tokens that are never generated is -inf."""

    def __init__(self, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> None:
        super().__init__(row, output_shape, pooling)
        self.bias_V = nn.Parameter(torch.zeros(flat_outputs(output_shape)))

    def classify(self, gathered: Tensor) -> Tensor:
        return super().classify(gathered) + self.bias_V


class NormedRamp(Ramp):
    """A norm before the full model's head, and a classifier for agreement, as in CALM. Both are trained.

    `sureness` is the classifier, which predicts whether the ramp's answer equals the full model's.
    """

    def __init__(self, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> None:
        super().__init__(pooling)
        size = pooled_size(row, pooling)
        flat_outputs(output_shape)
        self.norm = nn.RMSNorm(size, eps=NORM_EPS)
        self.sureness = nn.Sequential(
            nn.RMSNorm(size, eps=NORM_EPS), nn.Linear(size, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1)
        )
        self._shared: tuple[VocabularyHead, ...] = ()  # a tuple, so that torch does not register its weights here

    def share(self, head: VocabularyHead) -> None:
        """Sets the full model's head, which computes the answers."""
        self._shared = (head,)

    def adapted(self, gathered: Tensor) -> Tensor:
        """Returns the hidden state, adapted to the shared head, before the norm. By default, it is not changed."""
        return gathered

    def prepared(self, gathered: Tensor) -> Tensor:
        """Returns the input of the shared head."""
        rows_BD: Tensor = self.norm(self.adapted(gathered))
        return rows_BD

    def classify(self, gathered: Tensor) -> Tensor:
        assert self._shared, "share must set the full model's head first"
        return self._shared[0].classify(self.prepared(gathered))

    def foresee(self, gathered: Tensor) -> Tensor:
        """Returns the log-odds that the ramp's answer equals the full model's, (B,), for the result of `gather`."""
        log_odds_B: Tensor = self.sureness(gathered).squeeze(-1)
        return log_odds_B


class AdaptedRamp(NormedRamp):
    """A normed ramp after a low-rank adapter, whose result is added to the hidden state (Hu et al. 2021, LoRA)."""

    def __init__(self, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> None:
        super().__init__(row, output_shape, pooling)
        size = pooled_size(row, pooling)
        self.narrow = nn.Linear(size, RANK, bias=False)
        self.widen = nn.Linear(RANK, size, bias=False)

    def adapted(self, gathered: Tensor) -> Tensor:
        # The change has the state's scale, which grows from block to block. The norm afterwards removes the scale.
        scale_B1 = gathered.square().mean(-1, keepdim=True).sqrt()
        change_BD: Tensor = self.widen(F.silu(self.narrow(F.rms_norm(gathered, gathered.shape[-1:], eps=NORM_EPS))))
        return torch.addcmul(gathered, scale_B1, change_BD)
