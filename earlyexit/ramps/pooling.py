"""Pooling of an input's hidden state to one vector. Importing it does not import torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Literal

from earlyexit.errors import ModelFolderError

if TYPE_CHECKING:
    from torch import Tensor

    from earlyexit.network.piece import Layout

CELLS = 4
"""Cells of a grid along each side of a map. ResNet-20 on CIFAR-10 with linear ramps, budget 1 %: with the mean of the
whole map inputs run 8.1 of 9 blocks, with 2 x 2 cells 7.7, 4 x 4 cells 7.3, and 8 x 8 cells 7.5."""
MOST_SIDES = 3
"""Most dimensions of a map that torch can divide into cells."""


def _mean_of_tokens(hidden: Tensor, layout: Layout) -> Tensor:
    # Over the padded form, in float32: bfloat16 stops counting at 256, and adding scattered rows is a race in ONNX
    # Runtime (measured: one input in a few batches got a neighbour's sum) and unordered on a GPU.
    sums = layout.pad(hidden.float()).sum(1)
    return (sums / layout.lengths_B1.view(-1, *[1] * (hidden.ndim - 1))).to(hidden.dtype)


def _means_of_cells(values_BCHW: Tensor) -> Tensor:
    from torch.nn import functional

    sides = values_BCHW.shape[2:]
    means: Tensor = getattr(functional, f"adaptive_avg_pool{len(sides)}d")(values_BCHW, _cells(sides))
    return means


@dataclass(frozen=True, slots=True)
class _Kind:
    of_tokens: Callable[[Tensor, Layout], Tensor]
    """From packed rows to one row per input."""
    of_map: Callable[[Tensor], Tensor] | None = None
    """From a float32 map to its numbers; None if it does not pool maps."""
    in_cells: bool = False
    """Whether a map gives a number per channel and cell rather than per channel."""


def _cells(sides: Sequence[int]) -> list[int]:
    return [min(CELLS, side) for side in sides]


# The mean of an input's tokens or map; its first token; its last token, for decoders; the means of a map's cells, or of
# its tokens.
POOLINGS = {
    "mean": _Kind(_mean_of_tokens, lambda values_BCHW: values_BCHW.flatten(2).mean(2)),
    "first": _Kind(lambda hidden, layout: hidden[layout.first_token_B]),
    "last": _Kind(lambda hidden, layout: hidden[layout.last_token_B]),
    "grid": _Kind(_mean_of_tokens, _means_of_cells, in_cells=True),
}
if TYPE_CHECKING:
    Pooling = str
else:  # what reads files refuses other names, and lists these
    Pooling = Literal[tuple(POOLINGS)]


def pooled_size(row: Sequence[int], pooling: Pooling) -> int:
    """Returns the length of the vector that pooling makes of rows of this shape: (D,), or (C, H, W) for a map.

    Raises ModelFolderError if the pooling does not apply to such rows.
    """
    channels, *sides = row
    if sides and (POOLINGS[pooling].of_map is None or len(sides) > MOST_SIDES):
        raise ModelFolderError(
            f"a hidden state of the shape {list(row)} is not pooled by {pooling!r}; a map is by grid"
        )
    return channels * prod(_cells(sides)) if POOLINGS[pooling].in_cells else channels


def of_inputs(hidden: Tensor, layout: Layout, pooling: Pooling) -> Tensor:
    """Returns one row per input, (B, ...), from packed rows (N, ...)."""
    return hidden if layout.per_input(hidden) else POOLINGS[pooling].of_tokens(hidden, layout)


def pool_maps(maps: Tensor, pooling: Pooling) -> Tensor:
    """Returns one vector per map, (B, D), from maps (B, C, ...)."""
    of_map = POOLINGS[pooling].of_map
    assert of_map is not None
    return of_map(maps.float()).flatten(1).to(maps.dtype)


def halved(sides: Sequence[int], times: int) -> tuple[int, ...]:
    """Returns height and width after `times` strides of 2 with padding: halves, rounded up."""
    return tuple(-(-side // 2**times) for side in sides)
