"""E3, figures 14 and 15: the accelerators and the cost of a fixed rate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from experiments.problems import PLENTY, RATE_PER_S
from experiments.recorded_exits import BERT12_SST2
from experiments.studies.e3_case import LARGEST_BATCH, even_exits, flat, like_e3
from experiments.studies.picture import Bars, Values
from experiments.studies.sides import (
    BATCHES,
    SIDES,
    Workload,
    equal_cluster,
    facing,
    mixed_cluster,
    poisson,
    serve,
    sst2,
)
from experiments.studies.study import Comparison, Effort, StudyResult, Table, declare, facts, largest_ratios, ratio
from experiments.sustained import SHARE
from optimizer.plans.plan import Stage
from optimizer.problems.problem import MaximizeRate, MinimizeCost, PlanProblem, Supply
from optimizer.problems.what_if import with_batch_limit
from optimizer.search.decision import Planned, Strategy
from optimizer.search.planner import solve

# The cheapest plan of a strategy that sustains a rate, by the planner and then by simulation.

PRECISION = 0.004
"""Relative distance of the last two rates; one accelerator of 50 is five times that."""
STEP = 1.05
"""Growth of the first bracket."""
CHEAPEST_MOST = 4.0
"""Largest factor on the rate. If the plan for that rate does not sustain the required rate, no plan does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """The accelerators of a strategy for a rate."""

    planned: Planned
    """The cheapest of the tried plans that sustained the rate."""
    share: float
    """Share of inputs that were in time under this plan."""
    proposed: Planned
    """The planner's plan for the rate."""
    proposed_share: float

    @property
    def usd_per_hour(self) -> float:
        return self.planned.figures.usd_per_hour

    @property
    def number(self) -> int:
        """The number of accelerators."""
        return sum(stage.replicas for stage in self.planned.stages)

    def cells(self) -> tuple[str | float, ...]:
        """Returns the cells of both plans: accelerators, USD per hour, and the share in time."""
        pairs = ((self.planned, self.share), (self.proposed, self.proposed_share))
        return tuple(
            cell
            for planned, share in pairs
            for cell in (_told(planned.stages), planned.figures.usd_per_hour, f"{share:.1%}")
        )


def _told(stages: tuple[Stage, ...]) -> str:
    counts = Counter[str]()
    for stage in stages:
        counts[stage.device] += stage.replicas
    return " + ".join(f"{count} {device}" for device, count in sorted(counts.items(), reverse=True))


def need(problem: PlanProblem, side: Strategy, inputs: Workload, effort: Effort) -> Need | None:
    """Returns the cheapest plan that sustains the rate in simulation, found by planning for higher or lower rates.

    The cost model charges a whole batch of 1 for a fraction of one, and ignores randomness. Simulation does neither.
    None if the planner has no plan for the rate, or none that sustains it.
    """
    shares: dict[tuple[Stage, ...], float] = {}  # many rates have the same plan

    @cache
    def plan_for(asked_per_s: float) -> Planned | None:
        decision = solve(replace(problem, objective=MinimizeCost(rate_per_s=asked_per_s)), side)
        return decision if isinstance(decision, Planned) else None

    def share(planned: Planned) -> float:
        if planned.stages not in shares:
            outcome = serve(poisson(problem, planned, inputs, RATE_PER_S, effort))
            shares[planned.stages] = outcome.figures().in_slo_share
        return shares[planned.stages]

    def holds(asked_per_s: float) -> bool:
        planned = plan_for(asked_per_s)
        return planned is not None and share(planned) >= SHARE

    proposed, asked_per_s = plan_for(RATE_PER_S), least_that_holds(RATE_PER_S, holds)
    if proposed is None or asked_per_s is None:
        return None
    held = plan_for(asked_per_s)
    assert held is not None, "it was simulated"
    return Need(planned=held, share=share(held), proposed=proposed, proposed_share=share(proposed))


