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
from optimizer.problem import MinimizeCost, PlanProblem, Slo, Supply
from profiles.table import LatencyTable
from tests.optimizer.plain_problem import plain_problem

# One block takes 0.1 s at batch 1 and 0.2 s at batch 4: a replica does 10 or 20 a second.
PROBLEM = plain_problem(
    survival_N=(1.0,),
    latency={"T4": LatencyTable(batches=(1, 4), block_s_NB=np.array([[0.1, 0.2]]), ramp_s_EB=np.zeros((0, 2)))},
    devices={"T4": Supply(count=20, usd_per_hour=0.5)},
    slo=Slo(latency_s=10.0),
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


def test_a_gain_changes_the_plan_where_it_pays_for_the_change_and_is_the_least_gain() -> None:
    verdict = weighed(stages(10), stages(12), moved=2)
    assert verdict.gain == pytest.approx(0.2)  # 240/s instead of 200/s
    assert verdict.cost == pytest.approx(2 / 12 * 0.1)
    assert verdict.change
    assert verdict.words == (
        "changes the plan: the new one would give 20.0% more, moving 2 of 12 replicas costs 1.7%, "
        "and 2.0% is the least gain"
    )
    verdict = weighed(stages(10), stages(11), moved=9)
    assert (verdict.gain, verdict.cost) == pytest.approx((0.1, 9 / 110))
    assert not verdict.change
    assert weighed(stages(10), stages(11), moved=8).change
    assert weighed(stages(10), stages(11), moved=9, least_gain=0.01).change


def test_the_same_plan_is_no_change_unless_only_it_breaks_a_promise() -> None:
    verdict = weighed(None, stages(1), moved=1)
    assert verdict.change
    assert verdict.words == "takes the plan: there is none yet"
    verdict = weighed(stages(3), stages(3), moved=0)
    assert not verdict.change
    assert verdict.words == "keeps the plan: it is still the best"
    fewer = replace(PROBLEM, devices={"T4": Supply(count=9, usd_per_hour=0.5)})
    verdict = weighed(stages(10), stages(9), moved=9, problem=fewer)
    assert verdict.change
    assert verdict.words == "changes the plan: the present one breaks a promise: 10 T4 used, 9 there"
    tight = replace(PROBLEM, slo=Slo(latency_s=0.1))
    verdict = weighed(stages(10), stages(9), moved=0, problem=tight)
    assert verdict.broken == ()
    assert not verdict.change


@pytest.mark.parametrize(("slo_s", "change"), [(0.25, False), (0.21, True)])
def test_the_present_plan_may_use_the_slack(slo_s: float, change: bool) -> None:
    tight = replace(PROBLEM, slo=Slo(latency_s=slo_s, slack=0.2))  # a new plan must keep 0.2 s, this one takes 0.22
    assert weighed(stages(10), stages(10, batch=1), moved=0, problem=tight).change is change


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
    table = LatencyTable(batches=(4,), block_s_NB=np.array([[0.2], [0.2]]), ramp_s_EB=np.zeros((1, 1)))
    two_blocks = plain_problem(survival_N=(1.0, 0.5), latency={"T4": table}, slo=Slo(latency_s=10.0))
    current = (Stage(device="T4", replicas=1, splits=(Split(first=0, end=2, batch=4),)),)
    halves = (Split(first=0, end=1, batch=4, ramps=(0,)), Split(first=1, end=2, batch=4))
    cut = (Stage(device="T4", replicas=1, splits=halves),)
    # 0.4 s per batch; cut, 0.2 s and as much for the share that goes on.
    judged = partial(weigh, two_blocks, current, planned(cut, two_blocks), moved=0, start_s=0, period_s=1, least_gain=0)
    assert judged().gain == pytest.approx(0.4 / 0.3 - 1)
    assert judged(reach=lambda active: (1.0, 1.0)).gain == pytest.approx(0.0)
