"""The contenders of E3's studies on one problem and workload, and the simulated goodput of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from experiments.problems import ENTROPY, PROBLEMS, stretched
from experiments.recorded_exits import bert12_sst2, mixed_rows
from experiments.studies.picture import Bars
from experiments.studies.study import Effort, Ratios, Table, largest_ratios, ratio
from experiments.sustained import PRECISION, Capacity, highest_rate
from optimizer.plans.plan import Plan, PolicySpec, Stage
from optimizer.problems.problem import PlanProblem
from optimizer.problems.problem_file import read_problem
from optimizer.problems.what_if import with_batch_limit
from optimizer.search.decision import Decision, Planned, Strategy
from optimizer.search.planner import solve
from profiles.table import LatencyTable
from simulator.inputs import Decisions, IntArray, recorded, survival_of
from simulator.outcome import Outcome
from simulator.scenario import FloatArray, Scenario, poisson_arrivals
from simulator.simulate import simulate

SIDES: tuple[Strategy, ...] = ("stock", "early-exit", "e3", "best")
BATCHES: Mapping[Effort, tuple[int, ...]] = {"full": (1, 2, 4, 8), "quick": (8,)}
"""Largest batches of E3's figures."""
SEED = 0
E3_SLOWER = 6.5
"""TensorRT's V100 takes 1.23 ms for BERT-base at batch 1. E3 does not state its V100's time; 8 ms is an estimate."""
NUM_ROWS = 20_000
"""Inputs of a workload; longer runs repeat them."""
Length = Effort | Literal["short"]
SHORT: Mapping[Effort, Length] = {"full": "short", "quick": "quick"}
"""Length of a study's short simulations, whose rates are 1 % higher."""
INPUTS: Mapping[Length, int] = {"full": 60_000, "short": 12_000, "quick": 2_000}
"""Inputs per simulation."""
WARM_UP_SLOS = 2
"""Warm-up in SLOs, in which queues are still growing."""
LEAST_SLOS: Mapping[Length, int] = {"full": 40, "short": 40, "quick": 4}
"""Minimum length of a simulation in SLOs, so that an unsustainable load shows."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """Inputs with their exits, and their survival, which the planner gets."""

    words: str
    decisions: Decisions
    rows_N: IntArray
    survival_N: tuple[float, ...]


def equal_cluster(times: float = E3_SLOWER) -> PlanProblem:
    """Returns E3's 16 V100 (section 5.1.1), at published times multiplied by `times`."""
    return stretched(read_problem(PROBLEMS / "bert_base_16_v100.yaml").problem, times)


def mixed_cluster(times: float = E3_SLOWER) -> PlanProblem:
    """Returns E3's 6 V100, 8 P100 and 15 K80, which also cost 0.013 USD/s (section 5.2)."""
    return stretched(replace(read_problem(PROBLEMS / "bert_base_hetero.yaml").problem, most_chains=1), times)


def sst2(easy_share: float | None = None, *, entropy: float = ENTROPY, seed: int = SEED) -> Workload:
    """Returns BERT-base's exits on SST-2 dev in random order; with `easy_share` a mix of easy and hard inputs.

    Raises SystemExit with a message if the records are missing.
    """
    rng = np.random.default_rng(seed)
    records = bert12_sst2("entropy")
    decisions = recorded(records, dict.fromkeys(records.ramps, entropy))
    if easy_share is None:
        rows_N, mix = rng.integers(len(records), size=NUM_ROWS), ""
    else:
        thresholds = dict.fromkeys(records.ramps, ENTROPY)
        rows_N = mixed_rows(records, thresholds, easy_share, rng, num_inputs=NUM_ROWS)
        mix = f", {easy_share:.0%} easy"
    return workload(f"recorded: BERT-base on SST-2 dev, entropy {entropy:g}{mix}", decisions, rows_N, equal_cluster())


def workload(words: str, decisions: Decisions, rows_N: IntArray, problem: PlanProblem) -> Workload:
    """Returns a workload with the survival of these rows, all ramps active."""
    survival_N = survival_of(decisions, problem.ramps, problem.num_blocks, rows_N)
    return Workload(words=words, decisions=decisions, rows_N=rows_N, survival_N=survival_N)


@dataclass(frozen=True, slots=True, kw_only=True)
class Savings:
    """Shares of the whole model's time that exits save per input in full batches."""

    compute: float
    """Saving of the blocks, if ramps took no time."""
    latency: float
    """Saving after subtraction of the ramps' time; it may be negative."""

    @property
    def most_times(self) -> float:
        """The rate relative to stock at the same batch, with all ramps active."""
        return 1 / (1 - self.latency)


