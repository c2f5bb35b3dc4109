"""E3, figure 16: a service whose inputs become harder, with and without plans that follow."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from experiments.controlled import Closed, Control, Controlled, Mix, Order, rows_in_turn, simulate_controlled
from experiments.problems import ENTROPY
from experiments.recorded_exits import BERT12_SST2, bert12_sst2, mixed_records
from experiments.studies.picture import Bars, Lines
from experiments.studies.sides import E3_SLOWER, SEED, Workload, equal_cluster, facing, mixed_cluster, plan_of, sst2
from experiments.studies.study import Comparison, Effort, StudyResult, Table, declare, largest_ratios, ratio
from optimizer.cost.evaluate import evaluate
from optimizer.cost.rescore import joint_reach, rescore
from optimizer.plans.plan import Plan
from optimizer.problems.problem import PlanProblem, Reach
from optimizer.problems.what_if import with_batch_limit
from optimizer.search.decision import NoPlan, Strategy
from optimizer.search.planner import solve
from profiles.records import ExitRecords
from simulator.scenario import FloatArray, Scenario, poisson_arrivals

# A simulated service whose inputs become harder, and sides with constant or new plans: E3 section 5.4.

BATCH_LIMIT = 8
PERIOD_S = 120.0
"""E3's planning period (section 4)."""
PERIODS = (2.5, 3.0, 2.5)
"""Periods that each mix lasts. Both switches are in the middle of a period."""
IN_FLIGHT_SLOS = 0.6
"""A closed loop has as many inputs in flight as the model without exits answers in this number of SLOs. With more,
its own answers would be late."""
OFFERED = 1.3
"""Rate of an open loop, relative to the rate of the best plan for the mix."""
BIN_S = PERIOD_S / 8
"""Bins of goodput over time."""
WARM = 1.0
"""Periods after a switch that are not scored; the next period is scored."""

