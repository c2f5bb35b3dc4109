"""Gain against cost, on a plan whose rates are round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from earlyexit.network.boundary import Split
from optimizer.decision import Planned
from optimizer.evaluate import evaluate
from optimizer.live.hysteresis import Weighed, weigh
from optimizer.plan import Stage
from optimizer.problem import Link, MaximizeRate, MinimizeCost, PlanProblem, Slo, Supply
from profiles.table import LatencyTable

# One block takes 0.1 s at batch 1 and 0.2 s at batch 4: a replica does 10 or 20 a second.
PROBLEM = PlanProblem(
    num_blocks=1,
    ramps=(),
    survival_N=(1.0,),
    latency={"T4": LatencyTable(batches=(1, 4), block_s_NB=np.array([[0.1, 0.2]]), ramp_s_EB=np.zeros((0, 2)))},
    devices={"T4": Supply(count=20, usd_per_hour=0.5)},
    link=Link(bandwidth_bytes_per_s=1e9),
    bytes_per_sample_N=(0.0,),
    slo=Slo(latency_s=10.0),
    objective=MaximizeRate(),
)


def stages(replicas: int, *, batch: int = 4, device: str = "T4") -> tuple[Stage, ...]:
    return (Stage(device=device, replicas=replicas, splits=(Split(first=0, end=1, batch=batch),)),)


def planned(chosen: tuple[Stage, ...], problem: PlanProblem = PROBLEM) -> Planned:
    return Planned(strategy="best", stages=chosen, figures=evaluate(problem, chosen), bound=1.0, gap=0.0)


def weighed(
    current: Sequence[Stage] | None,
    new: tuple[Stage, ...],
    *,
    moved: int,
    problem: PlanProblem = PROBLEM,
    least_gain: float = 0.02,
) -> Weighed:
    return weigh(
        problem, current, planned(new, problem), moved=moved, start_s=12.0, period_s=120.0, least_gain=least_gain
    )


def test_a_gain_that_pays_for_the_change_changes_the_plan() -> None:
    verdict = weighed(stages(10), stages(12), moved=2)
    assert verdict.gain == pytest.approx(0.2)  # 240/s instead of 200/s
    assert verdict.cost == pytest.approx(2 / 12 * 0.1)
    assert verdict.change
    assert verdict.words == (
        "changes the plan: the new one would give 20.0% more, moving 2 of 12 replicas costs 1.7%, "
        "and 2.0% is the least gain"
    )


def test_a_gain_below_cost_and_least_gain_keeps_it() -> None:
    verdict = weighed(stages(10), stages(11), moved=9)
    assert (verdict.gain, verdict.cost) == pytest.approx((0.1, 9 / 110))
    assert not verdict.change
    assert weighed(stages(10), stages(11), moved=8).change
    assert weighed(stages(10), stages(11), moved=9, least_gain=0.01).change


def test_without_a_plan_any_is_taken() -> None:
    verdict = weighed(None, stages(1), moved=1)
    assert verdict.change
    assert verdict.words == "takes the plan: there is none yet"


def test_the_same_plan_is_no_change() -> None:
    verdict = weighed(stages(3), stages(3), moved=0)
    assert not verdict.change
    assert verdict.words == "keeps the plan: it is still the best"


def test_a_plan_that_breaks_a_promise_is_left_at_any_price() -> None:
    fewer = replace(PROBLEM, devices={"T4": Supply(count=9, usd_per_hour=0.5)})
    verdict = weighed(stages(10), stages(9), moved=9, problem=fewer)
    assert verdict.change
    assert verdict.words == "changes the plan: the present one breaks a promise: 10 T4 used, 9 there"


@pytest.mark.parametrize(
    ("slo_s", "change"),
    [pytest.param(0.25, False, id="0.22 s are within the SLO"), pytest.param(0.21, True, id="0.22 s break it")],
)
def test_the_present_plan_may_use_the_slack(slo_s: float, change: bool) -> None:
    tight = replace(PROBLEM, slo=Slo(latency_s=slo_s, slack=0.2))  # a new plan must keep 0.2 s
    verdict = weighed(stages(10), stages(10, batch=1), moved=0, problem=tight)
    assert verdict.change is change


def test_a_promise_that_the_new_plan_breaks_too_is_no_reason() -> None:
    tight = replace(PROBLEM, slo=Slo(latency_s=0.1))
    verdict = weighed(stages(10), stages(9), moved=0, problem=tight)
    assert verdict.broken == ()
    assert not verdict.change


@pytest.mark.parametrize(
    ("old", "new", "gain", "change"), [(10, 8, 0.2, True), (10, 10, 0.0, False), (8, 10, -0.25, False)]
)
def test_where_cost_is_sought_the_gain_is_what_is_saved(old: int, new: int, gain: float, change: bool) -> None:
    cheap = replace(PROBLEM, objective=MinimizeCost(rate_per_s=50.0))
    verdict = weighed(stages(old), stages(new, batch=1 if new == old else 4), moved=0, problem=cheap)
    assert verdict.gain == pytest.approx(gain)
    assert verdict.change is change
    assert ("save" if gain >= 0 else "cost 25.0% more") in verdict.words


def test_both_plans_are_scored_by_the_reach_given() -> None:
    two_blocks = replace(
        PROBLEM,
        num_blocks=2,
        ramps=(0,),
        survival_N=(1.0, 0.5),
        bytes_per_sample_N=(0.0, 0.0),
        latency={"T4": LatencyTable(batches=(4,), block_s_NB=np.array([[0.2], [0.2]]), ramp_s_EB=np.zeros((1, 1)))},
    )
    current = (Stage(device="T4", replicas=1, splits=(Split(first=0, end=2, batch=4),)),)
    halves = (Split(first=0, end=1, batch=4, ramps=(0,)), Split(first=1, end=2, batch=4))
    cut = (Stage(device="T4", replicas=1, splits=halves),)
    # 0.4 s per batch; cut, 0.2 s and as much for the share that goes on.
    judged = partial(weigh, two_blocks, current, planned(cut, two_blocks), moved=0, start_s=0, period_s=1, least_gain=0)
    assert judged().gain == pytest.approx(0.4 / 0.3 - 1)
    assert judged(reach=lambda active: (1.0, 1.0)).gain == pytest.approx(0.0)
