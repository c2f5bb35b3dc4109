"""Apparate's threshold search on small windows, compared with all threshold vectors of a grid."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from optimizer.cost.batching import SLOWER, Batching
from optimizer.live.tuning.apparate import WindowReplay, greedy, step_value
from optimizer.live.tuning.pame import ExitPlacement, best_placement
from profiles.records import ExitRecords
from profiles.table import LatencyTable
from tests.exit_records import exit_records


def records(scores: list[list[float]], wrong: list[list[int]], *, score: str = "confidence") -> ExitRecords:
    """Ramps after blocks 0, 1, ... of a model with two blocks more than ramps."""
    return exit_records(scores, wrong, score=score, num_blocks=len(scores[0]) + 2)


def times(num_ramps: int, ramp_s: float = 0.0) -> Batching:
    table = LatencyTable.of_rows((1,), [[1.0]] * (num_ramps + 2), [[ramp_s]] * num_ramps)
    return Batching(table=table, ramps=tuple(range(num_ramps)), size=1)


def random_window(seed: int, num_ramps: int, budget: float = 0.03, number: int = 200) -> WindowReplay:
    """Ramps whose confidence and accuracy grow with their depth."""
    rng = np.random.default_rng(seed)
    ease_N1 = rng.beta(2, 1, (number, 1))
    scores_NR = np.clip(ease_N1 + 0.05 * np.arange(num_ramps) + rng.normal(0, 0.1, (number, num_ramps)), 0.5, 1)
    wrong_NR = rng.random((number, num_ramps)) > scores_NR**0.3
    found = records(scores_NR.tolist(), wrong_NR.astype(int).tolist())
    return WindowReplay(found, times(num_ramps, 0.01), budget)


WINDOW = records([[0.95], [0.85], [0.75], [0.65]], [[0], [0], [0], [1]])


def test_inputs_leave_if_their_error_is_below_the_threshold() -> None:
    game = WindowReplay(WINDOW, times(1), 0.5)
    assert game.evaluate([0.0]) == (0.0, 0.0)
    # Two of four leave after one of three blocks.
    assert game.evaluate([0.2]) == (0.0, 2 * 2 / 4)
    assert game.evaluate([1.0]) == (1 / 4, 2.0)
    game = WindowReplay(WINDOW, times(1), 0.1)
    errors = greedy(game)
    assert 0.25 <= errors[0] < 0.35
    assert game.evaluate(errors) == (0.0, 1.5)
    assert WINDOW.outcome(game.thresholds(errors)).exits_N.tolist() == [0, 0, 0, 2]
    window = records([[0.05], [0.3], [0.6]], [[0], [0], [1]], score="entropy")
    game = WindowReplay(window, times(1), 0.1)
    errors = greedy(game)
    assert 0.5 <= errors[0] < 1
    assert 0.3 <= game.thresholds(errors)[0] < 0.6
    assert window.outcome(game.thresholds(errors)).exits_N.tolist() == [0, 0, 2]


def test_a_step_is_worth_what_it_saves_per_loss() -> None:
    here = (0.0, 1.0)
    nothing, dear, cheap, free = (0.0, 1.0), (0.02, 1.1), (0.01, 1.1), (0.0, 1.01)
    assert step_value(here, nothing) < step_value(here, dear) < step_value(here, cheap) < step_value(here, free)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_ramps", [1, 2, 3])
def test_no_vector_of_a_coarse_grid_is_much_better(seed: int, num_ramps: int) -> None:
    game = random_window(seed, num_ramps)
    loss, earlier_s = game.evaluate(greedy(game))
    coarse = [game.evaluate(errors) for errors in product(np.arange(11) / 10, repeat=num_ramps)]
    assert loss <= 0.03
    assert earlier_s >= 0.9 * max(earlier_s for loss, earlier_s in coarse if game.allows(loss))


# A block takes 2 s for one input and 3 s for two; a ramp 0.5 s for one and 1 s for two. Without exits: 3 * 3 = 9 s.
TABLE = LatencyTable.of_rows((1, 2), [[2.0, 3.0]] * 3, [[0.5, 1.0]] * 2)
BATCHING = Batching(table=TABLE, ramps=(0, 1), size=2)
SURE, EASY, HARD = (0.99, 0.97), (0.97, 0.97), (0.1, 0.97)


def placed(scores: list[tuple[float, float]], wrong: list[tuple[int, int]] | None = None) -> ExitRecords:
    """Ramps after blocks 0 and 1 of a model of three."""
    return exit_records(scores, wrong)


def test_a_fast_exit_that_whole_batches_pass_is_moved_later() -> None:
    # Of four batches one moves on whole at ramp 0; at ramp 1 every input leaves.
    hard = placed([EASY] * 6 + [HARD] * 2)
    place = best_placement([hard], BATCHING, 0.99, [0, 1])
    assert place is not None
    assert (place.ramp, place.violated, place.mean_s) == (1, 0.0, 7.0)
    acceptable = best_placement([placed([EASY] * 98 + [HARD] * 2)], BATCHING, 0.99, [0, 1])  # one of 50 moves on
    assert acceptable is not None
    assert (acceptable.ramp, acceptable.violated, acceptable.mean_s) == (0, SLOWER, (49 * 4.0 + 10.0) / 50)


def test_a_placement_has_the_loosest_threshold_that_is_precise_in_every_window() -> None:
    def at_first(windows: list[ExitRecords], precision: float, behind: dict[int, float] | None = None) -> ExitPlacement:
        place = best_placement(windows, BATCHING, precision, [0], behind=behind)
        assert place is not None
        return place

    found = placed([(0.72, 0.9), (0.82, 0.9)] * 5, [(1, 0), (0, 0)] * 5)
    careful, bold = at_first([found], 0.99), at_first([found], 0.5)
    assert (careful.thresholds, careful.precision) == ({0: 0.75}, 1.0)
    assert (bold.thresholds, bold.precision) == ({0: 0.5}, 0.5)
    good, bad = placed([EASY] * 100), placed([EASY] * 98 + [HARD] * 2, [(1, 0)] * 25 + [(0, 0)] * 75)
    place = at_first([good, bad], 0.75)
    assert (place.precision, place.violated) == (0.75, SLOWER)
    good, bad = placed([SURE] * 8), placed([EASY, SURE] * 4, [(1, 0), (0, 0)] * 4)
    assert at_first([good, bad], 0.9, {0: 0.5}).thresholds == {0: 0.98}, "at 0.98 only the sure leave, none is lost"
