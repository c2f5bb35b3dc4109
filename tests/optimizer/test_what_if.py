from __future__ import annotations

import pytest

from earlyexit.errors import PlanError
from optimizer.problem import MinimizeCost, Slo, Supply
from optimizer.problem_file import parse_problem
from optimizer.what_if import Axis, variants, with_batch_limit

PROBLEM = parse_problem(
    {
        "blocks": 1,
        "ramps": [],
        "survival": [1.0],
        "latency": {"V100": {"batch": [1, 2, 4], "block_s": [[0.001, 0.002, 0.003]], "ramp_s": []}},
        "devices": {"V100": {"count": 4, "usd_per_hour": 3}},
        "link": {"bandwidth_bytes_per_s": 1e9},
        "bytes_per_sample": 0,
        "slo": {"latency_s": 1, "slack": 0.2},
        "objective": {"maximize": "rate"},
    }
).problem


def test_an_slo_is_changed_and_keeps_its_slack() -> None:
    found = variants(PROBLEM, Axis(name="slo_s", values=(0.025, 0.05)))
    assert [each.value for each in found] == [0.025, 0.05]
    assert [each.problem.slo for each in found] == [Slo(latency_s=0.025, slack=0.2), Slo(latency_s=0.05, slack=0.2)]


def test_a_budget_and_a_rate_are_changed() -> None:
    [dear] = variants(PROBLEM, Axis(name="usd_per_hour", values=(10.0,)))
    [fast] = variants(PROBLEM, Axis(name="rate_per_s", values=(500.0,)))
    assert dear.problem.budget_usd_per_hour == 10
    assert fast.problem.objective == MinimizeCost(rate_per_s=500)


def test_the_count_of_one_device_is_changed() -> None:
    [more] = variants(PROBLEM, Axis(name="count", values=(8,), device="V100"))
    assert dict(more.problem.devices) == {"V100": Supply(count=8, usd_per_hour=3)}
    with pytest.raises(PlanError, match=r"unknown device 'T4'; the problem's devices are \['V100'\]"):
        variants(PROBLEM, Axis(name="count", values=(8,), device="T4"))
    with pytest.raises(PlanError, match="a device count must be at least 0, not -1"):
        variants(PROBLEM, Axis(name="count", values=(-1,), device="V100"))


@pytest.mark.parametrize(("limit", "batches"), [(1, (1,)), (3, (1, 2)), (4, (1, 2, 4)), (100, (1, 2, 4))])
def test_a_batch_limit_keeps_the_measured_sizes_below_it(limit: int, batches: tuple[int, ...]) -> None:
    table = with_batch_limit(PROBLEM, limit).latency["V100"]
    assert table.batches == batches
    assert table.block_s_NB.tolist() == [[0.001, 0.002, 0.003][: len(batches)]]
    assert table.ramp_s_EB.shape == (0, len(batches))


def test_a_batch_limit_below_every_measured_size_is_refused() -> None:
    with pytest.raises(PlanError, match=r"no batch size up to 0 is measured on V100; measured are \[1, 2, 4\]"):
        variants(PROBLEM, Axis(name="batch_limit", values=(2, 0)))


def test_an_axis_needs_values_and_a_device_only_for_a_count() -> None:
    with pytest.raises(PlanError, match="at least one value"):
        Axis(name="slo_s", values=())
    with pytest.raises(PlanError, match="that of a device"):
        Axis(name="count", values=(1,))
    with pytest.raises(PlanError, match="that of a device"):
        Axis(name="slo_s", values=(1,), device="V100")
