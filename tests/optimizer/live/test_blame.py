"""Plans that failed are left alone while their problem stays about the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from earlyexit.network.split import Split
from optimizer.live.trial import Blame, is_blamed
from optimizer.plan import Stage
from optimizer.problem import Link, MaximizeRate, MinimizeCost, PlanProblem, Slo, Supply
from profiles.table import LatencyTable

PROBLEM = PlanProblem(
    num_blocks=2,
    ramps=(0,),
    survival_N=(1.0, 0.5),
    latency={"T4": LatencyTable(batches=(4,), block_s_NB=np.ones((2, 1)), ramp_s_EB=np.ones((1, 1)))},
    devices={"T4": Supply(count=4)},
    link=Link(bandwidth_bytes_per_s=1e9),
    bytes_per_sample_N=(0.0, 0.0),
    slo=Slo(latency_s=10.0),
    objective=MinimizeCost(rate_per_s=100.0),
)
FAILED = (Stage(device="T4", replicas=2, splits=(Split(first=0, end=2, batch=4),)),)
OTHER = (Stage(device="T4", replicas=3, splits=(Split(first=0, end=2, batch=4),)),)
BLAMED = (Blame(stages=FAILED, problem=PROBLEM, until=15),)


def test_a_plan_that_failed_is_blamed_and_no_other() -> None:
    assert is_blamed(BLAMED, FAILED, PROBLEM)
    assert not is_blamed(BLAMED, OTHER, PROBLEM)


@pytest.mark.parametrize(
    ("now", "another"),
    [
        pytest.param(replace(PROBLEM, survival_N=(1.0, 0.55)), False, id="a little survival"),
        pytest.param(replace(PROBLEM, survival_N=(1.0, 0.65)), True, id="much survival"),
        pytest.param(replace(PROBLEM, objective=MinimizeCost(rate_per_s=110.0)), False, id="a little rate"),
        pytest.param(replace(PROBLEM, objective=MinimizeCost(rate_per_s=75.0)), True, id="much rate"),
        pytest.param(replace(PROBLEM, objective=MaximizeRate()), True, id="another objective"),
        pytest.param(replace(PROBLEM, devices={"T4": Supply(count=3)}), True, id="fewer accelerators"),
        pytest.param(replace(PROBLEM, slo=Slo(latency_s=5.0)), True, id="another SLO"),
    ],
)
def test_a_clearly_changed_problem_lifts_the_blame(now: PlanProblem, another: bool) -> None:
    assert is_blamed(BLAMED, FAILED, now) is not another
