from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from earlyexit.errors import DataError
from profiles.table import LatencyTable

ONE = np.array([[1.0, 2.0, 6.0]])
TABLE = LatencyTable(
    batches=(1, 2, 4), block_s_NB=np.array([[1.0, 2.0, 6.0], [3.0, 3.0, 3.0]]), ramp_s_EB=np.array([[0.1, 0.2, 0.4]])
)


def test_measured_batch_sizes_come_back_as_measured() -> None:
    assert TABLE.blocks_at(np.array([1.0, 2.0, 4.0])).tolist() == [[1, 2, 6], [3, 3, 3]]


def test_between_measured_batch_sizes_seconds_are_linear() -> None:
    assert TABLE.blocks_at(np.array([1.5, 3.0]))[0].tolist() == [1.5, 4]
    assert TABLE.ramps_at(np.array([3.0])).tolist() == pytest.approx(np.array([[0.3]]))


def test_below_the_smallest_batch_size_seconds_are_constant() -> None:
    assert TABLE.blocks_at(np.array([0.0, 0.25]))[0].tolist() == [1, 1]


def test_a_model_without_ramps_has_no_rows_of_ramps() -> None:
    table = LatencyTable(batches=(1, 2, 4), block_s_NB=ONE, ramp_s_EB=np.zeros((0, 3)))
    assert table.ramps_at(np.array([1.0, 3.0])).shape == (0, 2)


@pytest.mark.parametrize(
    ("batches", "block_s_NB", "ramp_s_EB", "message"),
    [
        pytest.param((), ONE, ONE, "batch sizes must ascend from at least 1, not []", id="no batch sizes"),
        pytest.param((0, 1, 2), ONE, ONE, "batch sizes must ascend from at least 1, not [0, 1, 2]", id="batch 0"),
        pytest.param((1, 4, 2), ONE, ONE, "batch sizes must ascend from at least 1, not [1, 4, 2]", id="not ascending"),
        pytest.param((1, 2, 2), ONE, ONE, "batch sizes must ascend from at least 1, not [1, 2, 2]", id="twice"),
        pytest.param((1, 2), ONE, ONE, "block_s needs 2 values a row, one per batch size", id="too many values"),
        pytest.param((1, 2, 4), ONE, ONE[:, :2], "ramp_s needs 3 values a row, one per batch size", id="too few"),
        pytest.param((1, 2, 4), ONE[0], ONE, "block_s needs 3 values a row, one per batch size", id="one row, flat"),
        pytest.param((1, 2, 4), -ONE, ONE, "block_s must hold seconds: finite numbers, none below 0", id="negative"),
        pytest.param((1, 2, 4), ONE, ONE * np.nan, "ramp_s must hold seconds: finite numbers, none below 0", id="nan"),
        pytest.param((1, 2, 4), ONE, ONE * np.inf, "ramp_s must hold seconds: finite numbers, none below 0", id="inf"),
    ],
)
def test_a_table_that_contradicts_itself_is_refused(
    batches: tuple[int, ...], block_s_NB: npt.NDArray[np.float64], ramp_s_EB: npt.NDArray[np.float64], message: str
) -> None:
    with pytest.raises(DataError) as refused:
        LatencyTable(batches=batches, block_s_NB=block_s_NB, ramp_s_EB=ramp_s_EB)
    assert str(refused.value) == message
