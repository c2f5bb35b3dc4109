"""The alarm is seldom raised while losses are within the budget, and quickly if they are not."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from optimizer.live.tuning.base import answered_losses_N
from optimizer.live.tuning.guarantee import BETS, Alarm, bet_size, reserve_share
from tests.optimizer.live.tuning.logs import NO_EXITS, mixed


def losses(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float64)


def mean_evidence(laws: list[dict[float, float]], false_alarms: float, begins: set[int]) -> float:
    """The expected evidence at the alarm or at the end, over all sequences of losses drawn from `laws`."""
    total = 0.0
    for sequence in product(*(law.items() for law in laws)):
        alarm = Alarm(0.1, false_alarms)
        for index, (loss, _) in enumerate(sequence):
            if index in begins:
                alarm.restart_bets()
            if alarm.update(losses(loss)) is not None:
                break
        total += alarm.evidence * float(np.prod([share for _, share in sequence]))
    return total


@pytest.mark.parametrize("begins", [set(), {0}, {0, 3, 4}], ids=["no stake", "one stake", "three stakes"])
@pytest.mark.parametrize("false_alarms", [0.01, 0.6], ids=["played to the end", "stopped when it sounds"])
def test_at_the_budget_no_bet_gains_on_average(begins: set[int], false_alarms: float) -> None:
    yes_or_no = {1.0: 0.1, 0.0: 0.9}
    parts = {0.5: 0.1, 0.25: 0.2, 0.0: 0.7}
    laws = [yes_or_no, parts, yes_or_no, yes_or_no, parts, yes_or_no, yes_or_no]
    assert mean_evidence(laws, false_alarms, begins) == pytest.approx(1.0)


def test_a_stake_grows_by_the_ratio_of_likelihoods() -> None:
    for times in BETS:
        grown = 1 + bet_size(0.01, times) * (1 - 0.01)
        shrunk = 1 + bet_size(0.01, times) * (0 - 0.01)
        assert grown == pytest.approx(times)
        assert shrunk == pytest.approx((1 - times * 0.01) / 0.99)


def test_many_losses_at_once_are_the_same_as_one_by_one() -> None:
    seen = (np.random.default_rng(0).random(605) < 0.02).astype(float)
    together, alone = Alarm(0.01, 0.001), Alarm(0.01, 0.001)
    together.restart_bets()
    alone.restart_bets()
    assert together.update(seen) is None
    assert [alone.update(losses(loss)) for loss in seen.tolist()] == [None] * len(seen)
    assert together.evidence == pytest.approx(alone.evidence)


@pytest.mark.parametrize("budget", [1e-6, 0.01, 0.9])
def test_long_runs_with_or_without_losses_do_not_overflow(budget: float) -> None:
    alarm = Alarm(budget, 1e-12)
    alarm.restart_bets()
    assert alarm.update(np.zeros(1000)) is None
    assert 0 < alarm.evidence < 1
    alarm.update(np.ones(200))
    assert np.isfinite(alarm.evidence)


def test_update_returns_the_input_that_raises_the_alarm() -> None:
    alarm = Alarm(0.01, 0.1)
    alarm.restart_bets()
    # Of the first stake, 1/2, parts of .2, .6 and .2 grow 2, 5 and 15 times as much with a loss: to about
    # 0.5 * (0.2 * 4 + 0.6 * 25 + 0.2 * 225) = 30 with the second one.
    assert alarm.update(losses(0, 1, 0, 1, 1)) == 3
    assert alarm.evidence >= alarm.limit == pytest.approx(10)


def test_without_losses_only_the_reserve_remains() -> None:
    alarm = Alarm(0.01, 0.1)
    alarm.restart_bets()
    assert alarm.update(np.zeros(50_000)) is None
    assert alarm.evidence == pytest.approx(0.5 * reserve_share(50_000), rel=0.05)


@pytest.mark.parametrize("good", [0, 300, 3000], ids=lambda good: f"after {good} good inputs")
def test_half_of_the_jumps_to_five_budgets_are_detected_quickly(good: int) -> None:
    rng = np.random.default_rng(1)
    delays = []
    for _ in range(60):
        alarm = Alarm(0.01, 0.1)
        alarm.restart_bets()
        if alarm.update((rng.random(good) < 0.005).astype(float)) is None:
            delays.append(alarm.update((rng.random(2000) < 0.05).astype(float)) or 2000)
    assert np.median(delays) < (100 if good == 0 else 250)


SEEN = replace(mixed(4, {0: 0.8, 1: 0.99}), probe_N=np.full(4, True), stayed_N=np.full(4, False))
"""Unsure, sure, unsure, sure: the unsure ones are answered at the end, and ramp 0 is wrong about them."""
PRUNED = replace(SEEN, end_losses_N=np.array([1, 1, 0, np.nan], dtype=np.float32))


def test_pruning_adds_loss_only_to_answers_of_the_end() -> None:
    assert SEEN.exits_N.tolist() == [2, 0, 2, 0]
    assert answered_losses_N(SEEN).tolist() == [0, 0, 0, 0]
    assert SEEN.records((0, 1)).end_losses_N is None
    assert answered_losses_N(PRUNED).tolist() == [1, 0, 0, 0], "the second was answered before"
    records = PRUNED.records((0, 1))
    assert records.outcome(NO_EXITS).losses_N.tolist() == [1, 1, 0, 0]
