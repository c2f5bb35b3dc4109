"""Batches of two by hand: where one exit should be."""

from __future__ import annotations

from optimizer.live.tuning.pame import best_place, place_at
from optimizer.pame.batches import Batching, seconds_of
from profiles.records import ExitRecords
from profiles.table import LatencyTable
from tests.exit_records import exit_records

# A block takes 2 s for one input and 3 s for two; a ramp 0.5 s for one and 1 s for two. Without exits: 3 * 3 = 9 s.
TABLE = LatencyTable.of_rows((1, 2), [[2.0, 3.0]] * 3, [[0.5, 1.0]] * 2)
BATCHING = Batching(seconds=seconds_of(TABLE, (0, 1)), size=2)
EASY, HARD = (0.97, 0.97), (0.1, 0.97)


def records(scores: list[tuple[float, float]], wrong: list[tuple[int, int]] | None = None) -> ExitRecords:
    """Ramps after blocks 0 and 1 of a model of three."""
    return exit_records(scores, wrong)


def test_an_exit_that_many_pass_goes_later_though_it_would_be_quick() -> None:
    # Of four batches one moves on whole at ramp 0; at ramp 1 every input leaves.
    hard = records([EASY] * 6 + [HARD] * 2)
    place = best_place([hard], BATCHING, 0.99, [0, 1])
    assert place is not None
    assert (place.ramp, place.violated, place.mean_s) == (1, 0.0, 7.0)
    bearable = best_place([hard], BATCHING, 0.99, [0, 1], tail=0.25)
    assert bearable is not None
    assert (bearable.ramp, bearable.violated, bearable.mean_s) == (0, 0.25, (3 * 4.0 + 10.0) / 4)


def test_a_place_has_the_boldest_threshold_that_is_precise_in_every_window() -> None:
    found = records([(0.72, 0.9), (0.82, 0.9)] * 5, [(1, 0), (0, 0)] * 5)
    careful = place_at([found], BATCHING, 0.99, 0, {})
    bold = place_at([found], BATCHING, 0.5, 0, {})
    assert careful is not None
    assert bold is not None
    assert (careful.thresholds, careful.precision) == ({0: 0.75}, 1.0)
    assert (bold.thresholds, bold.precision) == ({0: 0.5}, 0.5)
    good, bad = records([EASY] * 4), records([EASY, EASY, HARD, HARD], [(1, 0), (0, 0), (0, 0), (0, 0)])
    place = place_at([good, bad], BATCHING, 0.75, 0, {})
    assert place is not None
    assert (place.precision, place.violated) == (0.75, 0.5)
    assert place_at([good, bad], BATCHING, 0.9, 0, {0: 0.5}) is not None, "at 0.98 no input leaves, and nothing is lost"
