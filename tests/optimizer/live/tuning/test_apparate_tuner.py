"""The paper's trigger and search, as a tuner."""

from __future__ import annotations

from optimizer.live.tuning import TUNERS
from optimizer.live.tuning.apparate import TUNED_ON, WINDOW
from tests.optimizer.live.tuning.logs import NO_EXITS, changed, lying, mixed, question

BOLD = {0: 0.8, 1: 0.8}


def test_apparate_tunes_every_period_and_after_a_wrong_answer() -> None:
    tuner = TUNERS["apparate"](question(budget=0.01))
    tuner.follow(NO_EXITS, 0.0)
    assert tuner.observe(mixed(TUNED_ON - 1, NO_EXITS)) is None
    found = changed(tuner, mixed(1, NO_EXITS, first_s=127.0))
    assert found.why == "tuned"
    # Half are sure, and right, at the first ramp: they leave at once; the second ramp is right about all others.
    assert 0.6 < found.thresholds[0] <= 0.9
    assert found.words == "after 128 inputs: tuned to the last 128 inputs, 49.2% saved at a loss of 0.00%"
    tuner.follow(found.thresholds, 128.0)
    assert tuner.observe(mixed(TUNED_ON, found.thresholds, first_s=128.0)) is None, "they are in force already"


def test_wrong_answers_trigger_unless_they_belong_to_older_thresholds() -> None:
    tuner = TUNERS["apparate"](question(budget=0.01))
    tuner.follow(BOLD, 0.0)
    assert tuner.observe(mixed(40, BOLD)) is None
    found = changed(tuner, lying(1, BOLD, first_s=40.0))
    assert (found.why, found.at_s) == ("alarm", 40.0)
    tuner = TUNERS["apparate"](question(budget=0.01))
    tuner.follow(BOLD, 100.0)
    assert tuner.observe(lying(20, BOLD, first_s=0.0)) is None
    assert tuner.observe(lying(WINDOW - 1, BOLD, first_s=100.0)) is None, "no window yet"
    assert changed(tuner, lying(1, BOLD, first_s=120.0)).why == "alarm"
