"""Batches of two by hand: how long they take, and where one exit should be."""

from __future__ import annotations

import numpy as np
import pytest

from earlyexit.errors import DataError
from optimizer.live.exit_mover import GRIDS, BatchTimes, best_place, next_step, normalised_precision, place_at
from profiles.records import ExitRecords
from profiles.scores import SCORES
from profiles.table import LatencyTable

# A block takes 2 s for one input and 3 s for two; a ramp 0.5 s for one and 1 s for two. Without exits: 3 * 3 = 9 s.
TIMES = BatchTimes(
    table=LatencyTable.of_rows((1, 2), [[2.0, 3.0]] * 3, [[0.5, 1.0]] * 2),
    ramps=(0, 1),
    batch=2,
)
EASY, HARD = (0.97, 0.97), (0.1, 0.97)


def records(
    scores: list[tuple[float, float]],
    wrong: list[tuple[int, int]] | None = None,
    truly_wrong: list[tuple[int, int, int]] | None = None,
) -> ExitRecords:
    """Ramps after blocks 0 and 1 of a model of three."""
    return ExitRecords(
        score="confidence",
        num_blocks=3,
        ramps=(0, 1),
        sample_ids=tuple(map(str, range(len(scores)))),
        scores_NR=np.array(scores, dtype=np.float32),
        losses_NR=np.zeros((len(scores), 2)) if wrong is None else np.array(wrong, dtype=np.float64),
        true_losses_NE=None if truly_wrong is None else np.array(truly_wrong, dtype=np.float64),
    )


def test_the_inference_time_matrix_is_a_row_per_exit_and_a_column_per_number_that_moves_on() -> None:
    assert TIMES.stock_s == 9.0
    # Both run block 0 and its ramp: 4 s; then nobody, one, or both run two blocks more.
    assert TIMES.inference_s_J(0).tolist() == [4.0, 8.0, 10.0]
    assert TIMES.inference_s_J(1).tolist() == [7.0, 9.0, 10.0]


def test_a_batch_that_moves_on_whole_is_slower_than_without_exits() -> None:
    batches = np.array([[0, 0], [0, 2], [2, 2]])
    assert TIMES.slowest_s_K(batches, [0]).tolist() == [4.0, 8.0, 10.0]
    assert TIMES.violated(batches, [0]) == pytest.approx(1 / 3)
    assert TIMES.violated(batches, []) == 0.0


def test_the_mean_answer_time_is_equation_2() -> None:
    # Who leaves has its answer after 4 s, who moves on alone after 8, both together after 10.
    assert TIMES.mean_s(np.array([[0, 0], [0, 2], [2, 2]]), [0]) == pytest.approx((4 * 3 + 8 + 10 * 2) / 6)


def test_a_later_exit_is_run_by_those_who_get_there() -> None:
    # One leaves at ramp 0 (4 s), the other runs block 1 and ramp 1 alone: 2.5 s more.
    assert TIMES.slowest_s_K(np.array([[0, 1], [0, 2]]), [0, 1]).tolist() == [6.5, 8.5]


def test_what_is_left_after_the_last_whole_batch_is_in_none() -> None:
    assert TIMES.batches(np.array([0, 1, 2, 0, 2])).tolist() == [[0, 1], [2, 0]]


def test_an_exit_that_many_pass_goes_later_though_it_would_be_quick() -> None:
    # Of four batches one moves on whole at ramp 0; at ramp 1 everybody leaves.
    hard = records([EASY] * 6 + [HARD] * 2)
    place = best_place([hard], TIMES, 0.99, [0, 1])
    assert place is not None
    assert (place.ramp, place.violated, place.mean_s) == (1, 0.0, 7.0)
    bearable = best_place([hard], TIMES, 0.99, [0, 1], tail=0.25)
    assert bearable is not None
    assert (bearable.ramp, bearable.violated, bearable.mean_s) == (0, 0.25, (3 * 4.0 + 10.0) / 4)


def test_no_place_is_bearable_where_nobody_is_ever_sure() -> None:
    assert best_place([records([(0.1, 0.1)] * 4)], TIMES, 0.99, [0, 1]) is None


def test_a_place_has_the_boldest_threshold_that_keeps_the_precision() -> None:
    found = records([(0.72, 0.9), (0.82, 0.9)] * 5, [(1, 0), (0, 0)] * 5)
    careful = place_at([found], TIMES, 0.99, 0, {})
    bold = place_at([found], TIMES, 0.5, 0, {})
    assert careful is not None
    assert bold is not None
    assert (careful.thresholds, careful.precision) == ({0: 0.75}, 1.0)
    assert (bold.thresholds, bold.precision) == ({0: 0.5}, 0.5)


def test_in_several_windows_the_worst_counts() -> None:
    good, bad = records([EASY] * 4), records([EASY, EASY, HARD, HARD], [(1, 0), (0, 0), (0, 0), (0, 0)])
    place = place_at([good, bad], TIMES, 0.75, 0, {})
    assert place is not None
    assert (place.precision, place.violated) == (0.75, 0.5)
    assert place_at([good, bad], TIMES, 0.9, 0, {0: 0.5}) is not None, "at 0.98 nobody leaves, and nothing is lost"


def test_exits_behind_it_stay_and_those_before_it_go() -> None:
    place = place_at([records([EASY] * 4)], TIMES, 0.99, 0, {0: 0.7, 1: 0.6})
    assert place is not None
    assert place.thresholds == {0: 0.5, 1: 0.6}


def test_precision_is_of_the_truth_where_it_is_known() -> None:
    # The ramp answers one input otherwise than the end, and is right; the end is right about three of four.
    scores, wrong = [EASY] * 4, [(1, 0), (0, 0), (0, 0), (0, 0)]
    truly = [(0, 1, 1), (0, 0, 0), (0, 0, 0), (0, 0, 0)]
    assert normalised_precision(records(scores, wrong).outcome({0: 0.5})) == 0.75
    assert normalised_precision(records(scores, wrong, truly).outcome({0: 0.5})) == pytest.approx(4 / 3)


def test_every_score_has_a_grid_from_bold_to_careful() -> None:
    assert GRIDS.keys() == SCORES.keys()
    for score, grid in GRIDS.items():
        sureness = [SCORES[score].direction * value for value in grid]
        assert sureness == sorted(set(sureness))


@pytest.mark.parametrize(
    ("score", "threshold", "step"),
    [("confidence", 0.55, 0.6), ("confidence", 0.57, 0.6), ("confidence", 0.999, None), ("entropy", 0.3, 0.2)],
)
def test_a_threshold_goes_up_by_a_step_of_the_grid(score: str, threshold: float, step: float | None) -> None:
    assert next_step(score, threshold) == step  # type: ignore[arg-type]  # the tests name both


def test_batches_that_were_not_measured_are_refused() -> None:
    with pytest.raises(DataError, match="a batch of 3 is not measured: the largest is 2"):
        BatchTimes(table=TIMES.table, ramps=(0, 1), batch=3)
    with pytest.raises(DataError, match="times of 2 ramps, not of 1"):
        BatchTimes(table=TIMES.table, ramps=(0,), batch=2)
