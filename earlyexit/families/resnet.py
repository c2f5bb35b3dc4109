"""Residual networks for small images: the 6n + 2 family of He et al. (2016, section 4.2), 20 to 110 layers.

Shortcuts are their option A, without weights: where the width doubles, every second pixel in both directions, and zeros
for the channels that are new. A block is one residual block; the stem belongs to the entry.

Tensor legend: B images, H rows, W columns, C channels.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from earlyexit.boundary import Boundary, TensorSpec
from earlyexit.errors import ModelFolderError
from earlyexit.families.base import Backbone, Family, FinalHead, JsonDict, Pretrained
from earlyexit.layout import Layout
from earlyexit.piece import Tensors

WIDTHS = (16, 32, 64)
"""Channels of the three stages; each begins on half the side of the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNetConfig:
    """Sizes of a network, and how its pixels are normalised."""

    depth: int = 20
    """Layers with weights: 6n + 2, n blocks in each of three stages."""
    side: int = 32
    """Height and width of an image in pixels."""
    mean: tuple[float, ...] = (0.485, 0.456, 0.406)
    """Of red, green and blue from 0 to 1. These are ImageNet's, which the usual CIFAR checkpoints were trained with."""
    std: tuple[float, ...] = (0.229, 0.224, 0.225)

    def __post_init__(self) -> None:
        if self.depth < 8 or self.depth % 6 != 2:
            raise ModelFolderError(f"a depth of 6n + 2 layers is needed (20, 32, 44, 56, 110), not {self.depth}")

    @property
    def blocks_per_stage(self) -> int:
        return (self.depth - 2) // 6

    @property
    def num_blocks(self) -> int:
        return len(WIDTHS) * self.blocks_per_stage

    def shape_after(self, block: int) -> tuple[int, int, int]:
        """(C, H, W) of the hidden state after a block."""
        stage = block // self.blocks_per_stage
        side = -(-self.side // 2**stage)
        return WIDTHS[stage], side, side


class Stem(nn.Module):
    """Pixels to the hidden state before the first block: normalised, one convolution."""

    mean_C11: Tensor
    std_C11: Tensor

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.register_buffer("mean_C11", torch.tensor(config.mean)[:, None, None] * 255, persistent=False)
        self.register_buffer("std_C11", torch.tensor(config.std)[:, None, None] * 255, persistent=False)
        self.convolution = _convolution(len(config.mean), WIDTHS[0])
        self.norm = nn.BatchNorm2d(WIDTHS[0])

    def forward(self, images_BHWC: Tensor) -> Tensor:
        """Pixels from 0 to 255, (B, H, W, C), to (B, 16, H, W)."""
        pixels_BCHW = images_BHWC.permute(0, 3, 1, 2).to(self.mean_C11.dtype)
        return F.relu(self.norm(self.convolution((pixels_BCHW - self.mean_C11) / self.std_C11)))


class ResidualBlock(nn.Module):
    """Two convolutions and the shortcut around them."""

    def __init__(self, width: int, out_width: int) -> None:
        super().__init__()
        self.new_channels = out_width - width
        self.convolution_1 = _convolution(width, out_width, stride=2 if self.new_channels else 1)
        self.norm_1 = nn.BatchNorm2d(out_width)
        self.convolution_2 = _convolution(out_width, out_width)
        self.norm_2 = nn.BatchNorm2d(out_width)

    def forward(self, hidden_BCHW: Tensor) -> Tensor:
        inner_BCHW = F.relu(self.norm_1(self.convolution_1(hidden_BCHW)))
        return F.relu(self.norm_2(self.convolution_2(inner_BCHW)) + self._shortcut(hidden_BCHW))

    def _shortcut(self, hidden_BCHW: Tensor) -> Tensor:
        if not self.new_channels:
            return hidden_BCHW
        half = self.new_channels // 2
        return F.pad(hidden_BCHW[:, :, ::2, ::2], (0, 0, 0, 0, half, half))


class ResNetBackbone(Backbone):
    """The stem and a chain of residual blocks."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        self.num_blocks = config.num_blocks
        widths = [width for width in WIDTHS for _ in range(config.blocks_per_stage)]
        before = [WIDTHS[0], *widths[:-1]]
        self.stem = Stem(config)
        self.blocks = nn.ModuleList(ResidualBlock(width, out) for width, out in zip(before, widths, strict=True))

    @property
    def inputs(self) -> Boundary:
        shape = (self.config.side, self.config.side, len(self.config.mean))
        return (TensorSpec(name="image", shape=shape, dtype="uint8"),)

    def boundary(self, block: int) -> Boundary:
        return (TensorSpec(name="hidden", shape=self.config.shape_after(block)),)

    def embed(self, inputs: Tensors, layout: Layout) -> Tensors:
        return (self.stem(inputs[0]),)

    def run_block(self, index: int, hidden: Tensors, layout: Layout) -> Tensors:
        return (self.blocks[index](hidden[0]),)

    def bridge(self, block: int) -> nn.Module:
        """Copies of the first block of every later stage, so that the others are dropped (PAME, section 5.1)."""
        firsts = range(0, self.num_blocks, self.config.blocks_per_stage)
        return nn.Sequential(*(deepcopy(self.blocks[first]) for first in firsts if first > block))

    def to_config(self) -> JsonDict:
        return asdict(self.config)


class ResNet(Family):
    """CIFAR's ResNets, from state dicts with the names of the usual implementation (`layer1.0.conv1.weight`)."""

    name = "resnet"
    lazy_weights = False

    def build(self, config: JsonDict, folder: Path | None = None) -> ResNetBackbone:
        fields: JsonDict = {name: tuple(value) if isinstance(value, list) else value for name, value in config.items()}
        return ResNetBackbone(ResNetConfig(**fields))

    def from_transformers(self, hf_model: Any, *, pairs: bool = False) -> Pretrained:
        raise ModelFolderError("ResNets come as files of a state dict (.th, .pt, .pth)")

    def from_file(self, path: Path) -> Pretrained:
        """The network of a state dict, alone or as `state_dict` beside other facts; raises ModelFolderError."""
        weights = {name.removeprefix("module."): tensor for name, tensor in _read_state(path).items()}
        blocks = {name.rsplit(".", 2)[0] for name in weights if name.startswith("layer") and ".conv1." in name}
        if "linear.weight" not in weights or not blocks:
            raise ModelFolderError(f"{path} holds no ResNet of the 6n + 2 family; its tensors are {_some(weights)}")
        backbone = ResNetBackbone(ResNetConfig(depth=2 * len(blocks) + 2))
        head = {f"classifier.{kind}": weights.pop(f"linear.{kind}") for kind in ("weight", "bias")}
        try:
            backbone.load_state_dict(_renamed(weights, backbone.config), strict=True)
        except RuntimeError as error:
            reason = " ".join(str(error).split())  # torch gives a line to each tensor
            raise ModelFolderError(f"{path} does not fit a ResNet-{backbone.config.depth}: {reason}") from error
        codec = {"name": "image", "height": backbone.config.side, "width": backbone.config.side}
        return Pretrained(
            backbone=backbone,
            head=FinalHead(style="light", pooling="mean", num_outputs=len(head["classifier.bias"]), weights=head),
            label_names=None,
            codec=codec,
        )


def _convolution(width: int, out_width: int, *, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(width, out_width, kernel_size=3, stride=stride, padding=1, bias=False)


def _read_state(path: Path) -> dict[str, Tensor]:
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, UnpicklingError, EOFError) as error:
        raise ModelFolderError(f"{path} cannot be read as weights: {error}") from error
    inner = state.get("state_dict", state) if isinstance(state, dict) else None
    if not isinstance(inner, dict) or not all(isinstance(value, Tensor) for value in inner.values()):
        raise ModelFolderError(f"{path} holds no state dict")
    return inner


def _renamed(weights: dict[str, Tensor], config: ResNetConfig) -> dict[str, Tensor]:
    """Their names to ours: `layer2.0.bn1.bias` is `blocks.N.norm_1.bias`. Counts of batches seen are left out there."""
    ours = {"conv1": "convolution_1", "conv2": "convolution_2", "bn1": "norm_1", "bn2": "norm_2"}
    renamed: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        match name.split("."):
            case [("conv1" | "bn1") as part, kind]:
                renamed[f"stem.{'convolution' if part == 'conv1' else 'norm'}.{kind}"] = tensor
            case [stage, block, part, kind] if part in ours and stage[5:].isdigit() and block.isdigit():
                index = (int(stage[5:]) - 1) * config.blocks_per_stage + int(block)
                renamed[f"blocks.{index}.{ours[part]}.{kind}"] = tensor
            case _:
                renamed[name] = tensor
    norms = {name.rsplit(".", 1)[0] for name in renamed if name.endswith("running_mean")}
    return {f"{norm}.num_batches_tracked": torch.tensor(0) for norm in norms} | renamed


def _some(weights: dict[str, Tensor]) -> str:
    return ", ".join(sorted(weights)[:3]) or "none"
