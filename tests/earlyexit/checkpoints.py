"""State dicts of random weights, named as published checkpoints name them."""

from __future__ import annotations

import torch
from torch import Tensor


def resnet_state(*, blocks_per_stage: int, seed: int = 0) -> dict[str, Tensor]:
    """A CIFAR ResNet's, of ten classes; norms as if it had been trained."""
    generator = torch.Generator().manual_seed(seed)
    state = _convolution("conv1", 3, 16, generator) | _norm("bn1", 16, generator)
    width = 16
    for stage in (1, 2, 3):
        for block in range(blocks_per_stage):
            out, name = 8 * 2**stage, f"layer{stage}.{block}"
            state |= _convolution(f"{name}.conv1", width, out, generator) | _norm(f"{name}.bn1", out, generator)
            state |= _convolution(f"{name}.conv2", out, out, generator) | _norm(f"{name}.bn2", out, generator)
            width = out
    linear = {"linear.weight": (10, width), "linear.bias": (10,)}
    return state | {name: torch.randn(shape, generator=generator) for name, shape in linear.items()}


def _convolution(name: str, width: int, out: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {f"{name}.weight": torch.randn(out, width, 3, 3, generator=generator) * (2 / (9 * width)) ** 0.5}


def _norm(name: str, width: int, generator: torch.Generator) -> dict[str, Tensor]:
    return {
        f"{name}.weight": 0.5 + torch.rand(width, generator=generator),
        f"{name}.bias": 0.2 * torch.randn(width, generator=generator),
        f"{name}.running_mean": 0.2 * torch.randn(width, generator=generator),
        f"{name}.running_var": 0.5 + torch.rand(width, generator=generator),
    }
