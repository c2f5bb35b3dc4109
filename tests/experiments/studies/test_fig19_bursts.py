from __future__ import annotations

import numpy as np
import pytest

from experiments.studies.fig19_bursts import Traffic, azure, case, cases, compare, devices_for, twitter, with_count
from experiments.studies.kit import Bars
from offramp.load.traces import CountTrace
from tests.experiments.studies.two_blocks import inputs, problem


def bursty(rates_per_s: list[float]) -> Traffic:
    """Seconds of equal gaps."""
    arrivals_s = np.concatenate([second + np.arange(0, 1, 1 / rate) for second, rate in enumerate(rates_per_s)])
    return Traffic(words="made up", arrivals_s=arrivals_s, duration_s=float(len(rates_per_s)))


def test_the_worst_second_is_told() -> None:
    assert bursty([100.0, 400.0, 50.0]).peak_per_s == 400


def test_of_the_hour_every_so_many_seconds_are_played_at_a_mean_of_1000() -> None:
    counts_B = np.full(7200, 7.0)
    counts_B[3600:7200:12] = np.where(np.arange(300) < 150, 1.0, 3.0)
    traffic = twitter(CountTrace(counts_B=counts_B, bin_s=1.0), 12, first_s=3600)
    assert traffic.duration_s == 300
    first, second = np.histogram(traffic.arrivals_s, bins=[0, 150, 300])[0]
    assert first + second == pytest.approx(300_000, rel=0.01)
    assert second / first == pytest.approx(3, rel=0.02)


def test_minutes_of_the_other_trace_are_shortened_by_as_much() -> None:
    traffic = azure(CountTrace(counts_B=np.array([1.0, 3.0] * 60), bin_s=60.0), 12)
    assert traffic.duration_s == 300
    first, second = np.histogram(traffic.arrivals_s, bins=[0, 5, 10])[0]
    assert second / first == pytest.approx(3, rel=0.1)


def test_stock_needs_less_than_half_of_the_accelerators_on_average() -> None:
    # One does 1000/s in twos: 2 ms for 2 inputs.
    assert devices_for(problem(count=8), 900.0) == 2
    assert devices_for(problem(count=8), 1000.0) == 3


def test_what_a_burst_brings_beyond_the_rate_is_refused() -> None:
    found = case("made up", with_count(problem(), 1), inputs(), bursty([400.0, 3000.0, 400.0, 400.0]))
    stock, best = found.sides["stock"], found.sides["best"]
    assert stock is not None
    assert best is not None
    assert found.stock_per_s == pytest.approx(1000)
    assert stock.drops["admission"] > 1500
    assert best.goodput_per_s > stock.goodput_per_s
    times = found.times("best", "stock")
    assert times == pytest.approx(best.goodput_per_s / stock.goodput_per_s)


def test_the_rule_and_half_of_it_are_played() -> None:
    result = compare(cases(problem(count=8), inputs(), bursty([500.0, 1500.0]), None))
    (picture,) = result.pictures
    assert isinstance(picture, Bars)
    assert picture.labels == ("Twitter\n3 V100", "Twitter\n1 V100")
    assert [each.paper for each in result.comparisons] == [1.16, 1.29, 1.16, 1.29]
