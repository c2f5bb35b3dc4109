"""PAME's reactions: batches of two, windows of fifty batches, by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from optimizer.cost.batching import Batching
from optimizer.live.tuning import TUNERS
from optimizer.live.tuning.base import Tuner
from profiles.stream import Observations
from profiles.table import LatencyTable
from tests.optimizer.live.tuning.logs import NEVER, NO_EXITS, changed, lying, question, stream

TABLE = LatencyTable.of_rows((1, 2), [[2.0, 3.0]] * 3, [[0.5, 1.0]] * 2)
BATCHING = Batching(table=TABLE, ramps=(0, 1), size=2)
WINDOW = 100
"""Inputs."""
FIRST = {0: 0.55, 1: NEVER}
EASY, HARD = (0.7, 0.9), (0.1, 0.9)


def tuner(thresholds: dict[int, float] = FIRST) -> Tuner:
    made = TUNERS["pame"](replace(question(budget=0.1), batching=BATCHING))
    made.follow(thresholds, 0.0)
    return made


def batches(hard: int, *, wrong: int = 0, thresholds: dict[int, float] = FIRST, first_s: float = 0.0) -> Observations:
    """A window in which `hard` batches move on as a whole, and `wrong` inputs are wrong at the first ramp."""
    scores = [EASY] * (WINDOW - 2 * hard) + [HARD] * (2 * hard)
    losses = [(1, 0)] * wrong + [(0, 0)] * (WINDOW - wrong)
    return stream(scores, losses, thresholds, first_s=first_s)


def test_a_second_slow_batch_moves_the_exit_later() -> None:
    made = tuner()
    assert made.observe(batches(hard=1)) is None
    found = changed(made, batches(hard=2, first_s=100.0))
    assert (found.why, found.thresholds, found.at_s) == ("tuned", {0: NEVER, 1: 0.5}, 199.0)
    assert found.words == (
        "4.0% of the batches were slower than without exits, 2.0% are acceptable: the exit moves from ramp 0 to ramp 1 "
        "at 0.5, where 0.0% would have been slow and precision 100.0%"
    )
    made = tuner()
    assert made.observe(batches(hard=0, wrong=10)) is None
    found = changed(made, batches(hard=0, wrong=11, first_s=100.0))
    assert (found.why, found.thresholds) == ("alarm", {0: 0.6, 1: NEVER})
    assert found.words == "precision was 89.0%, 90.0% must be kept: ramp 0 from 0.55 to 0.6"


def test_a_window_is_judged_when_it_is_full() -> None:
    made = tuner()
    assert made.observe(lying(WINDOW - 1, FIRST, first_s=0.0)) is None
    assert (made.state.rows, made.state.next_test) == (WINDOW - 1, WINDOW)
    assert made.state.evidence == pytest.approx(10.0)
    assert changed(made, lying(1, FIRST, first_s=99.0))
    made = tuner()
    made.observe(lying(WINDOW // 2, FIRST, first_s=0.0))
    made.follow({0: 0.6, 1: NEVER}, 80.0)
    assert made.observe(lying(WINDOW, FIRST, first_s=0.0)) is None
    assert made.state.rows == 20


def test_without_an_acceptable_later_exit_no_input_leaves() -> None:
    made = tuner()
    unsure = stream([(0.1, 0.1)] * WINDOW, [(0, 0)] * WINDOW, FIRST)
    found = changed(made, unsure)
    assert found.thresholds == NO_EXITS
    assert found.words.endswith("no input leaves, no later exit is acceptable")
    made.follow(NO_EXITS, 100.0)
    assert made.observe(stream([(0.1, 0.1)] * WINDOW, [(0, 0)] * WINDOW, NO_EXITS, first_s=100.0)) is None
    back = changed(made, batches(hard=1, thresholds=NO_EXITS, first_s=200.0))
    assert back.thresholds == {0: 0.5, 1: NEVER}
    assert back.words.startswith("no input left: ramp 0 at 0.5")


def test_after_four_calm_windows_the_exit_goes_back_unless_it_was_wrong() -> None:
    later = {0: NEVER, 1: 0.5}
    made = tuner(later)
    for window in range(3):
        assert made.observe(batches(hard=0, thresholds=later, first_s=100.0 * window)) is None
    found = changed(made, batches(hard=1, thresholds=later, first_s=300.0))
    assert found.thresholds == {0: 0.5, 1: NEVER}
    assert found.words.startswith("nothing was wrong in 4 windows: ramp 0 at 0.5, where 2.0% would have been slow")
    made = tuner(later)
    for window, hard in enumerate((0, 2, 0, 0)):
        assert made.observe(batches(hard=hard, thresholds=later, first_s=100.0 * window)) is None


def test_inactive_exits_are_ignored_and_batches_have_the_plans_size() -> None:
    later = {0: NEVER, 1: 0.5}
    made = tuner(later)
    off = stream([HARD] * WINDOW, [(0, 0)] * WINDOW, later)
    active_NR = off.active_NR.copy()
    active_NR[:, 1] = False
    off = replace(off, active_NR=active_NR, probe_N=np.ones(WINDOW, bool), exits_N=np.full_like(off.exits_N, 2))
    assert made.observe(off) is None
    made = tuner()
    made.set_batching(replace(BATCHING, size=1))
    # One by one, an input that moves on takes 2.0 + 0.5 + 4.0 in the place of 6.0 for the whole model.
    half = batches(hard=1).take(np.arange(50, 100))
    assert made.state.next_test == 50
    found = changed(made, half)
    assert found.words.startswith("4.0% of the batches were slower than without exits")
