"""What networks over images begin with. Tensor legend: B images, H rows, W columns, C channels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

IMAGENET_MEAN = (0.485, 0.456, 0.406)
"""Of red, green and blue from 0 to 1, over ImageNet. The usual CIFAR checkpoints were trained with them too."""
IMAGENET_STD = (0.229, 0.224, 0.225)


class NormalisedPixels(nn.Module):
    """Bytes as an image codec gives them, to channels first, normalised."""

    mean_C11: Tensor
    std_C11: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        # Not among the saved weights: on the host even where those are left out at first.
        self.register_buffer("mean_C11", _bytes(mean), persistent=False)
        self.register_buffer("std_C11", _bytes(std), persistent=False)

    def forward(self, images_BHWC: Tensor) -> Tensor:
        """Pixels from 0 to 255, (B, H, W, C), to (B, C, H, W)."""
        pixels_BCHW = images_BHWC.permute(0, 3, 1, 2).to(self.mean_C11.dtype)
        return (pixels_BCHW - self.mean_C11) / self.std_C11


def _bytes(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, device="cpu")[:, None, None] * 255


def halved(sides: Sequence[int], times: int) -> tuple[int, ...]:
    """What strides of 2 with padding leave of height and width: halves, rounded up."""
    return tuple(-(-side // 2**times) for side in sides)
