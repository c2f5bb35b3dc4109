"""What a batch should take, on three blocks with two ramps."""

from __future__ import annotations

import numpy as np
import pytest

from earlyexit.split import Split
from optimizer.live.expected import batch_seconds
from profiles.table import LatencyTable

TABLE = LatencyTable(
    batches=(2, 4),
    block_s_NB=np.array([[0.010, 0.020], [0.030, 0.060], [0.010, 0.030]]),
    ramp_s_EB=np.array([[0.001, 0.003], [0.002, 0.004]]),
)
HALF_LEAVE_N = (1.0, 0.5, 0.25)


@pytest.mark.parametrize(
    ("split", "size", "seconds"),
    [
        pytest.param(Split(first=0, end=2, batch=4, ramps=(0,)), 4, 0.020 + 0.003 + 0.030, id="a full batch"),
        pytest.param(Split(first=0, end=2, batch=4, ramps=(0,)), 3, 0.015 + 0.002 + 0.030, id="one that is not full"),
        pytest.param(Split(first=1, end=3, batch=4, ramps=(1,)), 4, 0.060 + 0.004 + 0.010, id="the rest of the model"),
        pytest.param(Split(first=0, end=1, batch=4), 1, 0.010, id="below what was measured"),
    ],
)
def test_a_batch_shrinks_by_the_survival_expected(split: Split, size: int, seconds: float) -> None:
    assert batch_seconds(TABLE, (0, 1), split, size, HALF_LEAVE_N) == pytest.approx(seconds)
