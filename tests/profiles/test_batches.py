from __future__ import annotations

import numpy as np

from profiles.records import ExitRecords, RecordedBatches
from tests.exit_records import exit_records

SURE = [[1, 1], [0, 1], [0, 0], [1, 0], [0, 1], [0, 0], [1, 1]]
"""Seven inputs, two ramps; the fourth is let out by the earlier ramp only."""


def batches(size: int = 3, sure: list[list[int]] = SURE) -> RecordedBatches:
    sure_NR = np.array(sure, dtype=bool)
    losses_NR = np.zeros(sure_NR.shape)
    losses_NR[1, 1] = losses_NR[3, 0] = 1.0
    return RecordedBatches(num_blocks=4, ramps=(0, 2), sure_NR=sure_NR, losses_NR=losses_NR, size=size)


def test_every_batch_counts_who_is_left_and_records_become_batches_of_some_ramps_in_their_order() -> None:
    both = batches().remaining((0, 2)).tolist()
    assert both == [[2, 1], [2, 1]]  # the seventh input is in no whole batch
    as_kept = RecordedBatches.of_records(records(), {0: 0.5, 1: 0.5}, 1)
    assert as_kept.remaining((0, 1)).tolist() == [[0, 0], [1, 0], [1, 1]]
    assert as_kept.losses_NR.tolist() == [[1, 0], [0, 1], [0, 0]]  # a ramp that is not sure costs nothing
    backwards = RecordedBatches.of_records(records([3.0, 2.0, 1.0]), {0: 0.5, 1: 0.5}, 1)
    assert backwards.remaining((0,)).tolist() == [[1], [1], [0]]
    one = RecordedBatches.of_records(records(), {0: 0.5, 1: 0.5}, 3, (1,))
    assert (one.ramps, one.remaining((1,)).tolist()) == ((1,), [[1]])
    assert RecordedBatches.of_records(records(), {1: 0.5}, 3).ramps == (1,)
    thresholds = {0: 0.5, 1: 0.5}
    of = RecordedBatches.of_records(records(), thresholds, 3)
    for active in ((), (0,), (1,), (0, 1)):
        outcome = records().outcome({ramp: thresholds[ramp] for ramp in active})
        assert of.exits_N(active).tolist() == outcome.exits_N.tolist()


def records(times: list[float] | None = None) -> ExitRecords:
    times_s_N = None if times is None else np.array(times)
    return exit_records([[0.9, 0.9], [0.1, 0.9], [0.1, 0.2]], [[1, 0], [1, 1], [1, 0]], times_s_N=times_s_N)
