from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from earlyexit.errors import PlanError
from optimizer.problem import MinimizeCost, PlanProblem, Slo, Supply
from optimizer.problem_file import parse_problem
from optimizer.what_if import Axis, AxisName, variants, with_batch_limit
from profiles.table import LatencyTable

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
    with pytest.raises(
        PlanError, match=r"no batch size up to 0 is measured on any device; measured are V100: \[1, 2, 4\]"
    ):
        variants(PROBLEM, Axis(name="batch_limit", values=(2, 0)))


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


def test_a_batch_limit_that_leaves_only_devices_that_are_not_there_is_refused() -> None:
    with pytest.raises(PlanError, match=r"no batch size up to 4 is .* measured are T4: \[8, 16\]$"):
        with_batch_limit(with_t4(("V100", 0), ("T4", 9)), 4)
    nothing = with_t4(("V100", 0))
    assert dict(with_batch_limit(nothing, 4).devices) == dict(nothing.devices)


@pytest.mark.parametrize(("name", "device"), [("count", "V100"), ("batch_limit", None)])
def test_counts_and_batch_limits_are_bounded(name: AxisName, device: str | None) -> None:
    assert Axis(name=name, values=(1_000_000,), device=device).values == (1_000_000,)
    with pytest.raises(PlanError, match=f"a {name.replace('_', ' ')} is at most 1000000, not {2**70}"):
        Axis(name=name, values=(1, 2**70), device=device)


def test_an_axis_needs_values_and_a_device_only_for_a_count() -> None:
    with pytest.raises(PlanError, match="at least one value"):
        Axis(name="slo_s", values=())
    with pytest.raises(PlanError, match="that of a device"):
        Axis(name="count", values=(1,))
    with pytest.raises(PlanError, match="that of a device"):
        Axis(name="slo_s", values=(1,), device="V100")
