from __future__ import annotations

import numpy as np
import pytest

from optimizer.cost.batching import Batching
from optimizer.live.tuning.pame import GRIDS, TEN_CONFIDENCES, next_threshold, relative_precision
from optimizer.search.pame import SearchStep, exits_of, find_exits, fixed
from profiles.records import ExitRecords, RecordedBatches
from profiles.scores import SCORES, Score
from profiles.table import LatencyTable
from tests.exit_records import exit_records

TABLE = LatencyTable(
    batches=(1, 2, 4), block_s_NB=np.array([[1.0, 2.0, 4.0]] * 3), ramp_s_EB=np.array([[0.5, 1.0, 2.0]] * 2)
)
"""A block takes a second per input, a ramp half of one."""
FOUR = Batching(table=TABLE, ramps=(0, 1), size=4)


def records(*, score: Score = "confidence", truth: bool = False) -> ExitRecords:
    """Ten inputs of increasing confidence, 0.52 to 0.97. The ramp errs on the three least confident ones."""
    scores_N1 = (0.52 + 0.05 * np.arange(10)).reshape(-1, 1).astype(np.float32)
    losses_N1 = (np.arange(10) < 3).astype(np.float64).reshape(-1, 1)
    true_losses_NE = np.column_stack([np.zeros(10), np.arange(10) == 9]).astype(np.float64) if truth else None
    scores_N1 = 1 - scores_N1 if score == "entropy" else scores_N1
    return exit_records(scores_N1, losses_N1, score=score, num_blocks=3, true_losses_NE=true_losses_NE)


def test_every_score_has_a_kind_and_a_grid_from_bold_to_careful() -> None:
    assert len(TEN_CONFIDENCES) == 10
    assert GRIDS.keys() == SCORES.keys() == {*Score.__args__}  # type: ignore[attr-defined] # the names of a Literal
    for score, grid in GRIDS.items():
        sureness = [SCORES[score].direction * value for value in grid]
        assert sureness == sorted(set(sureness))


@pytest.mark.parametrize("score", ["confidence", "entropy"])
def test_fewer_inputs_leave_at_each_threshold_of_a_grid(score: Score) -> None:
    leaving = [int(records(score=score).sure_NR({0: threshold}).sum()) for threshold in GRIDS[score]]
    assert leaving == sorted(leaving, reverse=True)


@pytest.mark.parametrize(
    ("score", "threshold", "step"),
    [("confidence", 0.55, 0.6), ("confidence", 0.57, 0.6), ("confidence", 0.999, None), ("entropy", 0.3, 0.2)],
)
def test_a_threshold_goes_up_by_a_step_of_the_grid(score: Score, threshold: float, step: float | None) -> None:
    assert next_threshold(score, threshold) == step


def test_precision_is_of_the_truth_where_it_is_known() -> None:
    # Of ten answers three are not the full model's; all ten are right, and of the full model's nine.
    assert relative_precision(records().outcome({0: 0.5})) == pytest.approx(0.7)
    assert relative_precision(records(truth=True).outcome({0: 0.5})) == pytest.approx(1 / 0.9)


def batches(sure: list[list[int]], size: int = 4) -> RecordedBatches:
    sure_NR = np.array(sure, dtype=bool)
    return RecordedBatches(num_blocks=3, ramps=(0, 1), sure_NR=sure_NR, losses_NR=np.zeros(sure_NR.shape), size=size)


def search(sure: list[list[int]]) -> list[SearchStep]:
    return find_exits(FOUR, (0, 1), len(sure), fixed(batches(sure)))


def test_a_matrix_holds_the_whole_batch_to_the_exit_and_the_rest_behind_it() -> None:
    # 4 + 2 s, and 2 s per input that moves on; 8 + 2 s, and 1 s.
    assert [FOUR.exit_seconds_J(exit_).tolist() for exit_ in (0, 1)] == [[6, 8, 10, 12, 14], [10, 11, 12, 13, 14]]
    behind = Batching(table=TABLE, ramps=(0, 1), first=1, size=3)
    assert behind.exit_seconds_J(1).tolist() == [4.5, 5.5, 6.5, 7.5]
    assert (FOUR.whole_s, behind.whole_s) == (12, 6)
    goes_on = search([[1, 0], [1, 0], [0, 1], [0, 0]])
    assert [[each.allowed for each in step.candidates] for step in goes_on] == [[3, 2], [1]]


def test_the_exit_of_the_least_mean_is_taken_that_makes_no_batch_slower() -> None:
    # After block 0 two of four leave: 6 s for them, 10 s for the rest, 8 s. After block 1 all four: 10 s.
    step = search([[1, 1], [1, 1], [0, 1], [0, 1]])[0]
    assert [each.mean_s for each in step.candidates] == [8, 10]
    assert [each.inside_N.sum() for each in step.candidates] == [2, 0]
    assert step.chosen is not None
    assert (step.chosen.ramp, step.chosen.allowed, step.chosen.slower) == (0, 3, 0)
    alone = search([[1, 0]] * 4)
    assert (exits_of(alone), len(alone)) == ((0,), 1)
    three_move_on = [[1, 1], [0, 1], [0, 1], [0, 1]]  # 6 + 6 s: as long as without
    none_leaves = [[0, 0]] * 4  # 6 + 8 s
    late = [[1, 1]] * 4 + none_leaves
    assert exits_of(search(three_move_on)) == (1,)  # 0 alone: (6 + 3 * 12) / 4 = 10.5 s; 1: 10 s
    assert exits_of(search(late)) == ()


def test_further_exits_are_chosen_by_the_tail_of_the_largest_batch() -> None:
    """Behind exit 0 at most 3 may move on: with exit 1 they take 4.5 s and 1 s per input that goes on, else 6 s."""
    goes_on = search([[1, 0], [1, 0], [0, 1], [0, 0]])
    assert exits_of(goes_on) == (0, 1)
    assert goes_on[1].batching.size == 3
    assert goes_on[1].chosen is not None
    assert goes_on[1].chosen.tail_s == 5.5
    assert exits_of(search([[1, 0], [0, 1], [0, 0], [0, 0]])) == (0,)  # 4.5 + 2 s would be more than 6 s


def test_batches_are_timed_by_their_own_inputs_in_order_of_arrival() -> None:
    exits_N = np.array([0, 1, 0, 2, 0, 0, 0, 0, 2])  # the last is in no batch
    times = FOUR.times(exits_N, {1, 0})
    # The first: two after 6 s, one after 6 + 3 s, one after 1 s more. The second: all four after 6 s.
    assert times.last_s_K.tolist() == [10, 6]
    assert times.mean_s == (2 * 6 + 9 + 10 + 4 * 6) / 8
    assert (times.whole_s, times.last_s_K.mean(), times.slower) == (12, 8, 0)
    # A batch that no input leaves takes 14 s, and one of which one input leaves as long as without exits.
    one_leaves = np.array([2, 2, 2, 2, 0, 2, 2, 2])
    assert FOUR.times(one_leaves, {0}).slower == 0.5
