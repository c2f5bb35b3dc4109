from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from optimizer.problem import PlanProblem, Slo, Supply
from optimizer.what_if import Axis, variants, with_batch_limit
from profiles.table import LatencyTable
from tests.optimizer.plain_problem import plain_problem

TABLE = LatencyTable(batches=(1, 2, 4), block_s_NB=np.array([[0.001, 0.002, 0.003]]), ramp_s_EB=np.ones((0, 3)))
PROBLEM = plain_problem(survival_N=(1.0,), latency={"V100": TABLE}, slo=Slo(latency_s=1.0, slack=0.2))


def test_an_slo_keeps_its_slack_and_a_batch_limit_devices_that_are_not_there() -> None:
    found = variants(PROBLEM, Axis(name="slo_s", values=(0.025, 0.05)))
    assert [each.value for each in found] == [0.025, 0.05]
    assert [each.problem.slo for each in found] == [Slo(latency_s=0.025, slack=0.2), Slo(latency_s=0.05, slack=0.2)]
    nothing = with_t4(("V100", 0))
    assert dict(with_batch_limit(nothing, 4).devices) == dict(nothing.devices)


COARSE = LatencyTable(batches=(8, 16), block_s_NB=np.array([[0.004, 0.006]]), ramp_s_EB=np.ones((0, 2)))


def with_t4(*devices: tuple[str, int]) -> PlanProblem:
    """The problem with a T4 measured from a batch of 8 on, and these counts."""
    counts = {device: Supply(count=count) for device, count in devices}
    return replace(PROBLEM, latency={**PROBLEM.latency, "T4": COARSE}, devices=counts)


@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(with_t4(("V100", 4)), id="no device of the problem"),
        pytest.param(with_t4(("V100", 4), ("T4", 0)), id="none of it there"),
        pytest.param(with_t4(("V100", 4), ("T4", 9)), id="another device does it"),
    ],
)
def test_a_batch_limit_drops_the_devices_that_were_not_measured_up_to_it(problem: PlanProblem) -> None:
    limited = with_batch_limit(problem, 4)
    assert (set(limited.latency), set(limited.devices)) == ({"V100"}, {"V100"})
    assert set(with_batch_limit(problem, 8).latency) == {"V100", "T4"}
