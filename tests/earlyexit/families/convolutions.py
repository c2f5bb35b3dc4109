"""A small network over pictures, made as a user would make it: every block gives tensors of another shape."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from earlyexit.families.own import TensorBackbone
from earlyexit.network.boundary import Encoded, TensorSpec
from earlyexit.tasks.base import ValueArray

SIZE = 8
SHAPES = (((4, 8, 8),), ((6, 4, 4), (4, 8, 8)), ((8, 2, 2),), ((10,),))
"""The shapes of the tensors that cross the boundary after each block."""
PIXELS = TensorSpec(name="pixels", shape=(SIZE, SIZE, 3), dtype="uint8")


class Pixels(nn.Module):
    """Bytes (B, H, W, 3) to channels first, around 0."""

    def __init__(self) -> None:
        super().__init__()
        self.colours = nn.Conv2d(3, 4, kernel_size=1)

    def forward(self, pixels_BHWC: Tensor) -> Tensor:
        scaled = (pixels_BHWC.permute(0, 3, 1, 2).to(self.colours.weight.dtype) - 127.5) / 64
        result: Tensor = self.colours(scaled)
        return result


class Convolution(nn.Module):
    def __init__(self, before: int, after: int, stride: int = 1) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(before, after, kernel_size=3, padding=1, stride=stride)
        self.norm = nn.BatchNorm2d(after)

    def forward(self, hidden_BCHW: Tensor) -> Tensor:
        return torch.relu(self.norm(self.convolution(hidden_BCHW)))


class Fork(nn.Module):
    """Passes on what it was given, beside what it makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Convolution(4, 6, stride=2)

    def forward(self, hidden_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        return self.inner(hidden_BCHW), hidden_BCHW


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Convolution(6, 8, stride=2)
        self.skip = nn.Conv2d(4, 8, kernel_size=4, stride=4)

    def forward(self, hidden_BCHW: Tensor, before_BCHW: Tensor) -> Tensor:
        result: Tensor = self.inner(hidden_BCHW) + self.skip(before_BCHW)
        return result


class Flat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 10)

    def forward(self, hidden_BCHW: Tensor) -> Tensor:
        return torch.relu(self.linear(hidden_BCHW.flatten(1)))


def build(seed: int = 0) -> TensorBackbone:
    """Four blocks; the statistics of its norms are not those of a fresh one."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        blocks = [Convolution(4, 4), Fork(), Join(), Flat()]
        backbone = TensorBackbone(embed=Pixels(), blocks=blocks, inputs=(PIXELS,), config={"seed": seed})
        for module in backbone.modules():
            if isinstance(module, nn.BatchNorm2d):
                assert module.running_mean is not None
                assert module.running_var is not None
                nn.init.normal_(module.running_mean, std=0.1)
                nn.init.uniform_(module.running_var, 0.5, 2.0)
    return backbone


def pictures(count: int, *, seed: int = 0, side: int = SIZE) -> tuple[list[Encoded], ValueArray]:
    """Noise, brighter on its left (label 0) or on its right half (label 1)."""
    rng = np.random.default_rng(seed)
    labels = np.arange(count) % 2
    noise = rng.integers(0, 120, (count, 1, side, side, 3))
    for label, pixels in zip(labels, noise, strict=True):
        half = slice(side // 2, side) if label else slice(0, side // 2)
        pixels[:, :, half] += 135
    return [Encoded(1, (pixels.astype(np.uint8),)) for pixels in noise], labels
