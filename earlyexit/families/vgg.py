"""VGG networks over images (Simonyan and Zisserman, ICLR 2015), with torchvision's norms or without.

A block is a convolution with its norm, rectifier and pooling, or one of the two hidden linear layers. There are no
bridges, because the last block of a region, which is pooled, has another shape than the others.

Tensor legend: B images, H rows, W columns, C channels, D numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earlyexit.errors import ModelFolderError
from earlyexit.families.base import Family, JsonDict, Pretrained
from earlyexit.families.images import (
    ImageBackbone,
    ImageConfig,
    NormalisedPixels,
    fill,
    image_codec,
    linear_head,
    tensor_of,
)

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
"""Dimensions of the weights of our parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VggConfig(ImageConfig):
    """Sizes of a network, and how its pixels are normalised. Raises ModelFolderError for impossible sizes."""

    convolutions: tuple[int, ...] = CONVOLUTIONS[11]
    """Convolutions in each region; the last of a region is pooled to half the sides."""
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
            raise ModelFolderError(
                f"convolutions are of {len(self.convolutions)} regions, widths of {len(self.widths)}"
            )
        if min(*self.convolutions, *self.widths, self.cells, *self.hidden) < 1:
            raise ModelFolderError("every region needs a convolution, every width a channel, every map a cell")
        least = 2 ** len(self.widths)
        if min(self.height, self.width) < least:
            raise ModelFolderError(f"images of {self.height} x {self.width}: {least} pixels a side are the fewest")

    @property
    def depth(self) -> int:
        """Layers with weights, with the classifier, by which these networks are named."""
        return sum(self.convolutions) + len(self.hidden) + 1

    def shape_after(self, block: int) -> tuple[int, ...]:
        sizes = self.convolution_sizes()
        if block >= len(sizes):
            return (self.hidden[block - len(sizes)],)
        halvings = sum(pooled for _, _, pooled in sizes[: block + 1])
        return sizes[block][1], self.height >> halvings, self.width >> halvings

    def convolution_sizes(self) -> list[tuple[int, int, bool]]:
        """Returns for every convolution the channels before and after, and whether it is pooled."""
        before = [len(self.mean), *self.widths[:-1]]
        regions = zip(before, self.widths, self.convolutions, strict=True)
        return [
            (narrow if k == 0 else wide, wide, k == number - 1)
            for narrow, wide, number in regions
            for k in range(number)
        ]


class ConvolutionBlock(nn.Sequential):
    """A convolution, its norm, a rectifier, and pooling where a region ends."""

    folds: ClassVar[Mapping[str, str]] = {"convolution": "norm"}

    def __init__(self, before: int, after: int, *, norms: bool, pooled: bool) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(before, after, kernel_size=3, padding=1)
        self.norm = nn.BatchNorm2d(after) if norms else nn.Identity()
        self.activation = nn.ReLU()
        self.pool = nn.MaxPool2d(kernel_size=2) if pooled else nn.Identity()


class LinearBlock(nn.Module):
    """A hidden linear layer; the first one gets the means of a map's cells."""

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

    def build(self, config: JsonDict, folder: Path | None = None) -> VggBackbone:
        fields: JsonDict = {name: tuple(value) if isinstance(value, list) else value for name, value in config.items()}
        return VggBackbone(VggConfig(**fields))

    def from_state(self, weights: Mapping[str, Tensor]) -> Pretrained | None:
        if f"{CLASSIFIER}.weight" not in weights:
            return None
        found = {name.rpartition(".")[0] for name in weights if name.startswith("features.")}
        for convolutions, norms in product(CONVOLUTIONS.values(), (False, True)):
            like = VggConfig(convolutions=convolutions, norms=norms)
            theirs = [name for name, _ in _names(like) if name.startswith("features.")]
            if set(theirs) == found:
                return _pretrained(like, weights)
        return None


def _pretrained(like: VggConfig, weights: Mapping[str, Tensor]) -> Pretrained:
    """Returns the network of a state dict with the arrangement of `like`; widths may differ."""
    ours = dict(_names(like))
    sizes = {
        name: len(tensor_of(weights, f"{name}.weight", sides=SIDES[our.rpartition(".")[2]]))
        for name, our in ours.items()
        if name not in HIDDEN or f"{name}.weight" in weights
    }
    convolutions = [sizes[name] for name, our in ours.items() if our.endswith(".convolution")]
    ends = [convolutions[index] for index, (*_, pooled) in enumerate(like.convolution_sizes()) if pooled]
    hidden = tuple(sizes[name] for name in HIDDEN if name in sizes)
    config = replace(like, widths=tuple(ends), hidden=hidden)
    with torch.device("meta"):
        backbone = VggBackbone(config)
    parts = {name: name.rpartition(".") for name in weights}
    renamed = {
        f"{ours.get(part, part)}.{kind}": weights[name] for name, (part, _, kind) in parts.items() if part != CLASSIFIER
    }
    fill(backbone, renamed, f"VGG-{like.depth}")
    codec = image_codec(config, shortest_edge=256)
    return Pretrained(backbone=backbone, head=linear_head(weights, CLASSIFIER), label_names=None, codec=codec)


def _names(config: VggConfig) -> Iterator[tuple[str, str]]:
    """Yields torchvision's names of the layers, and ours; torchvision counts norms, rectifiers and poolings too."""
    place = 0
    for block, (_, _, pooled) in enumerate(config.convolution_sizes()):
        yield f"features.{place}", f"blocks.{block}.convolution"
        if config.norms:
            yield f"features.{place + 1}", f"blocks.{block}.norm"
        place += 2 + config.norms + pooled
    for index, name in enumerate(HIDDEN):
        yield name, f"blocks.{sum(config.convolutions) + index}.linear"
