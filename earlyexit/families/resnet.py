"""Residual networks over images (He et al., CVPR 2016), of the sizes that `resnet_config.py` has.

A block is one residual block; the stem belongs to the entry.

Tensor legend: B images, H rows, W columns, C channels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earlyexit.errors import ModelFolderError
from earlyexit.families.base import Backbone, Family, JsonDict, Pretrained
from earlyexit.families.pixels import NormalisedPixels
from earlyexit.families.resnet_config import BlockSizes, ResNetConfig, config_from_json
from earlyexit.families.state_file import fill, linear_head, tensor_of
from earlyexit.named import NamedSpec
from earlyexit.network.boundary import Boundary, TensorSpec
from earlyexit.network.layout import Layout
from earlyexit.network.piece import Tensors

CLASSIFIERS = ("fc", "linear")
"""torchvision's name of the last layer, and CIFAR's."""
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
"""A part's region, its block there, and its name in the block."""
LARGE_KERNEL = 7
CODECS: Mapping[str, dict[str, Any]] = {
    "small": {"height": 32, "width": 32},
    "large": {"height": 224, "width": 224, "shortest_edge": 256},
}
"""What images the published networks with these stems are for, and how these come to that size."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundResNet:
    """What a state dict holds."""

    config: ResNetConfig
    weights: Mapping[str, Tensor]
    """By our names, without the classifier."""
    classifier: str
    """The name of the last layer there."""
    codec: NamedSpec


def find_resnet(weights: Mapping[str, Tensor], size: tuple[int, int] | None) -> FoundResNet | None:
    """The network of a state dict; None where its tensors are of another.

    Raises ModelFolderError where it is not whole.
    """
    classifier = next((name for name in CLASSIFIERS if f"{name}.weight" in weights), None)
    if classifier is None or not {"conv1.weight", "layer1.0.conv1.weight"} <= set(weights):
        return None
    large = tensor_of(weights, "conv1.weight", sides=4).shape[-1] == LARGE_KERNEL
    firsts = [tensor_of(weights, f"layer{region}.0.conv1.weight", sides=4) for region in _regions(weights)]
    codec = CODECS["large" if large else "small"]
    if size is not None:
        codec = {"height": size[0], "width": size[1]}
    config = ResNetConfig(
        blocks=_blocks(weights),
        widths=tuple(map(len, firsts)),
        kind="bottleneck" if "layer1.0.conv3.weight" in weights else "basic",
        stem="large" if large else "small",
        projected=any(".downsample." in name for name in weights),
        height=codec["height"],
        width=codec["width"],
    )
    renamed = _renamed(weights, config)
    return FoundResNet(config=config, weights=renamed, classifier=classifier, codec={"name": "image", **codec})


def _regions(weights: Mapping[str, Tensor]) -> range:
    """The regions up to the last that a name has, from 1 on."""
    return range(1, max(int(found[1]) for found in map(LAYER.match, weights) if found) + 1)


def _blocks(weights: Mapping[str, Tensor]) -> tuple[int, ...]:
    """Of each region: how many blocks the names have."""
    places = {(int(found[1]), int(found[2])) for found in map(LAYER.match, weights) if found}
    return tuple(sum(of == region for of, _ in places) for region in _regions(weights))


def _renamed(weights: Mapping[str, Tensor], config: ResNetConfig) -> dict[str, Tensor]:
    """`layer2.0.bn1.bias` is `blocks.N.norm_1.bias`; without the classifier."""
    renamed: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        part, _, kind = name.rpartition(".")
        found = LAYER.fullmatch(part)
        if part in STEM:
            renamed[f"stem.{STEM[part]}.{kind}"] = tensor
        elif found and found[3] in PARTS:
            index = config.firsts[int(found[1]) - 1] + int(found[2])
            renamed[f"blocks.{index}.{PARTS[found[3]]}.{kind}"] = tensor
        elif part not in CLASSIFIERS:
            renamed[name] = tensor
    return renamed


class Stem(nn.Module):
    """Pixels to the hidden state before the first block."""

    folds: ClassVar[Mapping[str, str]] = {"convolution": "norm"}
    """Convolutions and the norms right behind them, which a CPU may fold into one where it serves; here and below."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        large = config.stem == "large"
        self.pixels = NormalisedPixels(config.mean, config.std)
        self.convolution = _convolution(
            len(config.mean), config.widths[0], kernel=7 if large else 3, stride=2 if large else 1
        )
        self.norm = nn.BatchNorm2d(config.widths[0])
        self.pool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1) if large else nn.Identity()

    def forward(self, images_BHWC: Tensor) -> Tensor:
        """Pixels from 0 to 255, (B, H, W, C), to the first block's input."""
        hidden_BCHW: Tensor = self.pool(F.relu(self.norm(self.convolution(self.pixels(images_BHWC)))))
        return hidden_BCHW


class PaddedShortcut(nn.Module):
    """Without weights: every second pixel in both directions, and zeros around the channels that there were."""

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        more = sizes.after - sizes.before
        self._stride = sizes.stride
        self._new_channels = more // 2, more - more // 2

    def forward(self, hidden_BCHW: Tensor) -> Tensor:
        return F.pad(hidden_BCHW[:, :, :: self._stride, :: self._stride], (0, 0, 0, 0, *self._new_channels))


class ProjectedShortcut(nn.Module):
    """A 1 x 1 convolution."""

    folds: ClassVar[Mapping[str, str]] = {"convolution": "norm"}

    def __init__(self, sizes: BlockSizes) -> None:
        super().__init__()
        self.convolution = _convolution(sizes.before, sizes.after, kernel=1, stride=sizes.stride)
        self.norm = nn.BatchNorm2d(sizes.after)

    def forward(self, hidden_BCHW: Tensor) -> Tensor:
        shortcut_BCHW: Tensor = self.norm(self.convolution(hidden_BCHW))
        return shortcut_BCHW


