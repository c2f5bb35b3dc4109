from __future__ import annotations

import numpy as np
import pytest

from experiments.drift import Kinds
from experiments.forecasts import HISTORY, TWO_SWITCHES, Batches, Workload, figure_21_cuts
from experiments.studies.fig21_forecast import Errors, compare, errors
from experiments.studies.kit import Lines

KINDS = Kinds(easy_K=np.array([0.8, 0.2, 0.0]), hard_K=np.array([0.0, 0.2, 0.8]))
"""Half of each: 1, 0.6 and 0.4 of the inputs reach the three blocks."""
STEADY = Workload(name="steady", easy_W=lambda _: np.full(HISTORY + 10, 0.5), drifts=False)


def test_cuts_are_where_a_third_and_a_half_have_left() -> None:
    assert figure_21_cuts(KINDS) == [1, 2]


def test_errors_are_in_inputs_of_the_batch() -> None:
    found = Batches(
        forecast_WC=np.array([[4.0, 2.0], [4.0, 2.0]]),
        last_WC=np.array([[5.0, 2.0], [4.0, 2.0]]),
        true_WC=np.array([[4.5, 2.5], [4.0, 2.0]]),
    )
    assert errors([found]) == Errors(forecast=0.25, last=0.25)


def test_what_does_not_change_is_forecast_and_a_switch_is_not() -> None:
    result = compare(KINDS, [STEADY, TWO_SWITCHES], "quick")
    told = result.figures["errors"]["probes"]
    # From 240 probes a share scatters by 0.03, so a batch of 8 by 0.25; the history takes most of it off.
    assert told["steady"]["forecast"] < 0.15 < told["two switches in ten"]["forecast"]
    usual, last, worst = result.comparisons
    assert usual.ours == pytest.approx(told["steady"]["forecast"])
    assert last.ours == pytest.approx(told["steady"]["last"])
    assert worst.name == "worst workload (two switches in ten), probes"


def test_the_picture_has_forecast_and_truth_at_both_cuts() -> None:
    (picture,) = compare(KINDS, [TWO_SWITCHES], "quick").pictures
    assert isinstance(picture, Lines)
    assert len(picture.x) == 10
    actual = picture.series["before block 1: actual"]
    # 80:20 four times, then 50:50: 8 * (1 - 0.8 * 0.8) and 8 * 0.6 inputs are left.
    assert actual[0] == pytest.approx(2.88, abs=0.1)
    assert actual[5] == pytest.approx(4.8, abs=0.1)
