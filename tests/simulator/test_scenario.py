"""Tests of scenarios that cannot be simulated."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from earlyexit.errors import DataError, PlanError
from optimizer.plans.plan import Plan, Stage
from tests.simulator.tiny_cases import plan, problem, scenario, split, stage

WHOLE = plan(stage(1, split(0, 4)))
NETWORKS = Plan(stages=(stage(1, split(0, 2), split(2, 4)),), networks=(2, 4))


def on(device: str) -> Plan:
    return plan(Stage(device=device, replicas=1, splits=(split(0, 4),)))


@pytest.mark.parametrize(
    ("served_by", "count", "message"),
    [
        pytest.param(plan(stage(1, split(0, 3))), 8, "the plan has 3 blocks, the problem 4", id="blocks"),
        pytest.param(plan(stage(1, split(0, 4, ramps=(3,)))), 8, r"the plan has ramps \[3\]", id="ramps"),
        pytest.param(on("gpu"), 8, r"no latency of 'gpu'; the problem has that of \['cpu'\]", id="accelerator"),
        pytest.param(plan(stage(1, split(0, 4, 8))), 8, "measured up to batches of 4, not 8", id="batch"),
        pytest.param(NETWORKS, 8, r"the plan's networks end at \[2, 4\], the problem's at \[\]", id="networks"),
        pytest.param(WHOLE, 0, "the plan needs 1 cpu, the problem has 0", id="none there"),
    ],
)
def test_plans_that_do_not_fit_the_problem_are_refused(served_by: Plan, count: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        scenario(served_by, [0.0], problem=problem(count=count))


NO_SENSE: tuple[tuple[dict[str, Any], str], ...] = (
    ({"rows_N": np.array([], dtype=np.int64)}, "at least one input"),
    ({"rows_N": np.array([0, 4])}, "rows 0 to 3"),
    ({"rows_N": np.array([-1])}, "rows 0 to 3"),
    ({"duration_s": 0.0}, "duration_s"),
    ({"duration_s": math.inf}, "duration_s"),
    ({"duration_s": 0.5}, "the last arrival, at 1 s, is after the end, at 0.5 s"),
    ({"warm_up_s": 2.0}, "a warm-up of 2 s leaves nothing of 2 s"),
    ({"warm_up_s": -1.0}, "warm_up_s"),
    ({"inputs_per_request": 0}, "inputs_per_request"),
    ({"num_ingresses": 0}, "num_ingresses"),
    ({"calls_per_replica": 0}, "calls_per_replica"),
    ({"inputs_per_request": 3, "max_queued": 2}, "no request of 3 inputs fits into 2"),
    ({"slo_s": 0.0}, "slo_s"),
    ({"slo_s": math.nan}, "slo_s"),
    ({"arrivals_s": [0.0, math.nan], "duration_s": 3.0}, "arrivals must be finite"),
    ({"arrivals_s": [-0.5, 1.0]}, "arrivals must not be before 0 s, as -0.5 s is"),
    ({"arrivals_s": [0.0, 2.0, 1.0]}, "arrivals must ascend: 1 s, the 3th, comes after 2 s"),
)


@pytest.mark.parametrize(("options", "words"), NO_SENSE, ids=[words for _, words in NO_SENSE])
def test_invalid_inputs_arrivals_and_numbers_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError, match=words):
        scenario(WHOLE, **({"arrivals_s": [0.0, 1.0]} | options))
