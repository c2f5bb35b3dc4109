"""Pooling of an input's hidden state to one vector. This module does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING, Literal

from earlyexit.errors import ModelFolderError

if TYPE_CHECKING:
    from torch import Tensor

    from earlyexit.network.piece import Layout

CELLS = 4
"""Grid cells along each side of a map. Of 1, 2, 4 and 8, 4 gave the fewest mean blocks (ResNet-20 on CIFAR-10)."""
MOST_SIDES = 3
"""Maximum number of spatial dimensions of torch's adaptive pooling."""


def _mean_of_tokens(hidden: Tensor, layout: Layout) -> Tensor:
    # In float32, because sums in bfloat16 lose small terms. Over the padded form, because scatter-add is a data race in
    # ONNX Runtime (inputs got sums of others) and not deterministic on a GPU.
    sums = layout.pad(hidden.float()).sum(1)
    return (sums / layout.lengths_B1.view(-1, *[1] * (hidden.ndim - 1))).to(hidden.dtype)


def _means_of_cells(values_BCHW: Tensor) -> Tensor:
    from torch.nn import functional

    sides = values_BCHW.shape[2:]
    means: Tensor = getattr(functional, f"adaptive_avg_pool{len(sides)}d")(values_BCHW, _cells(sides))
    return means


def _cells(sides: Sequence[int]) -> list[int]:
    return [min(CELLS, side) for side in sides]


# mean: of an input's tokens or map. first, last: its first or last token. grid: means of a map's cells, or of tokens.
POOLINGS: dict[str, Callable[[Tensor, Layout], Tensor]] = {
    "mean": _mean_of_tokens,
    "first": lambda hidden, layout: hidden[layout.first_token_B],
    "last": lambda hidden, layout: hidden[layout.last_token_B],
    "grid": _mean_of_tokens,
}
"""Functions that pool packed rows to one row per input."""
OF_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda values_BCHW: values_BCHW.flatten(2).mean(2),
    "grid": _means_of_cells,
    "first": lambda values_BTD: values_BTD[:, 0],
    "last": lambda values_BTD: values_BTD[:, -1],
}
"""Functions that pool float32 maps, for poolings that apply to maps. A grid has a result per channel and cell."""
if TYPE_CHECKING:
    Pooling = str
else:  # at run time, so that pydantic checks names in files against the table
    Pooling = Literal[tuple(POOLINGS)]


def pooled_size(row: Sequence[int], pooling: Pooling) -> int:
    """Returns the length of the pooled vector. `row`: the shape of a hidden state's rows, (D,), or (C, H, W) for a map.

    Raises ModelFolderError if the pooling does not apply to this shape.
    """
    channels, *sides = row
    if len(sides) == 1 and pooling in ("first", "last"):
        return sides[0]  # of rows of tokens, as in vision transformers
    if sides and (pooling in ("first", "last") or len(sides) > MOST_SIDES):
        raise ModelFolderError(
            f"a hidden state of the shape {list(row)} cannot be pooled by {pooling!r}; use grid for maps"
        )
    return channels * prod(_cells(sides)) if pooling == "grid" else channels


def pool_maps(maps: Tensor, pooling: Pooling) -> Tensor:
    """Returns one vector per map, (B, D), from maps (B, C, ...)."""
    return OF_MAPS[pooling](maps.float()).flatten(1).to(maps.dtype)


def halved(sides: Sequence[int], times: int) -> tuple[int, ...]:
    """Returns height and width after `times` layers of stride 2 with padding, which round odd sides up."""
    return tuple(-(-side // 2**times) for side in sides)