def savings(survival_N: Sequence[float], table: LatencyTable, ramps: Sequence[int], batch: int = 1) -> Savings:
    """Returns the savings with all ramps active. An input costs its part of each block and ramp that it reaches."""
    size = np.array(float(batch))
    block_s_N, ramp_s_E = table.blocks_at(size), table.ramps_at(size)
    whole_s = float(block_s_N.sum())
    blocks_s = float(np.dot(survival_N, block_s_N))
    ramps_s = sum(survival_N[ramp] * float(seconds) for ramp, seconds in zip(ramps, ramp_s_E, strict=True))
    return Savings(compute=1 - blocks_s / whole_s, latency=1 - (blocks_s + ramps_s) / whole_s)


def facing(problem: PlanProblem, inputs: Workload) -> PlanProblem:
    """Returns the problem with that workload's survival."""
    return replace(problem, survival_N=inputs.survival_N)


def decide(problem: PlanProblem, strategies: Sequence[Strategy] = SIDES) -> dict[str, Decision]:
    """Returns every strategy's decision."""
    return {strategy: solve(problem, strategy) for strategy in strategies}


def plan_of(stages: tuple[Stage, ...], *, rate_per_s: float, latency_s: float) -> Plan:
    """Returns a service's plan with these stages. Its thresholds are not used, because exits come from the workload."""
    return Plan(
        stages=stages,
        policy=PolicySpec(name="entropy", thresholds=ENTROPY),
        predicted={"rate_per_s": rate_per_s, "latency_s": latency_s},
    )


def scenario(
    problem: PlanProblem,
    planned: Planned,
    inputs: Workload,
    arrivals_s: FloatArray,
    duration_s: float,
    *,
    warm_up_s: float = 0.0,
    inputs_per_request: int = 1,
    admission: bool = False,
) -> Scenario:
    """Returns a plan on a workload; requests arrive at `arrivals_s`."""
    return Scenario(
        problem=problem,
        plan=plan_of(planned.stages, rate_per_s=planned.figures.rate_per_s, latency_s=planned.figures.latency_s),
        decisions=inputs.decisions,
        rows_N=inputs.rows_N,
        arrivals_s=arrivals_s,
        duration_s=duration_s,
        inputs_per_request=inputs_per_request,
        slo_s=problem.slo.latency_s,
        admission=admission,
        warm_up_s=warm_up_s,
    )


def poisson(problem: PlanProblem, planned: Planned, inputs: Workload, rate_per_s: float, length: Length) -> Scenario:
    """Returns a plan under a Poisson rate, without admission."""
    slo_s = problem.slo.latency_s
    warm_up_s = WARM_UP_SLOS * slo_s
    duration_s = warm_up_s + max(INPUTS[length] / rate_per_s, LEAST_SLOS[length] * slo_s)
    arrivals_s = poisson_arrivals(rate_per_s, duration_s, SEED)
    return scenario(problem, planned, inputs, arrivals_s, duration_s, warm_up_s=warm_up_s)


def serve(offered: Scenario) -> Outcome:
    """Simulates the scenario; Ctrl-C ends the study."""
    outcome = simulate(offered)
    if outcome.interrupted:
        raise KeyboardInterrupt
    return outcome


def goodput(problem: PlanProblem, planned: Planned, inputs: Workload, length: Length) -> Capacity:
    """Returns the highest Poisson rate with 99 % answered within the SLO, without admission."""
    return highest_rate(
        lambda rate_per_s: poisson(problem, planned, inputs, rate_per_s, length),
        planned.figures.rate_per_s,
        precision=0.05 if length == "quick" else PRECISION,
    )


# The contenders' plans on one problem and workload, by row of a figure.

