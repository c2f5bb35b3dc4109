from __future__ import annotations

import numpy as np
import pytest
import torch

from earlyexit.errors import ModelFolderError
from earlyexit.network.piece import Layout
from earlyexit.ramps import build_ramp
from earlyexit.ramps.pooling import Pooling, pool, pooled_size


def single(count: int) -> Layout:
    """The layout of inputs that have no tokens."""
    return Layout(np.ones(count, dtype=np.int32))


def test_the_mean_of_a_map_is_taken_per_channel() -> None:
    maps_BCHW = torch.tensor([[[[1.0, 2.0], [3.0, 6.0]], [[0.0, 0.0], [0.0, 4.0]]]])
    assert pool(maps_BCHW, single(1), "mean").tolist() == [[3.0, 1.0]]


def test_a_grid_holds_the_mean_of_every_cell() -> None:
    maps_BCHW = torch.arange(64.0).view(1, 1, 8, 8)
    # The first cell has rows 0 and 1, columns 0 and 1: 0, 1, 8, 9. A cell to the right is 2 more, one below 16.
    expected = [4.5 + 2 * column + 16 * row for row in range(4) for column in range(4)]
    assert pool(maps_BCHW, single(1), "grid").tolist() == [expected]


def test_a_map_with_fewer_places_than_cells_is_its_own_grid() -> None:
    maps_BCL = torch.tensor([[[1.0, 2.0, 3.0]], [[4.0, 5.0, 6.0]]])
    assert pool(maps_BCL, single(2), "grid").tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]


def test_tokens_that_are_maps_are_pooled_before_their_maps() -> None:
    layout = Layout(np.array([2, 1], dtype=np.int32))
    rows_NCL = torch.tensor([[[1.0, 3.0]], [[5.0, 7.0]], [[2.0, 4.0]]])
    assert pool(rows_NCL, layout, "mean").tolist() == [[4.0], [3.0]]
    assert pool(rows_NCL, layout, "grid").tolist() == [[3.0, 5.0], [2.0, 4.0]]


@pytest.mark.parametrize(
    ("row", "pooling"),
    [
        ((6,), "mean"),
        ((6,), "first"),
        ((6,), "grid"),
        ((6, 9), "mean"),
        ((6, 9), "grid"),
        ((6, 9, 3), "grid"),
        ((2, 4, 5, 6), "grid"),
    ],
    ids=str,
)
def test_the_size_is_that_of_what_is_pooled(row: tuple[int, ...], pooling: Pooling) -> None:
    assert pool(torch.zeros(2, *row), single(2), pooling).shape == (2, pooled_size(row, pooling))


def test_maps_that_a_network_gives_itself_are_taken_as_they_are() -> None:
    maps_BCHW = torch.randn(2, 3, 8, 8)
    assert build_ramp("given", (3, 8, 8), (3, 8, 8), "mean")(maps_BCHW, single(2)).equal(maps_BCHW)
    with pytest.raises(ModelFolderError, match="the network gives 3 maps of 8 x 8, the task has 3 maps of 4 x 4"):
        build_ramp("given", (3, 8, 8), (3, 4, 4), "mean")