Load = Literal["closed", "open"]
Side = Literal["stock", "early-exit", "first plan", "e3", "best", "omniscient"]
SIDES: tuple[Side, ...] = ("stock", "early-exit", "first plan", "e3", "best", "omniscient")
"""The first three sides keep their first plan. `e3` and `best` have the live controller with that strategy.
`omniscient` gets the best plan for every mix at the moment of the switch."""
CONTROLLED: Mapping[Side, Strategy] = {"e3": "e3", "best": "best"}
KEPT: Mapping[Side, Strategy] = {"stock": "stock", "early-exit": "early-exit"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Phase:
    """One mix of easy and hard inputs."""

    name: str
    start_s: float
    end_s: float
    inputs: Workload
    reach: Reach
    """Survival with the mix's exact shares, which determines the best plan and its rate."""

    @property
    def scored_s(self) -> tuple[float, float]:
        """Begin and end of the scored period, which begins one period after the switch."""
        return self.start_s + WARM * PERIOD_S, self.start_s + (WARM + 1) * PERIOD_S


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bench:
    """One cluster and its inputs."""

    cluster: PlanProblem
    """Times are stretched seconds."""
    time_scale: float
    """Factor by which accelerators and SLO are slower, while the controller's seconds are not scaled."""
    probe_share: float
    records: ExitRecords
    phases: tuple[Phase, ...]

    @property
    def duration_s(self) -> float:
        return self.phases[-1].end_s

    def problem(self, phase: Phase) -> PlanProblem:
        """Returns the plan problem of a planner that knows the mix."""
        return facing(self.cluster, phase.inputs)

    def plan(self, strategy: Strategy, phase: Phase) -> Plan | None:
        """Returns the strategy's best plan for a mix, or None."""
        problem = self.problem(phase)
        decision = solve(problem, strategy)
        if isinstance(decision, NoPlan):
            return None
        stages = rescore(problem, decision, phase.reach).planned.stages
        figures = evaluate(problem, stages, phase.reach)
        return plan_of(stages, rate_per_s=figures.rate_per_s, latency_s=figures.latency_s)

    def rate_per_s(self, strategy: Strategy, phase: Phase) -> float:
        """Returns the predicted rate of that plan, or 0 without a plan."""
        plan = self.plan(strategy, phase)
        return 0.0 if plan is None else float(plan.predicted["rate_per_s"])


def bench(cluster: PlanProblem, records: ExitRecords, *, time_scale: float, probe_share: float) -> Bench:
    """Returns a cluster at published speed, slowed to E3's speed and by the time scale."""
    slo = replace(cluster.slo, latency_s=cluster.slo.latency_s * time_scale)
    return Bench(
        cluster=replace(with_batch_limit(cluster, BATCH_LIMIT), slo=slo),
        time_scale=time_scale,
        probe_share=probe_share,
        records=records,
        phases=phases(records),
    )


def phases(records: ExitRecords) -> tuple[Phase, ...]:
    """Returns the mixes 80:20, 50:50 and 20:80."""
    thresholds = dict.fromkeys(records.ramps, ENTROPY)
    ends_s = np.cumsum(PERIODS) * PERIOD_S
    return tuple(
        Phase(
            name=f"{100 * share:.0f}:{100 - 100 * share:.0f}",
            start_s=float(end_s - periods * PERIOD_S),
            end_s=float(end_s),
            inputs=sst2(share, seed=seed),
            reach=joint_reach(mixed_records(records, thresholds, share), thresholds),
        )
        for seed, (share, periods, end_s) in enumerate(zip((0.8, 0.5, 0.2), PERIODS, ends_s, strict=True))
    )


def play(setup: Bench, side: Side, load: Load, *, seed: int) -> Controlled | None:
    """Runs one side under all three mixes; returns None without a first plan."""
    first = setup.plan(KEPT.get(side, CONTROLLED.get(side, "best")), setup.phases[0])
    if first is None:
        return None
    closed = _closed(setup) if load == "closed" else None
    arrivals_s = np.zeros(0) if closed is not None else _arrivals_s(setup, seed)
    rows_N = rows_in_turn(_mixes(setup), arrivals_s) if closed is None else closed.rows_N
    scenario = Scenario(
        problem=setup.cluster,
        plan=first,
        decisions=setup.phases[0].inputs.decisions,
        rows_N=rows_N,
        arrivals_s=arrivals_s,
        duration_s=setup.duration_s,
        slo_s=setup.cluster.slo.latency_s,
        admission=load == "open",
    )
    return simulate_controlled(scenario, _control(setup, side), closed=closed, seed=seed)


def _control(setup: Bench, side: Side) -> Control:
    problem = setup.problem(setup.phases[0])
    orders = tuple(
        Order(at_s=phase.start_s, plan=plan)
        for phase in setup.phases[1:]
        if side == "omniscient" and (plan := setup.plan("best", phase)) is not None
    )
    return Control(
        problem=problem,
        settings={"period_s": PERIOD_S, "strategy": CONTROLLED.get(side, "best")},
        records=setup.records,
        probe_share=setup.probe_share if side in CONTROLLED else 0.0,
        hold=side not in CONTROLLED,
        orders=orders,
    )


def _mixes(setup: Bench) -> tuple[Mix, ...]:
    return tuple(Mix(at_s=phase.start_s, rows_N=phase.inputs.rows_N) for phase in setup.phases)


def _closed(setup: Bench) -> Closed:
    in_flight = IN_FLIGHT_SLOS * setup.cluster.slo.latency_s * setup.rate_per_s("stock", setup.phases[0])
    return Closed(in_flight=max(1, math.ceil(in_flight)), mixes=_mixes(setup), pause_s=setup.cluster.slo.latency_s)


def _arrivals_s(setup: Bench, seed: int) -> FloatArray:
    parts = [
        phase.start_s
        + poisson_arrivals(OFFERED * setup.rate_per_s("best", phase), phase.end_s - phase.start_s, seed + index)
        for index, phase in enumerate(setup.phases)
    ]
    return np.concatenate(parts)


# E3, figure 16: the mix of easy and hard inputs changes, and the live controller's plan follows.

WORST = 1 - 0.23
"""E3 relative to the model without exits if 80 % of the inputs are hard (section 5.9)."""
TIME_SCALE: Mapping[Effort, float] = {"full": 40.0, "quick": 400.0}
PROBES: Mapping[Effort, float] = {"full": 0.005, "quick": 0.04}
"""Share of probes. At the edge of capacity, a probe costs the goodput of the work that it adds. The default of 2 %
is for services that are not full."""
CLUSTERS = {"homogeneous": equal_cluster, "heterogeneous": mixed_cluster}
RUNS: Mapping[Effort, tuple[tuple[str, Load], ...]] = {
    "full": (
        *(("homogeneous", "closed"), ("heterogeneous", "closed")),
        *(("homogeneous", "open"), ("heterogeneous", "open")),
    ),
    "quick": (("homogeneous", "closed"),),
}

Rates = Mapping[str, tuple[float | None, ...]]
"""By side, per unscaled second."""


class Played(NamedTuple):
    """The figures of the sides on one cluster under one load."""

    mixes: tuple[str, ...]
    predicted_per_s: tuple[float, ...]
    """Predicted rates of the best plan for each mix, which `omniscient` follows."""
    after: Rates
    """Goodput in the period that begins one period after each switch."""
    over_time: Rates
    """Goodput over time, in bins."""
    results: Mapping[str, Controlled | None]


def play_all(setup: Bench, load: Load) -> Played:
    """Runs all sides, one after the other, with the same inputs."""
    results: dict[str, Controlled | None] = {side: play(setup, side, load, seed=SEED) for side in SIDES}
    bins = [(index * BIN_S, (index + 1) * BIN_S) for index in range(round(setup.duration_s / BIN_S))]

    def rates(spans: Sequence[tuple[float, float]]) -> Rates:
        return {
            side: (None,) * len(spans)
            if result is None
            else tuple(result.outcome.figures_between(*span).goodput_per_s * setup.time_scale for span in spans)
            for side, result in results.items()
        }

    return Played(
        mixes=tuple(phase.name for phase in setup.phases),
        predicted_per_s=tuple(setup.rate_per_s("best", phase) * setup.time_scale for phase in setup.phases),
        after=rates([phase.scored_s for phase in setup.phases]),
        over_time=rates(bins),
        results=results,
    )


def settled_s(phases: Sequence[Phase], result: Controlled | None) -> list[float | None]:
    """Returns, for each switch, when the last plan before the end of its scored period was in force."""
    said_s = [] if result is None else [float(each["at_s"]) for each in result.said if each["kind"] == "plan"]
    return [
        max((at_s - phase.start_s for at_s in said_s if phase.start_s <= at_s < phase.scored_s[1]), default=None)
        for phase in phases[1:]
    ]


def _comparisons(name: str, played: Played) -> Iterator[Comparison]:
    """The paper has one figure, of its closed loop with the hardest inputs."""
    rates, last = played.after, played.mixes[-1]
    e3, best = (ratio(rates[side][-1], rates["stock"][-1]) for side in ("e3", "best"))
    yield Comparison(f"{name}: e3 / stock, {last}", e3, WORST if "closed" in name else None)
    yield Comparison(f"{name}: best / stock, {last}", best)
    for other in ("omniscient", "first plan"):
        for mix, ours, theirs in zip(played.mixes, rates["best"], rates[other], strict=True):
            yield Comparison(f"{name}: best / {other}, {mix}", ratio(ours, theirs))


def _table(name: str, setup: Bench, played: Played) -> Table:
    """Returns the changes of the controlled sides, and the best plans' goodput relative to the prediction."""
    rows = dict[str, str | float | None]()
    for side in CONTROLLED:
        result = played.results[side]
        in_force = [] if result is None else [plan for plan in result.plans if plan["outcome"] == "in force"]
        rows[f"{side}: changes of plan"] = len(in_force) - 1
        for mix, at_s in zip(played.mixes[1:], settled_s(setup.phases, result), strict=True):
            rows[f"{side}: last plan in force after the switch to {mix} (s)"] = at_s
    for mix, did, predicted in zip(played.mixes, played.after["omniscient"], played.predicted_per_s, strict=True):
        rows[f"omniscient, {mix}: goodput over what is predicted"] = ratio(did, predicted)
    return Table(name, ("", ""), tuple(rows.items()))


def _pictures(name: str, played: Played) -> tuple[Bars, Lines]:
    over, unit = played.over_time, "goodput (inputs/s)"
    x = tuple((index + 0.5) * BIN_S / PERIOD_S for index in range(len(over["best"])))
    return (
        Bars(f"Goodput after each switch: {name}", "easy : hard inputs (%)", unit, played.mixes, played.after),
        Lines(f"Goodput over time: {name}", "planning periods", unit, x, over),
    )


def run(effort: Effort) -> StudyResult:
    """Runs both clusters, with closed and open loop; quick: equal accelerators in a closed loop, fewer inputs.

    The ratios are those of the first cluster and load.
    """
    records, time_scale = bert12_sst2("entropy"), TIME_SCALE[effort]
    found: dict[str, tuple[Bench, Played]] = {}
    for cluster, load in RUNS[effort]:
        problem = CLUSTERS[cluster](E3_SLOWER * time_scale)
        setup = bench(problem, records, time_scale=time_scale, probe_share=PROBES[effort])
        found[f"{cluster}, {load} loop"] = setup, play_all(setup, load)
    _, first = next(iter(found.values()))
    return StudyResult(
        comparisons=tuple(each for name, (_, one) in found.items() for each in _comparisons(name, one)),
        pictures=tuple(picture for name, (_, one) in found.items() for picture in _pictures(name, one)),
        e3=largest_ratios(first.after, "e3"),
        best=largest_ratios(first.after, "best"),
        tables=tuple(_table(name, setup, one) for name, (setup, one) in found.items()),
    )


FIG16_STUDY = declare("fig16_adaptation", run, needs=(BERT12_SST2,))
