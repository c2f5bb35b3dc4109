"""What the tuner says, until somebody acts on it."""

from __future__ import annotations

import pytest

from deployments.controller.observe import Tuning
from optimizer.live.tuning.tuners import make_tuner
from tests.deployments.control.control_fakes import problem
from tests.optimizer.live.tuning.logs import lying, mixed, question

BOLD = {0: 0.8, 1: 0.8}


def test_an_alarm_that_nobody_acted_on_stays_urgent_when_new_thresholds_pass_a_test() -> None:
    tuning = Tuning(lambda _: make_tuner("guarantee", question()), pytest.fail, problem())
    tuning.follow(BOLD, 0.0)
    tuning.observe([mixed(100, BOLD)])
    tuning.observe([lying(10, BOLD, first_s=100.0)])
    alarm = tuning.alarm
    assert alarm is not None
    tuning.observe([mixed(60, BOLD, first_s=110.0)])
    assert tuning.alarm is not None
    assert tuning.alarm.thresholds != alarm.thresholds
    assert tuning.alarm.words.startswith(f"{alarm.words}; tested on the last ")
