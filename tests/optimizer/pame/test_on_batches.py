from __future__ import annotations

import numpy as np
import pytest

from optimizer.pame.batches import Batching, batch_times, seconds_of
from profiles.table import LatencyTable

TABLE = LatencyTable(
    batches=(1, 2, 4), block_s_NB=np.array([[1.0, 2.0, 4.0]] * 3), ramp_s_EB=np.array([[0.5, 1.0, 2.0]] * 2)
)
"""A block takes a second per input, a ramp half of one."""
SECONDS = seconds_of(TABLE, (0, 1))


def test_every_batch_takes_what_its_own_inputs_take() -> None:
    times = batch_times(SECONDS, (0, 1), np.array([[2, 1], [0, 0]]), 4)
    # The first: two after 6 s, one after 6 + 3 s, one after 1 s more. The second: all four after 6 s.
    assert times.last_s_K.tolist() == [10, 6]
    assert times.mean_s == pytest.approx((2 * 6 + 9 + 10 + 4 * 6) / 8)
    assert (times.whole_s, times.tail_s, times.slower) == (12, 8, 0)


def test_without_exits_everybody_waits_for_the_end() -> None:
    times = batch_times(SECONDS, (), np.zeros((3, 0), dtype=np.int64), 4)
    assert (times.mean_s, times.tail_s, times.slower) == (12, 12, 0)


def test_a_batch_that_nobody_leaves_is_slower() -> None:
    times = batch_times(SECONDS, (0,), np.array([[4], [3]]), 4)
    assert times.last_s_K.tolist() == [14, 12]
    assert times.slower == 0.5


def test_inputs_are_cut_into_whole_batches_in_order_of_arrival() -> None:
    exits_N = np.array([0, 1, 0, 2, 0, 0, 0, 0, 2])  # the last is in no batch
    times = Batching(seconds=SECONDS, size=4).times(exits_N, {1, 0})
    assert times.last_s_K.tolist() == [10, 6]
    assert times.mean_s == pytest.approx((2 * 6 + 9 + 10 + 4 * 6) / 8)