COLUMNS = ("", "side", "goodput", "over its plan's", "splits", "batch", "worst case (ms)", "busy", "last split full")
Choose = Callable[[PlanProblem], Mapping[str, Decision]]
"""A function from a problem to every contender's decision."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A contender in one row."""

    decision: Decision
    capacity: Capacity | None
    """None without a plan."""

    @property
    def planned(self) -> Planned | None:
        return self.decision if isinstance(self.decision, Planned) else None

    @property
    def rate_per_s(self) -> float | None:
        """Goodput."""
        return None if self.capacity is None else self.capacity.rate_per_s

    @property
    def ramps(self) -> tuple[int, ...]:
        """Active ramps; none without a plan."""
        stages = () if self.planned is None else self.planned.stages
        return tuple(ramp for stage in stages for split in stage.splits for ramp in split.ramps)

    def cells(self) -> tuple[str | float | None, ...]:
        """Returns a row of the table `plans`."""
        if self.planned is None or self.capacity is None:
            return ("no plan", *[None] * (len(COLUMNS) - 3))
        figures, splits = self.capacity.figures, [split for stage in self.planned.stages for split in stage.splits]
        return (
            self.capacity.rate_per_s,
            self.capacity.rate_per_s / self.planned.figures.rate_per_s,
            len(splits),
            max(split.batch for split in splits),
            1e3 * self.planned.figures.latency_s,
            None if figures is None else ", ".join(f"{slot.utilisation:.0%}" for slot in figures.slots),
            None if figures is None else f"{figures.splits[-1].fill:.0%}",
        )


Case = tuple[PlanProblem, Workload]
"""A cluster and its workload."""
Row = Mapping[str, Point]
"""Points by contender."""
Rows = Mapping[str, Row]
"""Rows by label, such as "batch 8" or "SLO 50 ms"."""


def simulated(
    problem: PlanProblem, decisions: Mapping[str, Decision], inputs: Workload, length: Length
) -> dict[str, Point]:
    """Simulates every contender's goodput; equal plans are simulated once."""
    known: dict[tuple[Stage, ...], Capacity] = {}
    row: dict[str, Point] = {}
    for name, decision in decisions.items():
        capacity = None
        if isinstance(decision, Planned):
            if decision.stages not in known:
                known[decision.stages] = goodput(problem, decision, inputs, length)
            capacity = known[decision.stages]
        row[name] = Point(decision=decision, capacity=capacity)
    return row


def by_batch(
    problem: PlanProblem, inputs: Workload, batches: Sequence[int], length: Length, choose: Choose = decide
) -> dict[str, Row]:
    """Returns a row per largest batch, such as "batch 8"."""
    limited = {batch: with_batch_limit(facing(problem, inputs), batch) for batch in batches}
    return {f"batch {batch}": simulated(each, choose(each), inputs, length) for batch, each in limited.items()}


def times(row: Row, one: str, other: str) -> float | None:
    """Returns the ratio of two goodputs; None without both plans, or if the other's goodput is 0."""
    if one not in row or other not in row:
        return None
    return ratio(row[one].rate_per_s, row[other].rate_per_s)


def series_of(rows: Rows) -> dict[str, tuple[float | None, ...]]:
    """Returns goodput by contender, row by row; None if a row lacks the contender."""
    names = dict.fromkeys(name for row in rows.values() for name in row)
    return {name: tuple(row[name].rate_per_s if name in row else None for row in rows.values()) for name in names}


def ratios_of(rows: Rows, side: str) -> Ratios:
    """Returns the largest of a side's ratios over all rows; none if no row has it."""
    return largest_ratios(series_of(rows), side)


def batch_bars(title: str, rows: Rows) -> Bars:
    """Returns the picture of goodput by largest batch."""
    labels = tuple(label.removeprefix("batch ") for label in rows)
    return Bars(title, "largest batch", "goodput (inputs/s)", labels, series_of(rows))


def plans(rows: Rows) -> Table:
    """Returns every contender's plan and its figures at the highest rate, a row each.

    The planner assumes full batches, even arrivals and nested exits, so goodput differs from its rate.
    """
    return Table(
        "Plans",
        COLUMNS,
        tuple((label, side, *point.cells()) for label, row in rows.items() for side, point in row.items()),
    )


def with_slo(problem: PlanProblem, latency_s: float) -> PlanProblem:
    """Returns the problem with another SLO."""
    return replace(problem, slo=replace(problem.slo, latency_s=latency_s))


def allowed(problem: PlanProblem, inputs: Workload, batch: int) -> Savings:
    """Returns the savings of exits in full batches, all ramps active, on the first accelerator type."""
    return savings(inputs.survival_N, next(iter(problem.latency.values())), problem.ramps, batch)


def allowed_table(cases: Mapping[str, Case], batch: int) -> Table:
    """Returns a row per case with the savings of its exits."""
    saved = {name: allowed(*case, batch) for name, case in cases.items()}
    return Table(
        "What exits allow, all ramps active",
        ("", "compute saved (%)", "latency saved (%)", "full batches throughout / stock"),
        tuple((name, 100 * each.compute, 100 * each.latency, each.most_times) for name, each in saved.items()),
    )
