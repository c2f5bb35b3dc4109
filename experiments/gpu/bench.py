"""The comparison: three sides and two variants of them at equal batch limits, in turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np

from experiments.gpu.costs import measure_costs, measured_sizes, num_inputs, saturated_s
from experiments.gpu.plans import (
    Plan,
    can_plan,
    early_exit,
    planned,
    predicted_per_s,
    problem_of,
    serial_every_ramp,
    stock,
)
from experiments.gpu.side import Side, poisson_arrivals
from experiments.gpu.workbench import Workbench, no_collections
from optimizer.problem import PlanProblem
from profiles.table import LatencyTable

LOAD = 0.8
"""Of a side's own saturated rate: what arrives while latencies are measured."""
FEWEST_ARRIVALS = 20
"""Only a dry run, which tells no figures, has so few."""
COST_SHARE = 0.2
"""Of a run's seconds: how long each of the many runs takes that measure costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One side at one batch limit."""

    model: str
    batch: int
    side: str
    splits: str
    """As `Plan` says them."""
    samples_per_s: float
    """Median of the rounds, all inputs queued."""
    rounds_per_s: tuple[float, ...]
    predicted_per_s: float
    """By the planner's cost model, on the costs measured before."""
    over_early_exit: float
    over_stock: float
    """Its rate over that side's."""
    offered_per_s: float
    """Poisson arrivals while latencies are measured."""
    p50_s: float
    p99_s: float
    """From arrival to answer."""
    mean_batch: float
    """Inputs in a batch as it starts, saturated."""
    compute_share: float
    gather_share: float
    """Of the wall time of a saturated run of its own, metered."""

    @property
    def wait_share(self) -> float:
        """What is left: the device waits for the host, or the meter."""
        return 1 - self.compute_share - self.gather_share


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """All of one model."""

    rows: tuple[Row, ...]
    costs: LatencyTable


def run_model(bench: Workbench, report: Callable[[Row], None]) -> Outcome:
    """Measure costs, choose cuts by them, and compare; every row is reported as soon as it is known."""
    options = bench.options
    costs = measure_costs(bench, measured_sizes(options.batches), COST_SHARE * options.seconds)
    rows: list[Row] = []
    for batch in options.batches:
        for row in _compare(bench, problem_of(_up_to(costs, batch), bench.exits.ramps, bench.exits.survival), batch):
            report(row)
            rows.append(row)
    return Outcome(rows=tuple(rows), costs=costs)


def plans_of(problem: PlanProblem, batch: int) -> tuple[Plan, ...]:
    """Stock, early-exit, and cut everywhere; where it can plan also the best ramps and the best cuts."""
    blocks, ramps = problem.num_blocks, problem.ramps
    return (
        stock(blocks, batch),
        early_exit(blocks, ramps, batch),
        *(planned(problem) if can_plan() else ()),
        serial_every_ramp(blocks, ramps, batch),
    )


def _up_to(costs: LatencyTable, batch: int) -> LatencyTable:
    """Without the sizes above a batch limit."""
    last = costs.batches.index(batch) + 1
    return LatencyTable(
        batches=costs.batches[:last], block_s_NB=costs.block_s_NB[:, :last], ramp_s_EB=costs.ramp_s_EB[:, :last]
    )


def _compare(bench: Workbench, problem: PlanProblem, batch: int) -> list[Row]:
    plans = plans_of(problem, batch)
    bench.prepare(plans)
    sides = [bench.side(plan) for plan in plans]
    rates = _interleaved_rates(bench, sides, batch)
    middle = {name: median(each) for name, each in rates.items()}
    return [
        replace(
            _row(bench, side, batch, tuple(rates[side.plan.name]), predicted_per_s(problem, side.plan)),
            over_early_exit=middle[side.plan.name] / middle["early-exit"],
            over_stock=middle[side.plan.name] / middle["stock"],
        )
        for side in sides
    ]


def _interleaved_rates(bench: Workbench, sides: list[Side], batch: int) -> dict[str, list[float]]:
    rates: dict[str, list[float]] = {side.plan.name: [] for side in sides}
    numbers = {side.plan.name: num_inputs(bench, side, batch, bench.options.seconds) for side in sides}
    for _ in range(bench.options.rounds):
        for side in sides:
            number = numbers[side.plan.name]
            rates[side.plan.name].append(number / saturated_s(bench, side, number))
    return rates


def _row(bench: Workbench, side: Side, batch: int, rates: tuple[float, ...], predicted: float) -> Row:
    plan, rate_per_s = side.plan, median(rates)
    mean_batch = side.log.mean_batch
    latency_s_N = _latencies(bench, side, LOAD * rate_per_s)
    compute_share, gather_share = _shares(bench, plan, rate_per_s)
    return Row(
        model=bench.size.name,
        batch=batch,
        side=plan.name,
        splits=str(plan),
        samples_per_s=rate_per_s,
        rounds_per_s=rates,
        predicted_per_s=predicted,
        over_early_exit=1.0,
        over_stock=1.0,
        offered_per_s=LOAD * rate_per_s,
        p50_s=float(np.percentile(latency_s_N, 50)),
        p99_s=float(np.percentile(latency_s_N, 99)),
        mean_batch=mean_batch,
        compute_share=compute_share,
        gather_share=gather_share,
    )


def _latencies(bench: Workbench, side: Side, rate_per_s: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    number = max(int(rate_per_s * bench.options.seconds), FEWEST_ARRIVALS)
    members = bench.members(number)
    with no_collections():
        return side.serve(members, poisson_arrivals(number, rate_per_s, bench.rng))


def _shares(bench: Workbench, plan: Plan, rate_per_s: float) -> tuple[float, float]:
    """Of computing and gathering, in a run of half the seconds."""
    side, meter = bench.metered_side(plan)
    number = max(int(rate_per_s * bench.options.seconds / 2), plan.splits[0].batch)
    wall_s = saturated_s(bench, side, number)
    return meter.seconds("compute") / wall_s, meter.seconds("gather") / wall_s
