"""What cannot be simulated."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from earlyexit.errors import DataError, PlanError
from optimizer.plan import Plan, Stage
from tests.simulator.tiny_cases import plan, problem, scenario, split, stage

WHOLE = plan(stage(1, split(0, 4)))


def on(device: str) -> Plan:
    return plan(Stage(device=device, replicas=1, splits=(split(0, 4),)))


@pytest.mark.parametrize(
    ("served_by", "message"),
    [
        pytest.param(plan(stage(1, split(0, 3))), "the plan has 3 blocks, the problem 4", id="blocks"),
        pytest.param(plan(stage(1, split(0, 4, ramps=(3,)))), r"the plan has ramps \[3\], the problem", id="ramps"),
        pytest.param(on("gpu"), r"no latency of 'gpu'; the problem has that of \['cpu'\]", id="accelerator"),
        pytest.param(plan(stage(1, split(0, 4, 8))), "cpu was measured up to batches of 4, not 8", id="batch"),
        pytest.param(
            plan(stage(5, split(0, 2)), stage(4, split(2, 4))), "the plan needs 9 cpu, the problem has 8", id="too many"
        ),
    ],
)
def test_plans_that_do_not_fit_the_problem_are_refused(served_by: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        scenario(served_by, [0.0])


def test_accelerators_that_are_measured_but_not_there_are_refused() -> None:
    with pytest.raises(PlanError, match="the plan needs 1 cpu, the problem has 0"):
        scenario(WHOLE, [0.0], problem=problem(count=0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        pytest.param({"rows_N": np.array([], dtype=np.int64)}, "at least one input is needed", id="no rows"),
        pytest.param({"rows_N": np.array([0, 4])}, "inputs are rows 0 to 3 of the decisions", id="unknown row"),
        pytest.param({"rows_N": np.array([-1])}, "inputs are rows 0 to 3 of the decisions", id="row below 0"),
        pytest.param({"duration_s": 0.0}, "duration_s must be a finite number above 0, not 0.0", id="no time"),
        pytest.param({"duration_s": math.inf}, "duration_s must be a finite number above 0, not inf", id="for ever"),
        pytest.param({"duration_s": 0.5}, "the last arrival, at 1 s, is after the end, at 0.5 s", id="after the end"),
        pytest.param({"warm_up_s": 2.0}, "a warm-up of 2 s leaves nothing of 2 s", id="all warm-up"),
        pytest.param({"warm_up_s": -1.0}, "warm_up_s must be a finite number of seconds from 0 on", id="warm-up"),
        pytest.param({"entry_s": math.nan}, "entry_s must be a finite number of seconds from 0 on, not nan", id="nan"),
        pytest.param({"answer_s": math.inf}, "answer_s must be a finite number of seconds from 0 on", id="endless"),
        pytest.param({"inputs_per_request": 0}, "inputs_per_request must be at least 1, not 0", id="empty requests"),
        pytest.param({"num_ingresses": 0}, "num_ingresses must be at least 1, not 0", id="no ingress"),
        pytest.param({"calls_per_replica": 0}, "calls_per_replica must be at least 1, not 0", id="no calls"),
        pytest.param({"slo_s": 0.0}, "slo_s must be above 0, not 0.0", id="no SLO is infinite, not 0"),
        pytest.param({"slo_s": math.nan}, "slo_s must be above 0, not nan", id="SLO nan"),
    ],
)
def test_inputs_and_numbers_that_make_no_sense_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        scenario(WHOLE, [0.0, 1.0], **options)


@pytest.mark.parametrize(
    ("arrivals_s", "message"),
    [
        pytest.param([0.0, math.nan], "arrivals must be finite numbers of seconds", id="nan"),
        pytest.param([-0.5, 1.0], "arrivals must not be before 0 s, as -0.5 s is", id="before the start"),
        pytest.param([0.0, 2.0, 1.0], "arrivals must ascend: 1 s, the 3th, comes after 2 s", id="not in order"),
    ],
)
def test_arrivals_ascend_from_the_start(arrivals_s: list[float], message: str) -> None:
    with pytest.raises(DataError, match=message):
        scenario(WHOLE, arrivals_s, duration_s=3.0)


def test_a_request_may_come_at_the_very_end_and_none_must_come() -> None:
    assert scenario(WHOLE, [0.0, 3.0], duration_s=3.0, inputs_per_request=4).num_inputs == 8
    assert scenario(WHOLE, []).num_inputs == 0
