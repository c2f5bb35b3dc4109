from __future__ import annotations

import numpy as np
import pytest

from earlyexit.split import Split
from experiments.planning.profile_check import Checked, all_splits, check, error_figures, grouped, predicted_s
from profiles.latency import LatencyProfile
from profiles.measure import Point, TimedSplit
from profiles.table import LatencyTable

TABLE = LatencyTable(
    batches=(1, 2),
    block_s_NB=np.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
    ramp_s_EB=np.array([[0.25, 0.5], [0.75, 1.0]]),
)
PROFILE = LatencyProfile(
    model="m",
    num_blocks=3,
    ramps=(0, 1),
    device="cpu",
    backend="torch",
    dtype="float32",
    kind="measured",
    tables={8: TABLE},
    provenance={},
)


def checked(measured: float, predicted: float, end: int = 1) -> Checked:
    return Checked(split=Split(first=0, end=end, batch=1), measured_s=measured, predicted_s=predicted)


def test_every_split_is_checked_without_ramps_and_with_all_of_its_own() -> None:
    found = [(split.first, split.end, split.ramps) for split in all_splits(3, (1,), [4])]
    assert found == [
        *((0, 1, ()), (0, 2, ()), (0, 2, (1,)), (0, 3, ()), (0, 3, (1,))),
        *((1, 2, ()), (1, 2, (1,)), (1, 3, ()), (1, 3, (1,)), (2, 3, ())),
    ]


@pytest.mark.parametrize(
    ("split", "seconds"),
    [
        pytest.param(Split(first=0, end=2, batch=1), 1 + 3, id="two blocks"),
        pytest.param(Split(first=1, end=3, batch=2, ramps=(1,)), 4 + 6 + 1, id="two blocks and the ramp between"),
        pytest.param(Split(first=0, end=3, batch=2, ramps=(0, 1)), 2 + 4 + 6 + 0.5 + 1, id="everything"),
    ],
)
def test_a_prediction_is_the_sum_of_blocks_and_active_ramps(split: Split, seconds: float) -> None:
    assert predicted_s(TABLE, (0, 1), split) == seconds


def test_a_point_is_checked_against_its_median() -> None:
    point = Point(timed=TimedSplit(split=Split(first=0, end=2, batch=1), length=8), seconds=(5.0, 4.0, 9.0))
    (each,) = check(PROFILE, [point])
    assert (each.measured_s, each.predicted_s) == (5.0, 4.0)
    assert each.error == pytest.approx(-0.2)


def test_figures_are_of_the_sizes_of_errors_and_name_the_worst() -> None:
    figures = error_figures([checked(1.0, 1.25), checked(2.0, 1.0, end=2), checked(4.0, 4.0, end=3)])
    # Errors +25 %, -50 %, 0 %.
    assert (figures["splits"], figures["median"], figures["worst"], figures["bias"]) == (3, 0.25, 0.5, 0.0)
    assert figures["worst_split"] == "blocks 0-1, batch 1, 0 ramps"


def test_groups_are_by_ramps_batch_and_number_of_blocks() -> None:
    groups = grouped([checked(1.0, 1.0), checked(2.0, 2.0, end=2)])
    assert {name: len(group) for name, group in groups.items()} == {
        "all": 2,
        "no ramp": 2,
        "batch 1": 2,
        "1 blocks": 1,
        "2 blocks": 1,
    }
