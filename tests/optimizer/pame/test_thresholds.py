from __future__ import annotations

import numpy as np
import pytest

from optimizer.pame.checks import (
    GRIDS,
    TEN_CONFIDENCES,
    Configured,
    SearchedChecks,
    configured,
    next_step,
    normalised,
)
from profiles.records import ExitRecords
from profiles.scores import SCORES, Score
from tests.exit_records import exit_records

EVERYBODY = np.ones(10, dtype=bool)


def records(*, score: Score = "confidence", shift: float = 0.0, truth: bool = False) -> ExitRecords:
    """Ten inputs, surer one by one: 0.52 to 0.97; the ramp errs on the three that it is least sure of."""
    scores_N1 = (0.52 + 0.05 * np.arange(10) - shift).reshape(-1, 1).astype(np.float32)
    losses_N1 = (np.arange(10) < 3).astype(np.float64).reshape(-1, 1)
    true_losses_NE = np.column_stack([np.zeros(10), np.arange(10) == 9]).astype(np.float64) if truth else None
    scores_N1 = 1 - scores_N1 if score == "entropy" else scores_N1
    return exit_records(scores_N1, losses_N1, score=score, num_blocks=3, true_losses_NE=true_losses_NE)


def chosen(checks: SearchedChecks, kept: float) -> Configured:
    least = kept * (1 - float(checks.end_losses_N.mean()))
    found = configured(checks, 0, EVERYBODY, checks.end_losses_N, least)
    assert found is not None
    return found


@pytest.mark.parametrize(("kept", "threshold", "leaving"), [(0.95, 0.65, 0.7), (0.85, 0.6, 0.8), (0.6, 0.5, 1.0)])
def test_the_threshold_by_which_most_leave_keeps_the_precision(kept: float, threshold: float, leaving: float) -> None:
    """Of ten inputs: 0.50 lets all leave, and three are wrong."""
    found = chosen(SearchedChecks.of(records()), kept)
    assert found.setting.threshold == threshold
    assert found.leaving == pytest.approx(leaving)
    assert found.overall > kept


def test_every_score_has_a_grid_from_bold_to_careful() -> None:
    assert len(TEN_CONFIDENCES) == 10
    assert GRIDS.keys() == SCORES.keys()
    for score, grid in GRIDS.items():
        sureness = [SCORES[score].direction * value for value in grid]
        assert sureness == sorted(set(sureness))


@pytest.mark.parametrize("score", ["confidence", "entropy"])
def test_the_whole_grid_of_a_score_is_tried_and_fewer_leave_at_each_step(score: Score) -> None:
    settings = SearchedChecks.of(records(score=score)).settings(0)
    assert tuple(setting.threshold for setting in settings) == GRIDS[score]
    leaving = [int(setting.leave_N.sum()) for setting in settings]
    assert leaving == sorted(leaving, reverse=True)


@pytest.mark.parametrize(
    ("score", "threshold", "step"),
    [("confidence", 0.55, 0.6), ("confidence", 0.57, 0.6), ("confidence", 0.999, None), ("entropy", 0.3, 0.2)],
)
def test_a_threshold_goes_up_by_a_step_of_the_grid(score: Score, threshold: float, step: float | None) -> None:
    assert next_step(score, threshold) == step


def test_precision_is_of_the_truth_where_it_is_known() -> None:
    # Of ten answers three are not the full model's; all ten are right, and of the full model's nine.
    assert normalised(records().outcome({0: 0.5})) == pytest.approx(0.7)
    assert normalised(records(truth=True).outcome({0: 0.5})) == pytest.approx(1 / 0.9)
    found = chosen(SearchedChecks.of(records(truth=True), by_truth=True), 0.99)
    assert (found.leaving, found.overall) == (1.0, 1.0)  # the full model errs on one of ten


def test_of_several_confidences_the_best_pair_is_taken_or_none() -> None:
    always_wrong = records()
    always_wrong.losses_NR[:] = 1.0
    checks = SearchedChecks.of(always_wrong, grid=TEN_CONFIDENCES)  # some inputs leave at each
    assert configured(checks, 0, EVERYBODY, checks.end_losses_N, 0.99) is None
    checks = SearchedChecks(by_confidence={0.5: records(), 0.9: records(shift=0.2)}, grid=(0.65,))
    assert [(each.confidence, int(each.leave_N.sum())) for each in checks.settings(0)] == [(0.5, 7), (0.9, 3)]
    assert chosen(checks, 0.95).setting.confidence == 0.5
