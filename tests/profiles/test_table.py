from __future__ import annotations

import numpy as np
import pytest

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
