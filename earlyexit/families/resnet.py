"""Residual networks, such as those for CIFAR and ImageNet (He et al., CVPR 2016)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import Any, ClassVar, Literal, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from earlyexit.errors import ModelFolderError
from earlyexit.families.base import Family, Pretrained
from earlyexit.families.images import ImageBackbone, ImageConfig, NormalisedPixels, filled, image_codec, tensor_of
from earlyexit.ramps.pooling import halved

Kind = Literal["basic", "bottleneck"]
StemKind = Literal["small", "large"]

EXPANSION: Mapping[str, int] = {"basic": 1, "bottleneck": 4}
"""Output channels of a block per channel of its 3 x 3 convolution."""
LAYERS: Mapping[str, int] = {"basic": 2, "bottleneck": 3}
"""Layers with weights in a block, without its shortcut."""
STEM_HALVINGS: Mapping[str, int] = {"small": 0, "large": 2}
"""Number of times that the stem halves the sides of an image."""
CIFAR_WIDTHS = (16, 32, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockSizes:
    """Channels of one residual block, its stride and its dilation."""

    before: int
    inner: int
    after: int
    stride: int = 1
    dilation: int = 1
    """Dilation of the 3 x 3 convolutions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNetConfig(ImageConfig):
    """Sizes of a network. Raises ModelFolderError for invalid sizes."""

    blocks: tuple[int, ...] = (3, 3, 3)
    """Blocks in each region. The first block of every region except the first region halves the sides of the maps."""
    widths: tuple[int, ...] = CIFAR_WIDTHS
    """Channels of each region's 3 x 3 convolutions. The first number is also the stem's."""
    kind: Kind = "basic"
    """Whether a block has two 3 x 3 convolutions (basic), or one between two 1 x 1 convolutions (bottleneck)."""
    stem: StemKind = "small"
    """Whether the stem is a 3 x 3 convolution (small), or 7 x 7 with stride 2 and max pooling (large)."""
    projected: bool = False
    """Whether shortcuts that change the shape are 1 x 1 convolutions (He et al.'s option B). Otherwise they have no
    weights: they take every second pixel, and zeros for new channels (option A)."""
    dilated: int = 0
    """Number of regions at the end that keep the sides and dilate their convolutions, as segmentation networks do."""
    height: int = 32
    width: int = 32

    def __post_init__(self) -> None:
        for name, allowed in (("kind", get_args(Kind)), ("stem", get_args(StemKind))):
            if getattr(self, name) not in allowed:
                raise ModelFolderError(f"{name} {getattr(self, name)!r}; known: {', '.join(allowed)}")
        if not self.blocks or len(self.blocks) != len(self.widths):
            raise ModelFolderError(f"blocks has {len(self.blocks)} regions, and widths has {len(self.widths)}")
        if min(*self.blocks, *self.widths, self.height, self.width) < 1:
            raise ModelFolderError("numbers of blocks, widths, and sides of images must be at least 1")
        if not 0 <= self.dilated < len(self.blocks):
            raise ModelFolderError(f"0 to {len(self.blocks) - 1} regions can be dilated, not {self.dilated}")
        if not self.projected and list(self.widths) != sorted(self.widths):
            raise ModelFolderError(f"widths must not fall if projected is false: {list(self.widths)}")

    @property
    def num_blocks(self) -> int:
        return sum(self.blocks)

    @property
    def depth(self) -> int:
        """Number of layers with weights in stem, blocks and classifier, which is part of the network's name."""
        return LAYERS[self.kind] * self.num_blocks + 2

    @property
    def firsts(self) -> tuple[int, ...]:
        """The index of each region's first block."""
        return tuple(accumulate(self.blocks[:-1], initial=0))

    def shape_after(self, block: int) -> tuple[int, int, int]:
        """Returns (C, H, W) of the hidden state after a block."""
        region = sum(first <= block for first in self.firsts) - 1
        halvings = STEM_HALVINGS[self.stem] + min(region, self._undilated - 1)
        height, width = halved((self.height, self.width), halvings)
        return self.widths[region] * EXPANSION[self.kind], height, width

    def block_sizes(self) -> list[BlockSizes]:
        """Returns the sizes of all blocks."""
        sizes: list[BlockSizes] = []
        before, dilation = self.widths[0], 1
        for region, (number, inner) in enumerate(zip(self.blocks, self.widths, strict=True)):
            strides = region > 0 and region < self._undilated
            for index in range(number):
                after = inner * EXPANSION[self.kind]
                stride = 2 if strides and index == 0 else 1
                sizes.append(BlockSizes(before=before, inner=inner, after=after, stride=stride, dilation=dilation))
                if index == 0 and region >= self._undilated:
                    dilation *= 2  # the first block's input is not dilated yet
                before = after
        return sizes

    @property
    def _undilated(self) -> int:
        return len(self.blocks) - self.dilated


