"""How an exit head makes one vector of an input's hidden state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor

from earlyexit.errors import ModelFolderError
from earlyexit.layout import Layout

Pooling = Literal["mean", "first", "grid"]
"""`mean` of an input's tokens, or of its map; its `first` token; `grid`, the means of a map's cells, else the mean."""
CELLS = 4
"""Of a grid, along each side of a map. Measured, ResNet-20 on CIFAR-10 with linear ramps, budget 1 %: the mean of the
whole map 8.1 of 9 blocks, 2 x 2 cells 7.7, 4 x 4 cells 7.3, 8 x 8 cells 7.5."""
ADAPTIVE: dict[int, Callable[..., Any]] = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}


def pooled_size(row: Sequence[int], pooling: Pooling) -> int:
    """Length of the vector that `pool` makes of rows of this shape: (D,), or a map's channels and sides, (C, H, W).

    Raises ModelFolderError where it makes none.
    """
    channels, *sides = row
    if sides and (pooling == "first" or len(sides) > max(ADAPTIVE)):
        raise ModelFolderError(
            f"a hidden state of the shape {list(row)} is not pooled by {pooling!r}; a map is by grid"
        )
    return channels * prod(_cells(sides)) if pooling == "grid" else channels


def pool(hidden: Tensor, layout: Layout, pooling: Pooling) -> Tensor:
    """One vector per input, (B, D), of packed rows (N, D) or of maps (N, C, H, W)."""
    rows = hidden if layout.single else _pool_tokens(hidden, layout, pooling)
    return rows if rows.ndim == 2 else _pool_maps(rows, pooling)


def _pool_tokens(hidden: Tensor, layout: Layout, pooling: Pooling) -> Tensor:
    if pooling == "first":
        return hidden[layout.first_token_B]
    # Over the padded form, in float32: bfloat16 stops counting at 256, and adding scattered rows is a race in ONNX
    # Runtime (measured: one input in a few batches got a neighbour's sum) and unordered on a GPU.
    sums = layout.pad(hidden.float()).sum(1)
    return (sums / layout.lengths_B1.view(-1, *[1] * (hidden.ndim - 1))).to(hidden.dtype)


def _pool_maps(maps_BCHW: Tensor, pooling: Pooling) -> Tensor:
    sides = maps_BCHW.shape[2:]
    values = maps_BCHW.float()
    means = ADAPTIVE[len(sides)](values, _cells(sides)) if pooling == "grid" else values.flatten(2).mean(2)
    pooled_BD: Tensor = means.flatten(1).to(maps_BCHW.dtype)
    return pooled_BD


def _cells(sides: Sequence[int]) -> list[int]:
    return [min(CELLS, side) for side in sides]
