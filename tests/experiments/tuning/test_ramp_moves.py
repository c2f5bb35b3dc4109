from __future__ import annotations

import numpy as np

from experiments.tuning.ramp_moves import compared, times_of
from experiments.tuning.threshold_search import drawn_records
from optimizer.live.best_ramps import greedily


def test_planned_ramps_save_no_less_than_those_that_the_mover_ends_with() -> None:
    records = drawn_records(6, num_ramps=6, number=400)
    times = times_of(records)
    period, later = records.subset(np.arange(200)), records.subset(np.arange(200, 400))
    planned, last, best, begun = compared(period, later, times, greedily(times, 0.02))
    assert planned.saved >= max(last.saved, best.saved, begun.saved)
    assert best.saved >= last.saved or not best.ramps
    assert last.rounds >= 1
    assert all(times.overhead(each.ramps) <= 0.02 for each in (planned, last, best, begun))
