"""Tests of thresholds on recent inputs, and the alarm: literal logs of a small stream."""

from __future__ import annotations

from optimizer.live.tuning import TUNERS
from optimizer.live.tuning.base import Tuner, no_input_leaves
from optimizer.live.tuning.guarantee import DESIGN_ROWS
from tests.optimizer.live.tuning.logs import NO_EXITS, SURE, changed, lying, mixed, question, stream

# At a budget of 10 % and a confidence of 90 % a test takes 22 inputs to allow for no loss, 38 for one.
FIRST_TEST = 22
BOLD = {0: 0.8, 1: 0.8}


def following(thresholds: dict[int, float], **asked: float) -> Tuner:
    """A tuner that follows its initial thresholds."""
    tuner = TUNERS["guarantee"](question(**asked))
    tuner.follow(thresholds, 0.0)
    return tuner


def test_no_input_leaves_before_a_test_is_passed() -> None:
    tuner = following(NO_EXITS)
    assert tuner.state.next_test == DESIGN_ROWS + FIRST_TEST
    assert tuner.observe(mixed(DESIGN_ROWS + FIRST_TEST - 1, NO_EXITS)) is None

    found = changed(tuner, mixed(1, NO_EXITS, first_s=200.0))
    assert (found.why, found.at_s) == ("tested", 200.0)
    # The sure half leaves at the first ramp, the others are wrong there.
    assert 0.6 < found.thresholds[0] <= 0.9
    assert found.words.startswith("tested on the last 22 inputs: at worst 0.00% was lost, ")


def test_after_an_alarm_only_later_inputs_are_tested() -> None:
    tuner = following(BOLD)
    assert tuner.observe(mixed(100, BOLD)) is None
    assert tuner.state.evidence < 1

    alarm = changed(tuner, lying(10, BOLD, first_s=100.0))
    assert alarm.why == "alarm"
    assert alarm.thresholds == NO_EXITS
    assert alarm.at_s < 109  # some lies were enough
    lies = int(alarm.at_s) - 99  # of the last hundred answers: less than the budget
    assert alarm.words == (
        f"alarm: the last {lies} answers lost 100.0% on average, 10.0% are allowed; "
        "no input leaves until new thresholds have passed a test"
    )

    tuner.follow(alarm.thresholds, 110.0)
    late_lies = 109 - int(alarm.at_s)
    assert tuner.state.rows == late_lies > 0
    # The path may be laid on inputs from before the alarm, so the test comes with its own inputs alone.
    assert tuner.state.next_test == FIRST_TEST
    # It allows for no loss, and the last lies are among its inputs.
    assert tuner.observe(mixed(FIRST_TEST - late_lies, NO_EXITS, first_s=110.0)) is None


def test_answers_under_thresholds_before_the_alarm_do_not_raise_it_again() -> None:
    tuner = following(BOLD)
    assert changed(tuner, lying(10, BOLD, first_s=0.0))
    assert tuner.observe(lying(20, BOLD, first_s=10.0)) is None
    tuner.follow(NO_EXITS, 30.0)
    assert tuner.observe(lying(5, BOLD, first_s=25.0)) is None
    tuner.follow(BOLD, 50.0)
    assert tuner.observe(lying(10, BOLD, first_s=40.0)) is None
    assert changed(tuner, lying(10, BOLD, first_s=50.0))


def test_the_alarm_keeps_its_evidence_when_thresholds_change() -> None:
    tuner = following(BOLD)
    tuner.observe(mixed(50, BOLD))
    before = tuner.state
    tuner.follow(dict(BOLD), 50.0)
    assert tuner.state == before
    assert tuner.observe(mixed(1, BOLD, first_s=49.0)) is None
    assert tuner.state.watched == before.watched + 1
    tuner = following(BOLD, budget=0.01)
    tuner.observe(mixed(50, BOLD))
    tuner.follow({0: 0.85, 1: 0.85}, 50.0)
    tuner.observe(mixed(50, BOLD, first_s=50.0))
    assert tuner.state.watched == 100


def test_initial_thresholds_hold_until_the_largest_test() -> None:
    tuner = following(BOLD)
    assert tuner.observe(mixed(300, BOLD)) is None
    due = tuner.state.next_test
    assert due is not None
    assert due > 300
    found = changed(tuner, mixed(due, BOLD, first_s=300.0))
    assert found.why == "tested"
    tuner = following(BOLD, confidence=0.99999)
    due = tuner.state.next_test
    assert due is not None
    # An eighth is lost: too much for the test, too little for so patient an alarm.
    wrong = [(1, 1) if index % 8 == 0 else (0, 0) for index in range(due)]
    found = changed(tuner, stream([SURE] * due, wrong, BOLD))
    assert (found.why, found.thresholds) == ("not passed", NO_EXITS)
    assert found.words.endswith("no input leaves")


def test_other_ramps_are_tuned_on_inputs_that_saw_them() -> None:
    tuner = following(NO_EXITS)
    tuner.observe(mixed(60, NO_EXITS))
    tuner.follow({1: NO_EXITS[1]}, 60.0)
    assert tuner.state.rows == 60
    found = changed(tuner, mixed(100, NO_EXITS, first_s=60.0))
    assert set(found.thresholds) == {1}


def test_after_a_change_of_ramps_the_largest_possible_test_runs_at_once() -> None:
    tuner = following(NO_EXITS)
    for first in range(0, 5000, 50):
        tuner.observe(mixed(50, NO_EXITS, first_s=float(first)))
    assert tuner.state.rows == 5000  # far beyond the last test
    tuner.follow({1: NO_EXITS[1]}, 5000.0)
    due = tuner.state.next_test
    assert due is not None
    assert due <= tuner.state.rows
    found = changed(tuner, mixed(1, NO_EXITS, first_s=5000.0))
    assert (found.why, set(found.thresholds)) == ("tested", {1})
    assert found.words.startswith(f"tested on the last {due - DESIGN_ROWS} inputs")
    # Of all the rows that are kept, as before the change, and from here on the next one is near.
    assert tuner.state.next_test is not None
    assert tuner.state.next_test - tuner.state.rows < due


def test_after_an_alarm_a_passed_test_lets_inputs_leave_again() -> None:
    tuner = following(BOLD)
    tuner.observe(mixed(200, BOLD))
    changed(tuner, lying(10, BOLD, first_s=200.0))
    tuner.follow(NO_EXITS, 210.0)
    found = [tuner.observe(mixed(1, NO_EXITS, first_s=210.0 + index)) for index in range(300)]
    first = next(each for each in found if each is not None)
    assert first.why == "tested"
    assert not no_input_leaves("confidence", first.thresholds)
