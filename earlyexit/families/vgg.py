"""VGG networks over images (Simonyan and Zisserman, ICLR 2015), with or without torchvision's batch norms.

A block is a convolution with its norm, ReLU and pooling, or one of the hidden linear layers. There are no bridges,
because only the last block of a region is pooled, so that its shape differs from the other blocks'.

Tensor legend: B images, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from earlyexit.errors import ModelFolderError
from earlyexit.families.base import Family, Pretrained
from earlyexit.families.images import ImageBackbone, ImageConfig, NormalisedPixels, filled, image_codec, tensor_of

WIDTHS = (64, 128, 256, 512, 512)
"""Channels of the five regions."""
CONVOLUTIONS: Mapping[int, tuple[int, ...]] = {
    11: (1, 1, 2, 2, 2),
    13: (2, 2, 2, 2, 2),
    16: (2, 2, 3, 3, 3),
    19: (2, 2, 4, 4, 4),
}
"""Convolutions of each region, by depth (table 1, columns A, B, D and E)."""
DROPOUT = 0.5
HIDDEN, CLASSIFIER = ("classifier.0", "classifier.3"), "classifier.6"
"""torchvision's names of the linear layers."""
SIDES = {"convolution": 4, "norm": 1, "linear": 2}
"""Number of dimensions of each layer's weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VggConfig(ImageConfig):
    """Sizes of a network. Raises ModelFolderError for invalid sizes."""

    convolutions: tuple[int, ...] = CONVOLUTIONS[11]
    """Convolutions in each region. Pooling after the last one of a region halves the sides."""
    widths: tuple[int, ...] = WIDTHS
    norms: bool = True
    """Whether batch norms follow the convolutions."""
    cells: int = 7
    """Cells along each side to which maps are pooled before the linear layers."""
    hidden: tuple[int, ...] = (4096, 4096)
    """Widths of the linear layers before the classifier."""
    height: int = 224
    width: int = 224

    def __post_init__(self) -> None:
        if not self.convolutions or len(self.convolutions) != len(self.widths):
            raise ModelFolderError(f"convolutions has {len(self.convolutions)} regions, widths has {len(self.widths)}")
        if min(*self.convolutions, *self.widths, self.cells, *self.hidden) < 1:
            raise ModelFolderError("numbers of convolutions, widths, cells, and hidden sizes must be at least 1")
        least = 2 ** len(self.widths)
        if min(self.height, self.width) < least:
            raise ModelFolderError(f"images need at least {least} pixels on a side, not {self.height} x {self.width}")

    @property
    def depth(self) -> int:
        """Number of layers with weights, with the classifier, which is part of the network's name."""
        return sum(self.convolutions) + len(self.hidden) + 1

    def shape_after(self, block: int) -> tuple[int, ...]:
        sizes = self.convolution_sizes()
        if block >= len(sizes):
            return (self.hidden[block - len(sizes)],)
        halvings = sum(pooled for _, _, pooled in sizes[: block + 1])
        return sizes[block][1], self.height >> halvings, self.width >> halvings

    def convolution_sizes(self) -> list[tuple[int, int, bool]]:
        """Returns input channels, output channels, and whether pooling follows, for each convolution."""
        sizes, before = [], len(self.mean)
        for width, number in zip(self.widths, self.convolutions, strict=True):
            for k in range(number):
                sizes.append((before, width, k == number - 1))
                before = width
        return sizes


class ConvolutionBlock(nn.Sequential):
    """A convolution, its norm, ReLU, and pooling at the end of a region."""

    folds: ClassVar[Mapping[str, str]] = {"convolution": "norm"}

    def __init__(self, before: int, after: int, *, norms: bool, pooled: bool) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(before, after, kernel_size=3, padding=1)
        self.norm = nn.BatchNorm2d(after) if norms else nn.Identity()
        self.activation = nn.ReLU()
        self.pool = nn.MaxPool2d(kernel_size=2) if pooled else nn.Identity()


class LinearBlock(nn.Module):
    """A hidden linear layer. The first one pools maps to cells."""

    def __init__(self, before: int, after: int, *, cells: int) -> None:
        super().__init__()
        self._cells = cells
        self.linear = nn.Linear(before, after)
        self.dropout = nn.Dropout(DROPOUT)

    def forward(self, hidden: Tensor) -> Tensor:
        if hidden.ndim > 2:
            hidden = F.adaptive_avg_pool2d(hidden, self._cells).flatten(1)
        after_BD: Tensor = self.dropout(F.relu(self.linear(hidden)))
        return after_BD


class VggBackbone(ImageBackbone):
    """Convolutions, then the hidden linear layers."""

    config: VggConfig

    def __init__(self, config: VggConfig) -> None:
        wide = (config.widths[-1] * config.cells**2, *config.hidden)
        convolutions = (
            ConvolutionBlock(before, after, norms=config.norms, pooled=pooled)
            for before, after, pooled in config.convolution_sizes()
        )
        linears = (LinearBlock(*sizes, cells=config.cells) for sizes in zip(wide[:-1], config.hidden, strict=True))
        super().__init__(config, NormalisedPixels(config.mean, config.std), chain(convolutions, linears))


class Vgg(Family):
    """VGG-11, 13, 16 and 19, from state dicts with torchvision's names."""

    name = "vgg"
    sizes, backbone = VggConfig, VggBackbone

    def from_state(self, weights: Mapping[str, Tensor]) -> Pretrained | None:
        if f"{CLASSIFIER}.weight" not in weights:
            return None
        layers = {name.rpartition(".")[0] for name in weights if name.startswith("features.")}
        for convolutions, norms in product(CONVOLUTIONS.values(), (False, True)):
            config = VggConfig(convolutions=convolutions, norms=norms)
            if {name for name, _ in _names(config) if name.startswith("features.")} == layers:
                return _pretrained(config, weights)
        return None


def _pretrained(like: VggConfig, weights: Mapping[str, Tensor]) -> Pretrained:
    """Returns the network of a state dict whose layers are those of `like`. Widths may differ."""
    our_names = dict(_names(like))
    sizes = {
        name: len(tensor_of(weights, f"{name}.weight", sides=SIDES[ours.rpartition(".")[2]]))
        for name, ours in our_names.items()
        if name not in HIDDEN or f"{name}.weight" in weights
    }
    channels = [sizes[name] for name, ours in our_names.items() if ours.endswith(".convolution")]
    widths = [width for width, (*_, pooled) in zip(channels, like.convolution_sizes(), strict=True) if pooled]
    hidden = tuple(sizes[name] for name in HIDDEN if name in sizes)
    config = replace(like, widths=tuple(widths), hidden=hidden)
    codec = image_codec(config, shortest_edge=256)
    called = f"VGG-{like.depth}"
    return filled(lambda: VggBackbone(config), weights, our_names, CLASSIFIER, codec, called=called)


def _names(config: VggConfig) -> Iterator[tuple[str, str]]:
    """Yields torchvision's name and our name of each layer with weights."""
    index = 0  # torchvision also counts norms, ReLUs and poolings
    for block, (_, _, pooled) in enumerate(config.convolution_sizes()):
        yield f"features.{index}", f"blocks.{block}.convolution"
        if config.norms:
            yield f"features.{index + 1}", f"blocks.{block}.norm"
        index += 2 + config.norms + pooled
    for k, name in enumerate(HIDDEN):
        yield name, f"blocks.{sum(config.convolutions) + k}.linear"
