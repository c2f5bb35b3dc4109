"""E3, figure 24: goodput of BERT-base on 16 V100 under strict and loose SLOs.

Simulated: 16 V100 at E3's speed, Poisson arrivals, 99 % of inputs within the SLO; the planner chooses the batch. In
short runs: a loose SLO makes them long enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from experiments.problems import SLOS_S
from experiments.recorded_exits import BERT12_SST2
from experiments.studies.e3_case import LARGEST_BATCH, even_exits, like_e3
from experiments.studies.picture import Lines
from experiments.studies.side_by_side import (
    Row,
    Rows,
    plans,
    ratios_of,
    series_of,
    simulated,
    times,
)
from experiments.studies.sides import Workload, equal_cluster, facing, sst2
from experiments.studies.study import Comparison, Effort, Ratios, StudyResult, Table, declare, facts
from optimizer.decision import Strategy
from optimizer.planner import solve
from optimizer.problem import PlanProblem
from optimizer.what_if import with_batch_limit

QUICK_SLOS_S = (0.025, 0.05)
OTHER_SLOS_S = (0.05, 0.1, 0.2)
LIMITS = (8, 24, 128)
"""Largest batches that are tried; the last one leaves the batch to the planner."""
LOOSE_S = 0.5
"""From this SLO on only the last one is: where all were tried, no other was better by more than precision."""
CONTENDERS: dict[Effort, tuple[Strategy, ...]] = {
    "full": ("stock", "early-exit", "e3", "best"),
    "quick": ("stock", "early-exit", "e3"),
}
DEVICE = "V100"
PAPER = Ratios(over_stock=1.34, over_early_exit=1.63)
"""e3 over early-exit at a batch of 1, which is all that E3's strictest SLO allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BySlo:
    """Contenders under each SLO, by its words."""

    tuned: Rows
    """Each with the limit at which its goodput is highest."""
    planned: Rows
    """Each with the batches that the planner chooses."""


def by_slo(problem: PlanProblem, inputs: Workload, slos_s: Sequence[float], names: Sequence[Strategy]) -> BySlo:
    """All contenders at all limits, one SLO after the other."""
    tuned: dict[str, Row] = {}
    planned: dict[str, Row] = {}
    for slo_s in slos_s:
        under = replace(facing(problem, inputs), slo=replace(problem.slo, latency_s=slo_s))
        limits = LIMITS if slo_s < LOOSE_S else LIMITS[-1:]
        decisions = {
            f"{name}, batch {limit}": solve(with_batch_limit(under, limit), name) for limit in limits for name in names
        }
        tried = simulated(under, decisions, inputs, "quick")
        points = {name: [tried[f"{name}, batch {limit}"] for limit in limits] for name in names}
        words = f"{1e3 * slo_s:g} ms"
        tuned[words] = {name: max(of, key=lambda point: point.rate_per_s or 0.0) for name, of in points.items()}
        planned[words] = {name: of[-1] for name, of in points.items()}
    return BySlo(tuned=tuned, planned=planned)


def compare(
    problem: PlanProblem,
    inputs: Workload,
    slos_s: Sequence[float],
    others: Mapping[str, tuple[PlanProblem, Workload]],
    effort: Effort,
) -> StudyResult:
    """The figure on `inputs`; under a few of the SLOs, every other case."""
    found = by_slo(problem, inputs, slos_s, CONTENDERS[effort])
    tuned, planned = found.tuned, found.planned
    of_cases = {name: by_slo(*case, OTHER_SLOS_S, CONTENDERS["quick"]).tuned for name, case in others.items()}
    return StudyResult(
        comparisons=tuple(_comparisons(tuned, planned, of_cases)),
        pictures=_pictures(slos_s, tuned, {"recorded exits": tuned, "the planner's batches": planned, **of_cases}),
        e3=ratios_of(tuned, "e3"),
        best=ratios_of(tuned, "best"),
        tables=(
            plans(tuned),
            plans({f"{slo}, the planner's batch": row for slo, row in planned.items()}),
            _filling(problem),
        ),
    )


def cases(problem: PlanProblem) -> dict[str, tuple[PlanProblem, Workload]]:
    """E3's circumstances: its exits, V100 that 8 inputs do not fill, its ramps."""
    return {"E3's circumstances": (like_e3(problem), even_exits(problem))}


def _comparisons(tuned: Rows, planned: Rows, of_cases: Mapping[str, Rows]) -> Iterator[Comparison]:
    e3, best, own = ratios_of(tuned, "e3"), ratios_of(tuned, "best"), ratios_of(planned, "e3")
    strict, row = next(iter(tuned.items()))
    yield Comparison("e3 / early-exit, largest", e3.over_early_exit, PAPER.over_early_exit)
    yield Comparison("e3 / stock, largest", e3.over_stock, PAPER.over_stock)
    yield Comparison(f"e3 / early-exit, SLO {strict}", times(row, "e3", "early-exit"))
    if "best" in row:
        yield Comparison("best / early-exit, largest", best.over_early_exit)
    yield Comparison("the planner's batches: e3 / early-exit, largest", own.over_early_exit)
    yield Comparison("the planner's batches: e3 / stock, largest", own.over_stock)
    for name, rows in of_cases.items():
        for slo, each in rows.items():
            for other, paper in (("early-exit", PAPER.over_early_exit), ("stock", PAPER.over_stock)):
                yield Comparison(f"{name}, SLO {slo}: e3 / {other}", times(each, "e3", other), paper)


def _pictures(slos_s: Sequence[float], tuned: Rows, found: Mapping[str, Rows]) -> tuple[Lines, Lines]:
    gains = {
        name: tuple(times(rows[slo], "e3", "early-exit") if slo in rows else None for slo in tuned)
        for name, rows in found.items()
    }
    x, title = tuple(1e3 * slo_s for slo_s in slos_s), "BERT-base on 16 V100, recorded exits"
    in_words = tuple(float(slo.removesuffix(" ms")) for slo in tuned)
    return (
        Lines(title, "SLO (ms)", "goodput (inputs/s)", x, series_of(tuned), log_x=True),
        Lines("e3 over early-exit", "SLO (ms)", "times the goodput", in_words, gains, log_x=True),
    )


def _filling(problem: PlanProblem) -> Table:
    """How little a batch loses by shrinking on an accelerator that is full."""
    table = problem.latency[DEVICE]
    most = table.batches[-1]
    quarter_s, some_s, most_s = table.blocks_at(np.array([most / 4, LARGEST_BATCH, most])).sum(0)
    over = {LARGEST_BATCH: float(most_s / some_s), most / 4: float(most_s / quarter_s)}
    return facts({f"time of a batch of {most}, over one of {batch:g}": value for batch, value in over.items()})


def run(effort: Effort) -> StudyResult:
    """Recorded exits on E3's cluster; quick effort takes two SLOs and leaves E3's circumstances out."""
    problem, inputs = equal_cluster(), sst2()
    if effort == "quick":
        return compare(problem, inputs, QUICK_SLOS_S, {}, effort)
    return compare(problem, inputs, SLOS_S, cases(problem), effort)


STUDY = declare(__name__, run, paper=PAPER, needs=(BERT12_SST2,))
