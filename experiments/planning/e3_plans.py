"""E3's planner figures (SOSP'24, figures 7, 13-15, 24, 25) asked of our planner: stock, early-exit, e3, serial, best.

    python -m experiments.planning.e3_plans [--slower 6.5]

Latency: TensorRT's published V100 figures for BERT-base (128 tokens, half precision), P100 and K80 derived from them.
Survival: a 12-exit BERT-base on SST-2 dev, entropy 0.4. Everything is computed on the cost model: nothing is served, so
goodput here is the rate of a plan whose worst-case latency keeps the SLO. `--slower` stretches all latencies: E3
prints no time of its V100; 8 ms at batch 1 is an estimate, TensorRT's takes 1.23 ms. With the recorded exits at hand
(OFFRAMP_DATA) the best plan is scored again on the joint records. Writes runs/e3_plans-1x.json. Minutes: 1 on one core.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from experiments.data import RUNS, data_folder
from experiments.kit import keep, show
from experiments.recorded_exits import bert12_sst2
from optimizer.decision import STRATEGIES, Decision, NoPlan, Planned
from optimizer.evaluate import Evaluation
from optimizer.planner import solve
from optimizer.problem import MinimizeCost, PlanProblem
from optimizer.problem_file import read_problem
from optimizer.rescore import joint_reach, rescore
from optimizer.space import Space
from optimizer.what_if import with_batch_limit
from profiles.table import LatencyTable

PROBLEMS = Path(__file__).parents[2] / "examples" / "problems"
BATCHES = (1, 2, 4, 8)
SLOS_S = (0.025, 0.05, 0.1, 0.2, 0.5, 1.0)
ENTROPY = 0.4
RATE_PER_S = 6000.0
"""What figures 14 and 15 fix."""
PLENTY = 64
"""Devices of a type where their number is the question; more only make the question longer."""

RAMPS_AT_SPLIT_ENDS = Space(strategy="e3", ramps="split-ends", splits_per_stage=False, one_batch=True)
"""E3 section 5.8.6: exits inside a split are off, its last one stays."""
RAMPS_CHOSEN = Space(strategy="e3", ramps="choose", splits_per_stage=False, one_batch=True)

RATIOS = (("e3", "early-exit"), ("e3", "stock"), ("best", "e3"), ("best", "stock"))
RATIOS_OF_VARIANTS = (("ramps at split ends", "e3"), ("ramps chosen", "e3"), ("best", "e3"))

PAPER = {
    "7": "e3 up to 1.44 x early-exit and 1.30 x stock (batch 8); at batch 1 up to 3 % below early-exit",
    "13": "e3 up to 1.70 x the others on 6 V100 + 8 P100 + 15 K80",
    "14": "e3 needs the fewest V100 at every batch",
    "15": "e3 35-78 % cheaper than the others",
    "24": "e3 up to 1.63 x early-exit and 1.34 x stock; 1 % below early-exit at batch 1",
    "25": "e3 gains up to 16 % when ramps inside splits are switched off",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One point of a figure: every strategy's decision on one problem."""

    figure: str
    label: str
    fixed: bool
    """Whether the rate is, so that costs are compared."""
    decisions: dict[str, Decision]
    joint: Evaluation | None
    """Of the best plan by the joint records."""

    def value(self, name: str) -> float | None:
        """Rate per second, or USD per hour where the rate is fixed."""
        decision = self.decisions[name]
        return None if isinstance(decision, NoPlan) else self.of(decision.figures)

    def of(self, figures: Evaluation) -> float:
        """The same of any plan."""
        return figures.usd_per_hour if self.fixed else figures.rate_per_s

    def times_better(self, one: str, other: str) -> float | None:
        """How many times better one is than the other; None where either has no plan."""
        ours, theirs = self.value(one), self.value(other)
        if ours is None or theirs is None:
            return None
        return theirs / ours if self.fixed else ours / theirs


def stretched(problem: PlanProblem, times: float) -> PlanProblem:
    """The same model on accelerators so many times slower."""
    slower = {
        device: LatencyTable(
            batches=table.batches, block_s_NB=table.block_s_NB * times, ramp_s_EB=table.ramp_s_EB * times
        )
        for device, table in problem.latency.items()
    }
    return replace(problem, latency=slower)