def least_that_holds(rate_per_s: float, holds: Callable[[float], bool]) -> float | None:
    """Returns the least rate whose plan sustains the required one; None if `CHEAPEST_MOST` times the rate does not.

    `holds`: whether the plan for a rate sustains the required one.
    """
    low_per_s, high_per_s = _bracket(rate_per_s, holds)
    if high_per_s is None:
        return None
    while high_per_s / low_per_s > 1 + PRECISION:
        middle_per_s = (low_per_s * high_per_s) ** 0.5
        if holds(middle_per_s):
            high_per_s = middle_per_s
        else:
            low_per_s = middle_per_s
    return high_per_s


def _bracket(rate_per_s: float, holds: Callable[[float], bool]) -> tuple[float, float | None]:
    """Returns a rate whose plan does not sustain the required one, and a rate whose plan does."""
    asked_per_s, step = rate_per_s, STEP
    if holds(asked_per_s):
        while asked_per_s > rate_per_s / CHEAPEST_MOST and holds(asked_per_s / step):
            asked_per_s, step = asked_per_s / step, step**2
        return asked_per_s / step, asked_per_s
    while asked_per_s < rate_per_s * CHEAPEST_MOST:
        if holds(asked_per_s * step):
            return asked_per_s, asked_per_s * step
        asked_per_s, step = asked_per_s * step, step**2
    return asked_per_s, None


# The need of every side for 6,000 inputs/s, by batch limit: the form of E3's figures 14 and 15 (section 5.3).

