"""E3, figure 26: all splits on one accelerator, in turn, against splits on accelerators of their own.

Simulated in short runs: 16 V100 at E3's speed, Poisson arrivals, 99 % of inputs within the SLO.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from experiments.recorded_exits import BERT12_SST2
from experiments.studies.e3_case import LARGEST_BATCH, even_exits, like_e3
from experiments.studies.picture import Lines
from experiments.studies.side_by_side import Row, batch_bars, by_batch, plans, series_of, simulated, times
from experiments.studies.sides import BATCHES, Workload, equal_cluster, facing, sst2
from experiments.studies.study import Comparison, Effort, StudyResult, declare
from optimizer.decision import Decision, NoPlan, Planned
from optimizer.evaluate import evaluate, sought
from optimizer.plan import Stage
from optimizer.planner import solve
from optimizer.problem import PlanProblem
from optimizer.what_if import with_batch_limit

SLOS_S = {"full": (0.04, 0.05, 0.075, 0.1, 0.2), "quick": (0.04,)}
DEVICE = "V100"
IN_TURN = "e3's splits in turn"
"""E3 without model parallelism, to the letter: every accelerator runs all of e3's splits, and a later one when its
batch is full."""
OTHERS = (IN_TURN, "serial", "early-exit")
TOLD = ("batch 1", "batch 8", "SLO 40 ms", "SLO 200 ms", "E3's circumstances, SLO 100 ms")
"""Rows whose ratios stand in a table; the others are in the pictures."""


def contenders(problem: PlanProblem) -> dict[str, Decision]:
    """With model parallelism; without, with the same splits, with those that suit one accelerator, and with one."""
    e3 = solve(problem, "e3")
    return {
        "e3": e3,
        IN_TURN: e3 if isinstance(e3, NoPlan) else in_turn(problem, e3),
        "serial": solve(problem, "serial"),
        "early-exit": solve(problem, "early-exit"),
    }


def in_turn(problem: PlanProblem, planned: Planned) -> Planned:
    """A plan's splits on every accelerator, even where waiting for full batches takes longer than the SLO allows."""
    splits = tuple(split for stage in planned.stages for split in stage.splits)
    stages = (Stage(device=DEVICE, replicas=problem.devices[DEVICE].count, splits=splits),)
    figures = evaluate(problem, stages)
    return Planned(strategy="serial", stages=stages, figures=figures, bound=sought(problem, figures), gap=0.0)


def by_slo(problem: PlanProblem, inputs: Workload, slos_s: Sequence[float]) -> dict[str, Row]:
    """A row per SLO, batches up to E3's largest."""
    limited = with_batch_limit(facing(problem, inputs), LARGEST_BATCH)
    rows: dict[str, Row] = {}
    for slo_s in slos_s:
        under = replace(limited, slo=replace(limited.slo, latency_s=slo_s))
        rows[f"SLO {1e3 * slo_s:g} ms"] = simulated(under, contenders(under), inputs, "quick")
    return rows


def compare(problem: PlanProblem, inputs: Workload, effort: Effort) -> StudyResult:
    """By batch under the problem's SLO, by SLO at E3's largest batch; with full effort in E3's circumstances too."""
    at_batch = by_batch(problem, inputs, BATCHES[effort], "quick", contenders)
    under_slo = by_slo(problem, inputs, SLOS_S[effort])
    rows: dict[str, Row] = {**at_batch, **under_slo}
    if effort == "full":
        slos_s = (problem.slo.latency_s, 2 * problem.slo.latency_s)
        of_e3 = by_slo(like_e3(problem), even_exits(problem), slos_s)
        rows |= {f"E3's circumstances, {label}": row for label, row in of_e3.items()}
    x, title = tuple(1e3 * slo_s for slo_s in SLOS_S[effort]), f"BERT-base on 16 V100, batch {LARGEST_BATCH}"
    return StudyResult(
        comparisons=tuple(
            Comparison(f"e3 / {other}, {label}", times(row, "e3", other))
            for label, row in rows.items()
            for other in OTHERS
            if label in TOLD
        ),
        pictures=(
            batch_bars("BERT-base on 16 V100, SLO 100 ms", at_batch),
            Lines(title, "SLO (ms)", "goodput (inputs/s)", x, series_of(under_slo), log_x=True),
        ),
        tables=(plans(rows),),
    )


def run(effort: Effort) -> StudyResult:
    """Recorded exits on E3's cluster."""
    return compare(equal_cluster(), sst2(), effort)


STUDY = declare(__name__, run, needs=(BERT12_SST2,))
