"""What an ingress counts, and how long it tells refused callers to wait."""

from __future__ import annotations

import math

import pytest

from deployments.ingress.core.calls import (
    LONGEST_RETRY_S,
    AnswerRate,
    IngressCounts,
    bucket_of,
    latencies_within,
)
from deployments.ingress.core.ingress_core import own_plan
from deployments.wire.messages import BUCKET
from optimizer.placement import PlacedPlan, parse_placed
from optimizer.plan import PolicySpec, early_exit_plan


def test_a_bucket_holds_what_lies_between_its_ends() -> None:
    for seconds in (1e-5, 0.003, 0.1, 1.0, 2.5, 600.0):
        bucket = bucket_of(seconds)
        assert BUCKET**bucket <= seconds * (1 + 1e-12)
        assert seconds < BUCKET ** (bucket + 1)
    # A clock that stood still has a bucket too.
    assert bucket_of(0.0) == bucket_of(1e-6)


@pytest.mark.parametrize(("slo_s", "in_slo"), [(0.5, 2), (None, 3)], ids=["slo", "none"])
def test_answers_within_the_slo_are_counted(slo_s: float | None, in_slo: int) -> None:
    counts = IngressCounts(slo_s)
    for latency_s in (0.1, 0.5, 0.51):
        counts.answer(3, [latency_s], 1, by_present_plan=True)
    assert (counts.answered, counts.in_slo, counts.exits) == (3, in_slo, {3: 3})


def test_latencies_are_counted_up_to_every_end_and_never_as_less_than_they_were() -> None:
    counts = IngressCounts(None)
    for latency_s in (0.004, 0.04, 0.04, 0.0999, 400.0):  # 0.0999 s is in a bucket that ends above 0.1 s
        counts.answer(1, [latency_s], 1, by_present_plan=True)
    assert latencies_within(counts.latencies, (0.01, 0.05, 0.1, 0.2, math.inf)) == [1, 3, 3, 4, 5]
    counts.answer(1, [0.04, 0.03], 2, by_present_plan=True)  # the first in a bucket that was read, both below one end
    assert latencies_within(counts.latencies, (0.01, 0.05, 0.1, 0.2, math.inf)) == [1, 5, 5, 6, 7]


def test_how_long_crossings_took_is_known_to_a_bucket() -> None:
    counts = IngressCounts(None)
    assert counts.crossing_quantile_s(0.5) is None
    counts.cross(6, [0.001] * 98)
    counts.cross(12, [0.5, 0.5])
    for share, seconds in ((0.5, 0.001), (0.98, 0.001), (0.99, 0.5)):
        found = counts.crossing_quantile_s(share)
        assert found is not None
        assert seconds <= found <= BUCKET * seconds * (1 + 1e-12)


def test_the_rate_moves_to_a_new_one_within_about_ten_seconds() -> None:
    rate = AnswerRate()
    rate.record(0, 0.0)
    rate.record(100, 1.0)
    rate.record(200, 2.0)
    assert rate.rate_per_s == pytest.approx(100 + 100 * (1 - math.exp(-0.1)))


def test_no_caller_is_told_to_come_back_sooner_than_in_a_second_or_much_later() -> None:
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


def test_without_a_controller_the_plan_says_in_what_hidden_states_travel() -> None:
    spec = PolicySpec(name="entropy", thresholds=0.5)
    placed = PlacedPlan(plan=early_exit_plan(4, (0,), spec, batch=4, device="cpu"))
    said = own_plan(placed, "float16")
    assert said["hops"] == {"dtype": "float16"}
    assert parse_placed(said) == placed
