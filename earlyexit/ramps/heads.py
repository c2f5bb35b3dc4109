"""Exit heads, which turn an input's hidden state, mostly pooled to one vector, into the exit's outputs.

Exits of decoders share a head over the vocabulary. In SmolLM2 that layer has a fifth of all weights and costs as much
as eight blocks, so ramps have no such layer of their own. A small classifier, trained to predict whether the ramp's
answer equals the full model's, decides before the layer is computed whether it is worth it (Schuster et al. 2022, CALM,
section 3.4).

Tensor legend: B inputs, C channels or outputs, D hidden, H and W the sides of a map, V tokens, R rank.
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
from earlyexit.ramps.pooling import Pooling, halved, of_inputs, pool_maps, pooled_size

WIDTH = 64
"""Width of `MlpRamp`'s hidden layer. ResNet-20 on CIFAR-10, grid pooling, budget 1 %: inputs run a mean of 6.6 of 9
blocks; 7.1 with a linear ramp."""
MAP_SIDES = 2
"""The dimensions of a map that a convolution goes over: height and width."""
MAP_WIDTH = 64
"""Channels of the inner maps of heads whose outputs are maps."""
DROPOUT = 0.1
"""Dropout probability before the last layer."""


class Ramp(nn.Module):
    """An exit head after a block. The full model's head is one too."""

    pools: ClassVar[bool] = True
    """Whether it pools maps to vectors before `classify`; if not, training keeps whole hidden states."""

    def __init__(self, pooling: Pooling) -> None:
        super().__init__()
        self.pooling = pooling

    def classify(self, gathered: Tensor) -> Tensor:
        """Returns the outputs (B, *output_shape) for what `gather` returns, mostly pooled hidden states (B, D).

        Here they are what the head's layers give, each applied to the result of the one before it.
        """
        for layer in self.children():
            gathered = layer(gathered)
        return gathered

    def gather(self, hidden: Tensor, layout: Layout) -> Tensor:
        """Returns the head's input, one row per input, from a packed hidden state. It uses no trained weights."""
        return self.gather_rows(of_inputs(hidden, layout, self.pooling))

    def gather_rows(self, rows: Tensor) -> Tensor:
        """Returns the head's input from rows of whole inputs, (B, ...)."""
        return pool_maps(rows, self.pooling) if self.pools and rows.ndim > 2 else rows

    def forward(self, hidden: Tensor, layout: Layout) -> Tensor:
        """Returns the outputs (B, *output_shape) for a packed hidden state (N, D), or (N, ...)."""
        return self.classify(self.gather(hidden, layout))


def flat_outputs(output_shape: Sequence[int]) -> int:
    """Returns how many numbers a flat head gives for an input; raises ModelFolderError for tasks with maps."""
    if len(output_shape) != 1:
        raise ModelFolderError(
            f"such a head gives numbers, and the task has {_in_words(output_shape)}: take the style maps or deconv"
        )
    return output_shape[0]


def _in_words(shape: Sequence[int]) -> str:
    return f"{shape[0]} outputs" if len(shape) == 1 else f"{shape[0]} maps of {' x '.join(map(str, shape[1:]))}"