def figure_problems(times: float) -> list[tuple[str, str, PlanProblem]]:
    """Figure, point and problem of every row."""
    equal = stretched(read_problem(PROBLEMS / "bert_base_16_v100.yaml").problem, times)
    mixed = stretched(read_problem(PROBLEMS / "bert_base_hetero.yaml").problem, times)
    fixed = MinimizeCost(rate_per_s=RATE_PER_S)
    rows = [("7", f"batch <= {batch}", with_batch_limit(equal, batch)) for batch in BATCHES]
    rows += [("13", f"batch <= {batch}", with_batch_limit(mixed, batch)) for batch in BATCHES]
    for figure, problem in (("14", equal), ("15", mixed)):
        plenty = {name: replace(supply, count=PLENTY) for name, supply in problem.devices.items()}
        many = replace(problem, objective=fixed, devices=plenty)
        rows += [(figure, f"batch <= {batch}", with_batch_limit(many, batch)) for batch in BATCHES]
    rows += [
        ("24", f"SLO {slo_s * 1e3:.0f} ms", replace(equal, slo=replace(equal.slo, latency_s=slo_s))) for slo_s in SLOS_S
    ]
    rows += [("25", f"batch <= {batch}", with_batch_limit(equal, batch)) for batch in BATCHES]
    return rows


def solved(figure: str, label: str, problem: PlanProblem, records_file: bool) -> Row:
    """Every strategy on one problem; figure 25 has variants of e3 instead."""
    decisions: dict[str, Decision]
    if figure == "25":
        decisions = {
            "e3": solve(problem, "e3"),
            "ramps at split ends": solve(problem, RAMPS_AT_SPLIT_ENDS),
            "ramps chosen": solve(problem, RAMPS_CHOSEN),
            "best": solve(problem),
        }
    else:
        decisions = {strategy: solve(problem, strategy) for strategy in STRATEGIES}
    best = decisions["best"]
    joint = _joint(problem, best, list(decisions.values())) if records_file and isinstance(best, Planned) else None
    fixed = isinstance(problem.objective, MinimizeCost)
    return Row(figure=figure, label=label, fixed=fixed, decisions=decisions, joint=joint)


def _joint(problem: PlanProblem, best: Planned, others: Sequence[Decision]) -> Evaluation | None:
    """The best of all plans at hand by the records, not by the nested view."""
    stages = tuple(each.stages for each in others if isinstance(each, Planned) and each is not best)
    records = bert12_sst2("entropy")
    reach = joint_reach(records, dict.fromkeys(records.ramps, ENTROPY))
    chosen = rescore(problem, replace(best, candidates=best.candidates + stages), reach).chosen
    return None if chosen is None else chosen.joint


def print_figure(rows: Sequence[Row]) -> None:
    """One figure, as a table."""
    figure, names = rows[0].figure, list(rows[0].decisions)
    unit = f"USD/h for {RATE_PER_S:.0f}/s" if rows[0].fixed else "inputs/s"
    ratios = RATIOS_OF_VARIANTS if figure == "25" else RATIOS
    show(
        f"figure {figure}: {unit}",
        ("", *names, *(f"{one} / {other}" for one, other in ratios), "best, joint records"),
        [
            (
                row.label,
                *("no plan" if (value := row.value(name)) is None else value for name in names),
                *(row.times_better(*pair) for pair in ratios),
                None if row.joint is None else row.of(row.joint),
            )
            for row in rows
        ],
        caption=f"E3: {PAPER[figure]}",
    )
    print()


def document(row: Row) -> dict[str, Any]:
    """A row as plain data."""
    return {
        "figure": row.figure,
        "label": row.label,
        "values": {name: row.value(name) for name in row.decisions},
        "plans": {
            name: [
                [stage.device, stage.replicas, [[split.first, split.end, split.batch] for split in stage.splits]]
                for stage in decision.stages
            ]
            for name, decision in row.decisions.items()
            if isinstance(decision, Planned)
        },
        "best_by_joint_records": None
        if row.joint is None
        else {"rate_per_s": row.joint.rate_per_s, "usd_per_hour": row.joint.usd_per_hour},
    }


def main() -> None:
    """Print the tables and write them."""
    parser = ArgumentParser(prog="python -m experiments.planning.e3_plans", description=__doc__)
    parser.add_argument("--slower", type=float, default=1.0, help="stretch all latencies by this")
    arguments = parser.parse_args()
    rows = []
    for figure, label, problem in figure_problems(arguments.slower):
        print(f"figure {figure}: {label}", flush=True)
        rows.append(solved(figure, label, problem, data_folder() is not None))
    for figure in PAPER:
        print_figure([row for row in rows if row.figure == figure])
    path = RUNS / f"e3_plans-{arguments.slower:g}x.json"
    print(f"written: {keep([document(row) for row in rows], path)}")


if __name__ == "__main__":
    main()
