"""Residual networks over images (He et al., CVPR 2016), of the sizes that `resnet_config.py` has.

A block is one residual block; the stem belongs to the entry.

Tensor legend: B images, H rows, W columns, C channels.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earlyexit.boundary import Boundary, TensorSpec
from earlyexit.errors import ModelFolderError
from earlyexit.families.base import Backbone, Family, JsonDict, Pretrained
from earlyexit.families.pixels import NormalisedPixels
from earlyexit.families.resnet_config import BlockSizes, ResNetConfig, config_from_json
from earlyexit.families.resnet_state import find_resnet
from earlyexit.families.state_file import fill, linear_head
from earlyexit.layout import Layout
from earlyexit.piece import Tensors


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
