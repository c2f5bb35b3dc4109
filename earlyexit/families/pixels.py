"""What networks over images share. Tensor legend: B images, H rows, W columns, C channels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, nn

from earlyexit.families.base import Backbone, JsonDict
from earlyexit.network.boundary import Boundary, TensorSpec
from earlyexit.network.layout import Layout
from earlyexit.network.piece import Tensors

IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""Means of red, green and blue from 0 to 1 over ImageNet, which the usual CIFAR checkpoints use too."""
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig:
    """The images that a network takes, and how their pixels are normalised."""

    height: int
    """In pixels."""
    width: int
    mean: tuple[float, ...] = IMAGENET_MEAN
    """Of red, green and blue from 0 to 1."""
    std: tuple[float, ...] = IMAGENET_STD

    def shape_after(self, block: int) -> tuple[int, ...]:
        """Returns the shape of one input's hidden state after a block."""
        raise NotImplementedError


class ImageBackbone(Backbone):
    """A chain of modules over images; `stem` turns pixels into the first block's input."""

    def __init__(self, config: ImageConfig, stem: nn.Module, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.config = config
        self.stem = stem
        self.blocks = nn.ModuleList(blocks)
        self.num_blocks = len(self.blocks)

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

    def to_config(self) -> JsonDict:
        return asdict(self.config)


class NormalisedPixels(nn.Module):
    """Turns an image codec's bytes into normalised pixels, channels first."""

    mean_C11: Tensor
    std_C11: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        # Not saved with the weights; on the host even if weights are built on `meta` at first.
        self.register_buffer("mean_C11", _bytes(mean), persistent=False)
        self.register_buffer("std_C11", _bytes(std), persistent=False)

    def forward(self, images_BHWC: Tensor) -> Tensor:
        """Returns pixels from 0 to 255, (B, H, W, C), normalised as (B, C, H, W)."""
        pixels_BCHW = images_BHWC.permute(0, 3, 1, 2).to(self.mean_C11.dtype)
        return (pixels_BCHW - self.mean_C11) / self.std_C11


def _bytes(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, device="cpu")[:, None, None] * 255


def halved(sides: Sequence[int], times: int) -> tuple[int, ...]:
    """Returns height and width after `times` strides of 2 with padding: halves, rounded up."""
    return tuple(-(-side // 2**times) for side in sides)