def cifar_layout(depth: int = 20, *, side: int = 32, **settings: Any) -> ResNetConfig:
    """Returns the sizes of a CIFAR network of 6n + 2 layers (He et al., section 4.2): three regions of n basic blocks.

    Raises ModelFolderError for other depths.
    """
    if depth < 8 or depth % 6 != 2:
        raise ModelFolderError(f"the depth must be 6n + 2 (20, 32, 44, 56, 110), not {depth}")
    return ResNetConfig(blocks=((depth - 2) // 6,) * len(CIFAR_WIDTHS), height=side, width=side, **settings)


CLASSIFIERS = ("fc", "linear")
"""Names of the last layer in torchvision, and in the common CIFAR implementation."""
PARTS = {
    "conv1": "convolution_1",
    "conv2": "convolution_2",
    "conv3": "convolution_3",
    "bn1": "norm_1",
    "bn2": "norm_2",
    "bn3": "norm_3",
    "downsample.0": "shortcut.convolution",
    "downsample.1": "shortcut.norm",
}
STEM = {"conv1": "convolution", "bn1": "norm"}
LAYER = re.compile(r"layer([1-9]\d{0,3})\.(\d{1,4})\.(.+)", re.ASCII)
"""Groups: region, block in the region, name of the layer in the block."""
LARGE_KERNEL = 7


def find_config(weights: Mapping[str, Tensor]) -> ResNetConfig:
    """Returns the sizes of a state dict's network; raises ModelFolderError if tensors are missing."""
    large = tensor_of(weights, "conv1.weight", sides=4).shape[-1] == LARGE_KERNEL
    blocks = {(int(found[1]), int(found[2])) for found in map(LAYER.match, weights) if found}
    regions = range(1, max(region for region, _ in blocks) + 1)
    firsts = [tensor_of(weights, f"layer{region}.0.conv1.weight", sides=4) for region in regions]
    side = 224 if large else 32
    return ResNetConfig(
        blocks=tuple(sum(region_of_block == region for region_of_block, _ in blocks) for region in regions),
        widths=tuple(map(len, firsts)),
        kind="bottleneck" if "layer1.0.conv3.weight" in weights else "basic",
        stem="large" if large else "small",
        projected=any(".downsample." in name for name in weights),
        height=side,
        width=side,
    )


class Stem(nn.Sequential):
    """Maps pixels from 0 to 255, (B, H, W, C), to the hidden state before the first block."""

    folds: ClassVar[Mapping[str, str]] = {"convolution": "norm"}
    """Convolution -> the batch norm after it, which a CPU backend may fold into the convolution's weights."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        large = config.stem == "large"
        self.pixels = NormalisedPixels(config.mean, config.std)
        self.convolution = _convolution(
            len(config.mean), config.widths[0], kernel=7 if large else 3, stride=2 if large else 1
        )
        self.norm = nn.BatchNorm2d(config.widths[0])
        self.activation = nn.ReLU()
        self.pool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1) if large else nn.Identity()


class PaddedShortcut(nn.Module):
    """A shortcut without weights: every second pixel in both directions, and zeros for new channels."""

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        num_new = sizes.after - sizes.before
        self._stride = sizes.stride
        self._new_channels = num_new // 2, num_new - num_new // 2

    def forward(self, hidden_BCHW: Tensor) -> Tensor:
        return F.pad(hidden_BCHW[:, :, :: self._stride, :: self._stride], (0, 0, 0, 0, *self._new_channels))


class ProjectedShortcut(nn.Sequential):
    """A shortcut that is a 1 x 1 convolution."""

    folds: ClassVar[Mapping[str, str]] = {"convolution": "norm"}

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        self.convolution = _convolution(sizes.before, sizes.after, kernel=1, stride=sizes.stride)
        self.norm = nn.BatchNorm2d(sizes.after)


class ResidualBlock(nn.Module):
    """Convolutions with their norms, and the shortcut around them.

    A basic block has two 3 x 3 convolutions. A bottleneck block has a 3 x 3 convolution between two 1 x 1 convolutions.
    The 3 x 3 convolution has the stride, as in torchvision, whereas in the paper the first convolution has it.
    """

    def __init__(self, sizes: BlockSizes, kind: Kind = "basic", *, projected: bool = False) -> None:
        super().__init__()
        self._number = LAYERS[kind]
        self.folds = {f"convolution_{k}": f"norm_{k}" for k in range(1, self._number + 1)}
        kernels, strided = ((3, 3), 0) if kind == "basic" else ((1, 3, 1), 1)
        before = sizes.before
        for k, kernel in enumerate(kernels):
            after = sizes.after if k == self._number - 1 else sizes.inner
            stride, dilation = sizes.stride if k == strided else 1, sizes.dilation if kernel > 1 else 1
            convolution = _convolution(before, after, kernel=kernel, stride=stride, dilation=dilation)
            self.add_module(f"convolution_{k + 1}", convolution)
            self.add_module(f"norm_{k + 1}", nn.BatchNorm2d(after))
            before = after
        self.shortcut: nn.Module = nn.Identity()
        if sizes.before != sizes.after or sizes.stride > 1:
            self.shortcut = ProjectedShortcut(sizes) if projected else PaddedShortcut(sizes)

    def forward(self, hidden_BCHW: Tensor) -> Tensor:
        inner_BCHW = hidden_BCHW
        for k in range(1, self._number + 1):
            inner_BCHW = getattr(self, f"norm_{k}")(getattr(self, f"convolution_{k}")(inner_BCHW))
            inner_BCHW = F.relu(inner_BCHW if k < self._number else inner_BCHW + self.shortcut(hidden_BCHW))
        return inner_BCHW


class ResNetBackbone(ImageBackbone):
    """A stem and residual blocks."""

    config: ResNetConfig

    def __init__(self, config: ResNetConfig) -> None:
        sizes = config.block_sizes()
        blocks = (ResidualBlock(block_sizes, config.kind, projected=config.projected) for block_sizes in sizes)
        super().__init__(config, Stem(config), blocks)

    def bridge(self, block: int) -> nn.Module:
        """Returns copies of the first block of every later region (PAME, section 5.1)."""
        return nn.Sequential(*(deepcopy(self.blocks[first]) for first in self.config.firsts if first > block))


class ResNet(Family):
    """Residual networks, from state dicts with the names of torchvision or of the common CIFAR implementation."""

    name = "resnet"
    backbone = ResNetBackbone

    @staticmethod
    def sizes(**values: Any) -> ResNetConfig:
        """Returns the configuration. Models saved by early versions have `depth` and `side` of a CIFAR network."""
        own = {field.name for field in fields(ResNetConfig)} - {"mean", "std"}
        return ResNetConfig(**values) if own & values.keys() else cifar_layout(**values)

    def from_state(self, weights: Mapping[str, Tensor]) -> Pretrained | None:
        classifier = next((name for name in CLASSIFIERS if f"{name}.weight" in weights), None)
        if classifier is None or not {"conv1.weight", "layer1.0.conv1.weight"} <= set(weights):
            return None
        config = find_config(weights)
        layers = {theirs: f"stem.{ours}" for theirs, ours in STEM.items()}  # and `layer1.0.bn1` is `blocks.0.norm_1`
        for found in filter(None, map(LAYER.fullmatch, {name.rpartition(".")[0] for name in weights})):
            if found[3] in PARTS:
                layers[found[0]] = f"blocks.{config.firsts[int(found[1]) - 1] + int(found[2])}.{PARTS[found[3]]}"
        codec = image_codec(config, shortest_edge=256 if config.stem == "large" else None)
        called = f"ResNet-{config.depth}"
        return filled(lambda: ResNetBackbone(config), weights, layers, classifier, codec, called=called)


def _convolution(before: int, after: int, *, kernel: int = 3, stride: int = 1, dilation: int = 1) -> nn.Conv2d:
    padding = kernel // 2 * dilation
    return nn.Conv2d(before, after, kernel, stride=stride, padding=padding, dilation=dilation, bias=False)