class BasicBlock(nn.Module):
    """Two convolutions of 3 x 3, and the shortcut around them."""

    folds: ClassVar[Mapping[str, str]] = {"convolution_1": "norm_1", "convolution_2": "norm_2"}

    def __init__(self, sizes: BlockSizes, *, projected: bool = False) -> None:
        super().__init__()
        dilation = sizes.dilation
        self.convolution_1 = _convolution(sizes.before, sizes.inner, stride=sizes.stride, dilation=dilation)
        self.norm_1 = nn.BatchNorm2d(sizes.inner)
        self.convolution_2 = _convolution(sizes.inner, sizes.after, dilation=dilation)
        self.norm_2 = nn.BatchNorm2d(sizes.after)
        self.shortcut = _shortcut(sizes, projected)

    def forward(self, hidden_BCHW: Tensor) -> Tensor:
        inner_BCHW = F.relu(self.norm_1(self.convolution_1(hidden_BCHW)))
        return F.relu(self.norm_2(self.convolution_2(inner_BCHW)) + self.shortcut(hidden_BCHW))


class BottleneckBlock(nn.Module):
    """A convolution of 3 x 3 over few channels, between two of 1 x 1, and the shortcut around them.

    The one of 3 x 3 has the stride, as in torchvision's networks, not the first, as in the paper's.
    """

    folds: ClassVar[Mapping[str, str]] = {
        "convolution_1": "norm_1",
        "convolution_2": "norm_2",
        "convolution_3": "norm_3",
    }

    def __init__(self, sizes: BlockSizes, *, projected: bool = False) -> None:
        super().__init__()
        self.convolution_1 = _convolution(sizes.before, sizes.inner, kernel=1)
        self.norm_1 = nn.BatchNorm2d(sizes.inner)
        self.convolution_2 = _convolution(sizes.inner, sizes.inner, stride=sizes.stride, dilation=sizes.dilation)
        self.norm_2 = nn.BatchNorm2d(sizes.inner)
        self.convolution_3 = _convolution(sizes.inner, sizes.after, kernel=1)
        self.norm_3 = nn.BatchNorm2d(sizes.after)
        self.shortcut = _shortcut(sizes, projected)

    def forward(self, hidden_BCHW: Tensor) -> Tensor:
        inner_BCHW = F.relu(self.norm_1(self.convolution_1(hidden_BCHW)))
        inner_BCHW = F.relu(self.norm_2(self.convolution_2(inner_BCHW)))
        return F.relu(self.norm_3(self.convolution_3(inner_BCHW)) + self.shortcut(hidden_BCHW))


BLOCKS: Mapping[str, type[BasicBlock | BottleneckBlock]] = {"basic": BasicBlock, "bottleneck": BottleneckBlock}


class ResNetBackbone(Backbone):
    """The stem and a chain of residual blocks."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        self.num_blocks = config.num_blocks
        self.stem = Stem(config)
        block = BLOCKS[config.kind]
        self.blocks = nn.ModuleList(block(sizes, projected=config.projected) for sizes in config.block_sizes())

    @property
    def inputs(self) -> Boundary:
        shape = (self.config.height, self.config.width, len(self.config.mean))
        return (TensorSpec(name="image", shape=shape, dtype="uint8"),)

    def boundary(self, block: int) -> Boundary:
        return (TensorSpec(name="hidden", shape=self.config.shape_after(block)),)

    def embed(self, inputs: Tensors, layout: Layout) -> Tensors:
        return (self.stem(inputs[0]),)

    def run_block(self, index: int, hidden: Tensors, layout: Layout) -> Tensors:
        return (self.blocks[index](hidden[0]),)

    def bridge(self, block: int) -> nn.Module:
        """Copies of the first block of every later region, so that the others are dropped (PAME, section 5.1)."""
        return nn.Sequential(*(deepcopy(self.blocks[first]) for first in self.config.firsts if first > block))

    def to_config(self) -> JsonDict:
        return asdict(self.config)


class ResNet(Family):
    """Residual networks, from state dicts with torchvision's names, or those of CIFAR's usual implementation."""

    name = "resnet"

    def build(self, config: JsonDict, folder: Path | None = None) -> ResNetBackbone:
        return ResNetBackbone(config_from_json(config))

    def from_transformers(self, hf_model: Any, *, pairs: bool = False) -> Pretrained:
        raise ModelFolderError("ResNets come as files of a state dict (.th, .pt, .pth)")

    def from_state(self, weights: Mapping[str, Tensor], size: tuple[int, int] | None = None) -> Pretrained | None:
        found = find_resnet(weights, size)
        if found is None:
            return None
        with torch.device("meta"):
            backbone = ResNetBackbone(found.config)
        fill(backbone, found.weights, f"ResNet-{found.config.depth}")
        head = linear_head(weights, found.classifier)
        return Pretrained(backbone=backbone, head=head, label_names=None, codec=found.codec)


def _convolution(before: int, after: int, *, kernel: int = 3, stride: int = 1, dilation: int = 1) -> nn.Conv2d:
    padding = kernel // 2 * dilation
    return nn.Conv2d(before, after, kernel, stride=stride, padding=padding, dilation=dilation, bias=False)


def _shortcut(sizes: BlockSizes, projected: bool) -> nn.Module:
    if sizes.before == sizes.after and sizes.stride == 1:
        return nn.Identity()
    return ProjectedShortcut(sizes) if projected else PaddedShortcut(sizes)