BASELINES = ("stock", "early-exit")
Needs = Mapping[str, tuple[Need | None, ...]]
"""By side, one per batch limit; None if no plan sustains the rate."""
Row = Mapping[str, Need | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedRate:
    """All needs."""

    batches: tuple[int, ...]
    needs: Needs
    cases: Mapping[str, Needs]
    """Other circumstances, by name, at the largest batch."""

    @property
    def by_label(self) -> dict[str, Row]:
        """Returns the needs by "batch 8" and side; then every case."""
        rows: dict[str, Row] = {
            f"batch {batch}": {side: row[at] for side, row in self.needs.items()}
            for at, batch in enumerate(self.batches)
        }
        return rows | {
            f"batch {self.batches[-1]}, {name}": {side: row[-1] for side, row in needs.items()}
            for name, needs in self.cases.items()
        }


def fixed_rate(cluster: PlanProblem, published: PlanProblem, inputs: Workload, effort: Effort) -> FixedRate:
    """Returns the need of every side at each batch limit; full effort adds other cases at the largest.

    The cases are accelerators as fast as published; E3's, which a batch of 8 does not fill; also its exits and ramps.
    """
    cases = {
        "published speed": (published, inputs),
        "flat times": (flat(cluster, LARGEST_BATCH), inputs),
        "E3's circumstances": (like_e3(cluster), even_exits(cluster)),
    }
    batches = BATCHES[effort]
    return FixedRate(
        batches=batches,
        needs=_needs(cluster, inputs, batches, effort),
        cases={name: _needs(*case, batches[-1:], effort) for name, case in cases.items()} if effort == "full" else {},
    )


def _needs(cluster: PlanProblem, inputs: Workload, batches: Sequence[int], effort: Effort) -> Needs:
    """Plans with more accelerators than the rate needs."""
    plenty = {name: replace(supply, count=PLENTY) for name, supply in cluster.devices.items()}
    problem = facing(replace(cluster, devices=plenty), inputs)
    limited = [with_batch_limit(problem, batch) for batch in batches]
    return {side: tuple(need(each, side, inputs, effort) for each in limited) for side in SIDES}


def dearer(row: Row) -> dict[str, float | None]:
    """Returns the cost of each baseline relative to e3's."""
    usd = {side: None if each is None else each.usd_per_hour for side, each in row.items()}
    return {other: ratio(usd[other], usd["e3"]) for other in BASELINES}


def usd_per_hour(needs: Needs) -> dict[str, tuple[float | None, ...]]:
    """Returns the cost by side."""
    return {side: tuple(None if each is None else each.usd_per_hour for each in row) for side, row in needs.items()}


def result_of(found: FixedRate, title: str, unit: str, series: Values) -> StudyResult:
    """Returns the baselines' costs over e3's, the largest batch first, then other cases, and the devices."""
    rows, usd, by_batch = found.by_label, usd_per_hour(found.needs), len(found.batches)
    labels = [*reversed(list(rows)[:by_batch]), *list(rows)[by_batch:]]
    return StudyResult(
        comparisons=tuple(
            Comparison(f"{other} / e3, {label}", value)
            for label in labels
            for other, value in dearer(rows[label]).items()
        ),
        pictures=(Bars(title, "largest batch", unit, tuple(map(str, found.batches)), series),),
        e3=largest_ratios(usd, "e3", lower_is_better=True),
        best=largest_ratios(usd, "best", lower_is_better=True),
        tables=(
            Table(
                "What each side holds the rate with, and what the cost model asks for",
                ("", "side", "buys", "USD/h", "in time", "cost model", "USD/h", "in time"),
                tuple(
                    (label, side, *(["no plan"] if each is None else [*each.cells()]))
                    for label, row in rows.items()
                    for side, each in row.items()
                ),
            ),
        ),
    )


def fig14_run(effort: Effort) -> StudyResult:
    """Computes the V100 for 6,000 inputs/s, by side and batch limit; quick effort has one limit and no other cases."""
    found = fixed_rate(equal_cluster(), equal_cluster(1.0), sst2(), effort)
    numbers = {side: tuple(None if each is None else each.number for each in row) for side, row in found.needs.items()}
    return result_of(found, f"V100 that hold {RATE_PER_S:,.0f} inputs/s", "V100", numbers)


FIG14_STUDY = declare("fig14_gpus_needed", fig14_run, needs=(BERT12_SST2,))

LEAST, FIG15_MOST = 1.35, 1.78
"""Relative costs of the others. E3's abstract has 1.78 x, and section 5.3 has 78 %."""


def fig15_run(effort: Effort) -> StudyResult:
    """Computes the least cost of 6,000 inputs/s on E3's three types, and a baseline's cost on several types.

    The extremes are over all batch limits and both baselines; the paper does not state which it means.
    """
    cluster, inputs = mixed_cluster(), sst2()
    found = fixed_rate(cluster, mixed_cluster(1.0), inputs, effort)
    title = f"Least cost of {RATE_PER_S:,.0f} inputs/s on V100, P100 and K80"
    result = result_of(found, title, "USD/h", usd_per_hour(found.needs))
    rows = [found.by_label[f"batch {batch}"] for batch in found.batches]
    times = [each for row in rows for each in dearer(row).values() if each is not None]
    in_fractions = {}
    for batch in found.batches:
        device, usd = least_in_fractions(facing(with_batch_limit(cluster, batch), inputs))
        in_fractions[f"stock at batch {batch} in fractions of a {device}, the cheapest per input (USD/h)"] = usd
    return replace(
        result,
        comparisons=(
            Comparison("a baseline / e3, most", max(times, default=None), FIG15_MOST),
            Comparison("a baseline / e3, least", min(times, default=None), LEAST),
            *result.comparisons,
        ),
        tables=(*result.tables, facts(in_fractions)),
    )


def least_in_fractions(problem: PlanProblem) -> tuple[str, float]:
    """Returns the cheapest accelerator type for stock, and USD per hour for the rate with fractional accelerators.

    By the cost model. No mix of types that each run the whole model costs less.
    """
    costs = {}
    for device, supply in problem.devices.items():
        one = {device: Supply(count=1, usd_per_hour=supply.usd_per_hour)}
        decision = solve(replace(problem, devices=one, objective=MaximizeRate()), "stock")
        if isinstance(decision, Planned):
            costs[device] = RATE_PER_S / decision.figures.rate_per_s * supply.usd_per_hour
    device = min(costs, key=lambda name: costs[name])
    return device, costs[device]


FIG15_STUDY = declare("fig15_cost", fig15_run, needs=(BERT12_SST2,))