class LightRamp(Ramp):
    """One linear layer. Apparate (section 3.1) pools the first token; frozen sentence encoders need the mean."""

    def __init__(self, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> None:
        super().__init__(pooling)
        self.classifier = nn.Linear(pooled_size(row, pooling), flat_outputs(output_shape))


class MlpRamp(Ramp):
    """One narrow hidden layer, for early features that are not linearly separable, at a fraction of a block's cost."""

    def __init__(self, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> None:
        super().__init__(pooling)
        size = pooled_size(row, pooling)
        self.norm = nn.LayerNorm(size)
        self.dense = nn.Linear(size, WIDTH)
        self.activation = nn.ReLU()
        self.dropout = nn.Dropout(DROPOUT)
        self.classifier = nn.Linear(WIDTH, flat_outputs(output_shape))


class PoolerRamp(Ramp):
    """BERT's pooler and a linear layer, as in DeeBERT and BERT's classifiers (Apparate section 3.1 compares it)."""

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


class GivenHead(Ramp):
    """A head without layers, for a network whose last block already gives the outputs."""

    def __init__(self, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> None:
        """Raises ModelFolderError unless the hidden state has the shape of the task's outputs."""
        super().__init__(pooling)
        self._maps = len(output_shape) > 1
        given = list(row) if self._maps else [pooled_size(row, pooling)]
        if given != list(output_shape):
            raise ModelFolderError(f"the network gives {_in_words(given)}, the task has {_in_words(output_shape)}")

    def gather_rows(self, rows: Tensor) -> Tensor:
        return rows if self._maps else super().gather_rows(rows)


class ReducedRamp(Ramp):
    """Two layers of falling width before the last: Apparate's costlier style for texts (section 3.1, figure 9)."""

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
    """A convolution before pooling: Apparate's costlier style for images (section 3.1, figure 9).

    Training keeps whole maps, N * C * H * W * 4 bytes per ramp.
    """

    pools = False

    def __init__(self, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> None:
        super().__init__(pooling)
        if len(row) != MAP_SIDES + 1:
            raise ModelFolderError(f"a convolution is over maps (C, H, W), not over a hidden state of {list(row)}")
        channels = row[0]
        self.convolution = nn.Conv2d(channels, channels, kernel_size=3, padding=1)
        self.classifier = nn.Linear(pooled_size(row, pooling), flat_outputs(output_shape))

    def classify(self, gathered: Tensor) -> Tensor:
        maps_BCHW = torch.relu(self.convolution(gathered))
        outputs_BC: Tensor = self.classifier(pool_maps(maps_BCHW, self.pooling))
        return outputs_BC


class BridgeRamp(Ramp):
    """A bridge and a head, as PAME builds ramps (ICS'22, section 5.1).

    The bridge turns an early hidden state into one like the last block's; the head has the full model's style. Training
    on a frozen backbone keeps whole hidden states, N * C * H * W * 4 bytes per ramp.
    """

    pools = False

    def __init__(self, bridge: nn.Module, head: Ramp) -> None:
        """`bridge` takes rows of whole inputs, (B, ...), and returns the input of `head`."""
        super().__init__(head.pooling)
        self.bridge = bridge
        self.head = head

    def classify(self, gathered: Tensor) -> Tensor:
        return self.head.classify(self.head.gather_rows(self.bridge(gathered)))

    def transfer(self, bridge: nn.Module, head: Ramp) -> None:
        """Load the weights of modules with the same structure (section 5.2, parameter transfer)."""
        self.bridge.load_state_dict(bridge.state_dict())
        self.head.load_state_dict(head.state_dict())


class MapHead(Ramp):
    """Base of heads whose outputs are maps. Their inputs are the whole maps of whole inputs.

    Training on a frozen backbone keeps these maps, N * C * H * W * 4 bytes per ramp.
    """

    pools = False

    def __init__(self, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> None:
        """Raises ModelFolderError unless hidden states and outputs are maps."""
        super().__init__(pooling)
        for called, shape in (("hidden states", row), ("outputs", output_shape)):
            if len(shape) != MAP_SIDES + 1:
                raise ModelFolderError(f"such a head makes maps (C, H, W) of maps; {called} are of shape {list(shape)}")
        self._sides = tuple(output_shape[1:])

    def _fitted(self, maps_BCHW: Tensor) -> Tensor:
        """Returns the maps in the size of the outputs, by bilinear interpolation if necessary."""
        if tuple(maps_BCHW.shape[2:]) == self._sides:
            return maps_BCHW
        return F.interpolate(maps_BCHW, size=self._sides, mode="bilinear", align_corners=False)


class MapsRamp(MapHead):
    """A 3 x 3 convolution, its norm, a rectifier, a 1 x 1 convolution, and upsampling.

    The 1 x 1 convolution comes before the upsampling. The weights of an interpolation sum to 1, so both orders give the
    same result, and this order has fewer pixels and fewer channels to interpolate.
    """

    folds: ClassVar[Mapping[str, str]] = {"convolution": "norm"}

    def __init__(self, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> None:
        super().__init__(row, output_shape, pooling)
        self.convolution = nn.Conv2d(row[0], MAP_WIDTH, kernel_size=3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(MAP_WIDTH)
        self.classifier = nn.Conv2d(MAP_WIDTH, output_shape[0], kernel_size=1)

    def classify(self, gathered: Tensor) -> Tensor:
        inner_BCHW = F.relu(self.norm(self.convolution(gathered)))
        return self._fitted(self.classifier(inner_BCHW))


class DeconvRamp(MapHead):
    """Deconvolutions that double the sides, then a 1 x 1 convolution: Simple Baselines' head (Xiao et al., ECCV 2018).

    If the hidden maps are about as large as the outputs, a 3 x 3 convolution takes the place of the deconvolutions.
    """

    def __init__(self, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> None:
        super().__init__(row, output_shape, pooling)
        doublings = max(0, round(log2(output_shape[1] / row[1])))
        self._steps = _steps(row[1:], output_shape[1:], doublings)
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
        for layer, norm, sides in zip(self.layers, self.norms, self._steps, strict=True):
            hidden_BCHW = F.relu(norm(layer(hidden_BCHW)))
            if sides is not None:
                hidden_BCHW = hidden_BCHW[:, :, : sides[0], : sides[1]]
        return self._fitted(self.classifier(hidden_BCHW))


def _steps(before: Sequence[int], after: Sequence[int], doublings: int) -> list[tuple[int, ...] | None]:
    """Returns the sides that are kept after each doubling; None for all.

    Strides of 2 round halves up, so that doubling may give one row or column too many. The last one is left out, and
    every pixel stays at its place. Sides that are no such halves are doubled as they are and interpolated at the end.
    """
    if not doublings:
        return [None]
    if halved(after, doublings) != tuple(before):
        return [None] * doublings
    return [halved(after, rest) for rest in reversed(range(doublings))]


RANK = 64
"""Rank of an adapter: a ninth of SmolLM2's hidden size of 576, 74,000 weights."""
HIDDEN = 64
"""Width of the classifier."""
NORM_EPS = 1e-5


class VocabularyHead(Ramp):
    """A linear layer without a bias, to the logits of all tokens; it may share its weights with the embedding."""

    def __init__(self, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> None:
        super().__init__(pooling)
        self.classifier = nn.Linear(pooled_size(row, pooling), flat_outputs(output_shape), bias=False)


class BiasedVocabularyHead(VocabularyHead):
    """A vocabulary head with a bias per token, as in Marian: minus infinity for tokens that are never generated."""

    def __init__(self, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> None:
        super().__init__(row, output_shape, pooling)
        self.bias_V = nn.Parameter(torch.zeros(flat_outputs(output_shape)))

    def classify(self, gathered: Tensor) -> Tensor:
        return super().classify(gathered) + self.bias_V


class NormedRamp(Ramp):
    """A norm and the full model's head, as in CALM. It learns the norm's weights and the classifier."""

    def __init__(self, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> None:
        super().__init__(pooling)
        size = pooled_size(row, pooling)
        flat_outputs(output_shape)
        self.norm = nn.RMSNorm(size, eps=NORM_EPS)
        self.sureness = nn.Sequential(
            nn.RMSNorm(size, eps=NORM_EPS), nn.Linear(size, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1)
        )
        self._shared: tuple[VocabularyHead, ...] = ()  # in a tuple, so that its weights do not count as the ramp's own

    def share(self, head: VocabularyHead) -> None:
        """Use this head for answers from now on."""
        self._shared = (head,)

    def adapted(self, gathered: Tensor) -> Tensor:
        """Returns the state adapted to the shared head, before the norm; here the state itself."""
        return gathered

    def prepared(self, gathered: Tensor) -> Tensor:
        """Returns the input of the shared head."""
        rows_BD: Tensor = self.norm(self.adapted(gathered))
        return rows_BD

    def classify(self, gathered: Tensor) -> Tensor:
        assert self._shared, "a ramp that shares the full model's head was not given it"
        return self._shared[0].classify(self.prepared(gathered))

    def foresee(self, gathered: Tensor) -> Tensor:
        """Returns the log-odds that its answer is the full model's, (B,), from what `gather` returns."""
        log_odds_B: Tensor = self.sureness(gathered).squeeze(-1)
        return log_odds_B


class AdaptedRamp(NormedRamp):
    """A normed ramp behind an adapter: two thin layers whose result is added to the state (Hu et al. 2021, LoRA)."""

    def __init__(self, row: Sequence[int], output_shape: Sequence[int], pooling: Pooling) -> None:
        super().__init__(row, output_shape, pooling)
        size = pooled_size(row, pooling)
        self.narrow = nn.Linear(size, RANK, bias=False)
        self.widen = nn.Linear(RANK, size, bias=False)

    def adapted(self, gathered: Tensor) -> Tensor:
        # In the state's own scale, which grows from block to block; the norm behind it removes the scale again.
        scale_B1 = gathered.square().mean(-1, keepdim=True).sqrt()
        change_BD: Tensor = self.widen(F.silu(self.narrow(F.rms_norm(gathered, gathered.shape[-1:], eps=NORM_EPS))))
        return torch.addcmul(gathered, scale_B1, change_BD)
