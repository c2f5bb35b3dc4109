from __future__ import annotations

import math

import pytest

from deployments.ingress.core.outcomes import LONGEST_RETRY_S, AnswerRate


def test_without_a_rate_refused_callers_come_back_after_a_second() -> None:
    assert AnswerRate().seconds_for(1000) == 1.0


def test_the_first_second_gives_the_first_rate() -> None:
    rate = AnswerRate()
    rate.record(20, 0.0)
    rate.record(20, 0.5)
    assert rate.rate_per_s == 0
    rate.record(60, 2.0)
    assert rate.rate_per_s == 50.0  # 100 answers in 2 s
    assert rate.seconds_for(200) == 4.0


def test_the_rate_moves_to_a_new_one_within_about_ten_seconds() -> None:
    rate = AnswerRate()
    rate.record(0, 0.0)
    rate.record(100, 1.0)
    rate.record(200, 2.0)
    assert rate.rate_per_s == pytest.approx(100 + 100 * (1 - math.exp(-0.1)))


def test_nobody_is_told_to_come_back_sooner_than_in_a_second_or_much_later() -> None:
    rate = AnswerRate(rate_per_s=50.0)
    assert rate.seconds_for(1) == 1.0
    assert rate.seconds_for(10**6) == LONGEST_RETRY_S


def test_an_idle_hour_does_not_count_as_slowness() -> None:
    rate = AnswerRate()
    rate.record(0, 0.0)
    rate.record(100, 1.0)
    rate.begin(3600.0)
    rate.record(50, 3600.5)
    rate.record(50, 3601.0)
    assert rate.rate_per_s == pytest.approx(100.0)
