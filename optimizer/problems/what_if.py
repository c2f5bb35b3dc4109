"""What-if variants of a problem: one number is changed, and the plan is solved again for each value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from earlyexit.errors import PlanError
from optimizer.problems.problem import IN_TIME, MAX_COUNT, MaximizeRate, MinimizeCost, PlanProblem
from profiles.table import MAX_BATCH

AxisName = Literal["slo_s", "batch_limit", "usd_per_hour", "count", "rate_per_s"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """The number that is changed, and its values."""

    name: AxisName
    values: tuple[float, ...]
    device: str | None = None
    """For `count`: the device type."""

    def __post_init__(self) -> None:
        limit = {"batch_limit": MAX_BATCH, "count": MAX_COUNT}.get(self.name)
        if limit is not None and max(self.values) > limit:
            raise PlanError(f"a {self.name.replace('_', ' ')} is at most {limit}, not {max(self.values)}")


def variants(problem: PlanProblem, axis: Axis) -> tuple[PlanProblem, ...]:
    """Returns the problem at each value; raises PlanError for an invalid value, and without prices to plan by."""
    has_prices = any(supply.usd_per_hour for supply in problem.devices.values())
    becomes_cost = axis.name == "rate_per_s" and isinstance(problem.objective, MaximizeRate)
    if not has_prices and (axis.name == "usd_per_hour" or becomes_cost):
        raise PlanError("plans would be made by cost, and no device has a usd_per_hour above 0")
    return tuple(_changed(problem, axis, value) for value in axis.values)


def with_batch_limit(problem: PlanProblem, limit: float) -> PlanProblem:
    """Returns the problem with batch sizes up to `limit`, and the devices that have any; raises PlanError for none."""
    tables = {}
    for device, table in problem.latency.items():
        if kept := tuple(batch for batch in table.batches if batch <= limit):  # the first ones, because batches ascend
            block_s_NB, ramp_s_EB = table.block_s_NB[:, : len(kept)], table.ramp_s_EB[:, : len(kept)]
            tables[device] = replace(table, batches=kept, block_s_NB=block_s_NB, ramp_s_EB=ramp_s_EB)
    devices = {device: supply for device, supply in problem.devices.items() if device in tables}
    available = {device: supply for device, supply in problem.devices.items() if supply.count} or problem.devices
    if not available.keys() & devices.keys():
        measured = ", ".join(f"{device}: {list(problem.latency[device].batches)}" for device in available)
        raise PlanError(f"no batch size up to {limit:.15g} is measured on any device; measured are {measured}")
    if problem.generation is not None:  # keeps larger measured batches, because batches also hold skipped tokens
        tables = {device: problem.latency[device] for device in tables}
        generation = replace(problem.generation, batch_limit=min(limit, problem.generation.batch_limit))
        return replace(problem, latency=tables, devices=devices, generation=generation)
    return replace(problem, latency=tables, devices=devices)


def _changed(problem: PlanProblem, axis: Axis, value: float) -> PlanProblem:
    match axis.name:
        case "slo_s":
            return replace(problem, slo=replace(problem.slo, latency_s=value))
        case "batch_limit":
            return with_batch_limit(problem, value)
        case "usd_per_hour":
            return replace(problem, budget_usd_per_hour=value)
        case "rate_per_s":
            if isinstance(problem.objective, MaximizeRate):
                return replace(problem, objective=MinimizeCost(rate_per_s=value, in_time=IN_TIME))
            return problem.with_rate(value)
        case "count":
            assert axis.device is not None
            if axis.device not in problem.devices:
                raise PlanError(f"unknown device {axis.device!r}; the problem's devices are {sorted(problem.devices)}")
            return problem.with_counts({axis.device: int(value)})
