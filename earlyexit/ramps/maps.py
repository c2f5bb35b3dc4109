"""Exit heads whose outputs are maps: logits of every pixel, or heatmaps.

Tensor legend: B inputs, C channels, H and W the sides of a map.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import log2
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from earlyexit.errors import ModelFolderError
from earlyexit.families.images import halved
from earlyexit.ramps.heads import MAP_SIDES, Ramp
from earlyexit.ramps.pooling import Pooling

WIDTH = 64
"""Channels of the inner maps of these heads."""


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
        self.convolution = nn.Conv2d(row[0], WIDTH, kernel_size=3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(WIDTH)
        self.classifier = nn.Conv2d(WIDTH, output_shape[0], kernel_size=1)

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
        widths = [row[0], *[WIDTH] * max(1, doublings)]
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
