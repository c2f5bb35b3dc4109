from __future__ import annotations

import numpy as np
import pytest

from experiments.tuning.alarm import (
    BUDGET,
    HORIZON,
    delay,
    false_share,
    in_between,
    least_delay,
    oracle_delay,
    places_within,
    power,
    trigger_delay,
    triggered_share,
)


def test_the_best_test_of_one_input_is_the_input_itself() -> None:
    # Err in 1 % of cases by calling every loss a jump: that finds a jump to 5 % with a probability of 5 %.
    assert power(BUDGET, 1) == pytest.approx(0.05)
    assert power(0.005, 1) == pytest.approx(0.025)


def test_no_alarm_is_as_quick_everywhere_as_the_bet_that_knows_the_place() -> None:
    assert oracle_delay(400) == pytest.approx(56, abs=12)
    assert least_delay() == 162
    assert places_within(100) == 41
    assert places_within(162) >= HORIZON / 162


def test_the_papers_trigger_sounds_in_a_seventh_of_all_windows_at_the_budget() -> None:
    assert triggered_share(0.01) == pytest.approx(0.149, abs=5e-4)
    assert trigger_delay(0.01) == 69


def test_delays_are_counted_from_the_jump() -> None:
    found = delay(0.01, 100, 0.9, 20)
    assert 2 <= found.median <= 6
    assert found.false_share < 0.2


def test_a_few_runs_at_the_budget_rarely_sound() -> None:
    assert false_share(5) <= 0.4


def test_losses_in_between_have_the_mean_asked_for() -> None:
    assert in_between(np.random.default_rng(0), 0.05, 20_000).mean() == pytest.approx(0.05, abs=0.003)
