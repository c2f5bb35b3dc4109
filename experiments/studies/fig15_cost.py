"""E3, figure 15: what 6,000 inputs/s cost least on V100, P100 and K80.

Planned, then simulated, as figure 14.
"""

from __future__ import annotations

from dataclasses import replace

from experiments.problems import RATE_PER_S
from experiments.recorded_exits import BERT12_SST2
from experiments.studies.fixed_rate import FixedRate, dearer, e3_cases, fixed_rate, result_of, usd_per_hour
from experiments.studies.sides import Workload, facing, mixed_cluster, sst2
from experiments.studies.study import Comparison, Effort, StudyResult, Table, declare, facts
from optimizer.decision import Planned
from optimizer.planner import solve
from optimizer.problem import MaximizeRate, PlanProblem, Supply
from optimizer.what_if import with_batch_limit

LEAST, MOST = 1.35, 1.78
"""How many times as much the others cost; E3's abstract says 1.78 x where section 5.3 says 78 %."""


def compare(found: FixedRate, cluster: PlanProblem, inputs: Workload) -> StudyResult:
    """Costs; the cluster and its inputs, for what a baseline could cost on several types.

    The extremes are over all batch limits and both baselines; the paper does not say which of them it means.
    """
    title = f"Least cost of {found.rate_per_s:,.0f} inputs/s on V100, P100 and K80"
    result = result_of(found, title, "USD/h", usd_per_hour(found.needs))
    rows = [found.by_label[f"batch {batch}"] for batch in found.batches]
    times = [each for row in rows for each in dearer(row).values() if each is not None]
    return replace(
        result,
        comparisons=(
            Comparison("a baseline / e3, most", max(times, default=None), MOST),
            Comparison("a baseline / e3, least", min(times, default=None), LEAST),
            *result.comparisons,
        ),
        tables=(*result.tables, _in_fractions(cluster, inputs, found)),
    )


def _in_fractions(cluster: PlanProblem, inputs: Workload, found: FixedRate) -> Table:
    """Whether the baselines, each on one type of accelerator, lose by that."""
    rows: dict[str, float] = {}
    for batch in found.batches:
        device, usd = least_in_fractions(facing(with_batch_limit(cluster, batch), inputs), found.rate_per_s)
        rows[f"stock at batch {batch} in fractions of a {device}, the cheapest per input (USD/h)"] = usd
    return facts(rows)


def least_in_fractions(problem: PlanProblem, rate_per_s: float) -> tuple[str, float]:
    """The type of accelerator that is cheapest for stock, and USD per hour for the rate if parts of it could be had.

    By the cost model. No mix of types that each run the whole model costs less.
    """
    costs = {}
    for device, supply in problem.devices.items():
        one = {device: Supply(count=1, usd_per_hour=supply.usd_per_hour)}
        decision = solve(replace(problem, devices=one, objective=MaximizeRate()), "stock")
        if isinstance(decision, Planned):
            costs[device] = rate_per_s / decision.figures.rate_per_s * supply.usd_per_hour
    device = min(costs, key=lambda name: costs[name])
    return device, costs[device]


def run(effort: Effort) -> StudyResult:
    """On E3's three types; quick effort has one batch limit and no other cases."""
    cluster, inputs = mixed_cluster(), sst2()
    cases = e3_cases(cluster, mixed_cluster(1.0), inputs) if effort == "full" else {}
    return compare(fixed_rate(cluster, inputs, cases, effort, rate_per_s=RATE_PER_S), cluster, inputs)


STUDY = declare(__name__, run, needs=(BERT12_SST2,))
