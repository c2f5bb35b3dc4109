"""PAME's figure 18, and the saturated device that it is simulated on."""

from __future__ import annotations

import numpy as np
import pytest

from earlyexit.network.split import Split
from experiments.studies import overlapping
from experiments.studies.overlapping import Device
from profiles.records import ExitRecords
from profiles.table import LatencyTable
from simulator.inputs import ByRamp

# A block takes 1 s for up to two inputs, 2 s for four; no time for the exit after block 0.
TABLE = LatencyTable(
    batches=(1, 2, 4), block_s_NB=np.tile(np.array([[1.0, 1.0, 2.0]]), (4, 1)), ramp_s_EB=np.zeros((1, 3))
)
LEAVES, STAYS = 0, 1
DECISIONS = ByRamp(ramps=(0,), sure_NR=np.array([[True], [False]]))


@pytest.mark.parametrize(
    ("below", "latencies_s", "seconds", "alone"),
    [
        pytest.param(None, [1.0, 4.0, 1.0, 4.0], 8.0, 1.0, id="one at a time"),
        # From 1 s on there are one and two inputs, 1.5 s a block as of three; from 2.5 s on one and one.
        pytest.param(2, [1.0, 4.5, 1.5, 4.5], 5.5, 0.0, id="beside one input"),
    ],
)
def test_a_saturated_device_by_hand(below: int | None, latencies_s: list[float], seconds: float, alone: float) -> None:
    split = Split(first=0, end=4, batch=2, ramps=(0,), overlap_below=below)
    ran = Device((split,), TABLE, DECISIONS, np.array([LEAVES, STAYS, LEAVES, STAYS])).run()
    assert ran.latency_s_N.tolist() == pytest.approx(latencies_s)
    assert [ran.seconds, ran.alone_share] == pytest.approx([seconds, alone])
    assert ran.late_share(4.0) == (0.0 if below is None else 0.5)


def test_survivors_that_are_fused_wait_for_others() -> None:
    splits = (Split(first=0, end=1, batch=2, ramps=(0,)), Split(first=1, end=4, batch=2))
    ran = Device(splits, TABLE, DECISIONS, np.array([LEAVES, STAYS, LEAVES, STAYS])).run()
    assert ran.latency_s_N.tolist() == [1.0, 5.0, 1.0, 4.0]
    assert ran.per_s == 4 / 5


def test_an_exit_lets_out_as_many_as_keep_the_agreement() -> None:
    labels_NE = np.zeros((200, 2), dtype=np.int64)
    labels_NE[[50, 100, 150], 0] = 1  # by falling score: the 51st, 101st and 151st are wrong, two of 200 may be
    records = ExitRecords.of_answers(
        labels_NE,
        score="confidence",
        num_blocks=2,
        ramps=(0,),
        sample_ids=tuple(map(str, range(200))),
        scores_NR=np.linspace(1.0, 0.1, 200, dtype=np.float32)[:, None],
    )
    assert overlapping.surest(records).sure_NR[:, 0].tolist() == [True] * 150 + [False] * 50


def test_rate_latency_and_lateness_grow_with_the_threshold() -> None:
    (case,) = overlapping.cases("quick")
    ramp, rows = overlapping.rows_of(case, 16)
    assert ramp in case.decisions.ramps
    bounded = [row for row in rows if row.below is not None]
    for figure in ("times_stock", "mean", "late"):
        values = [getattr(row, figure) for row in bounded]
        assert values == sorted(values), figure
        assert values[-1] > values[0], figure
    assert bounded[0].alone == 1.0
