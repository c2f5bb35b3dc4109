"""E3's planner figures (SOSP'24, figures 7, 13-15, 24, 25) asked of our planner: stock, early-exit, e3, serial, best.

    python -m experiments.e3_plans [--slower 6.5]

Latency: TensorRT's published V100 figures for BERT-base (128 tokens, half precision), P100 and K80 derived from them.
Survival: a 12-exit BERT-base on SST-2 dev, entropy 0.4. Everything is computed on the cost model: nothing is served, so
goodput here is the rate of a plan whose worst-case latency keeps the SLO. `--slower` stretches all latencies: E3
prints no time of its V100; 8 ms at batch 1 is an estimate, TensorRT's takes 1.23 ms. With the recorded exits at hand
(OFFRAMP_DATA) the best plan is scored again on the joint records. Writes runs/e3_plans-1x.json. Minutes: 1 on one core.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.data import RUNS, data_folder
from experiments.recorded_exits import bert12_sst2
from optimizer.decision import STRATEGIES, Decision, NoPlan, Planned
from optimizer.evaluate import Evaluation
from optimizer.planner import solve, solve_in
from optimizer.problem import MaximizeRate, MinimizeCost, PlanProblem, Slo, Supply
from optimizer.problem_file import read_problem
from optimizer.rescore import joint_reach, rescore
from optimizer.space import Space
from optimizer.what_if import with_batch_limit
from profiles.table import LatencyTable

PROBLEMS = Path(__file__).parent / "problems"
BATCHES = (1, 2, 4, 8)
SLOS_S = (0.025, 0.05, 0.1, 0.2, 0.5, 1.0)
ENTROPY = 0.4
RATE_PER_S = 6000.0
"""What figures 14 and 15 fix."""
PLENTY = 64
"""Devices of a type where their number is the question; more only make the question longer."""

RAMPS_AT_SPLIT_ENDS = Space(ramps="split-ends", splits_per_stage=False, one_batch=True)
"""E3 section 5.8.6: exits inside a split are off, its last one stays."""
RAMPS_CHOSEN = Space(ramps="choose", splits_per_stage=False, one_batch=True)

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
    problem: PlanProblem
    decisions: dict[str, Decision]
    joint: Evaluation | None
    """Of the best plan by the joint records."""

    def value(self, name: str) -> float | None:
        """Rate per second, or USD per hour where the rate is fixed."""
        decision = self.decisions[name]
        if isinstance(decision, NoPlan):
            return None
        fixed = isinstance(self.problem.objective, MinimizeCost)
        return decision.figures.usd_per_hour if fixed else decision.figures.rate_per_s


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
        many = replace(problem, objective=fixed, devices=_plenty(problem))
        rows += [(figure, f"batch <= {batch}", with_batch_limit(many, batch)) for batch in BATCHES]
    rows += [("24", f"SLO {slo_s * 1e3:.0f} ms", _with_slo(equal, slo_s)) for slo_s in SLOS_S]
    rows += [("25", f"batch <= {batch}", with_batch_limit(equal, batch)) for batch in BATCHES]
    return rows


def solved(figure: str, label: str, problem: PlanProblem, records_file: bool) -> Row:
    """Every strategy on one problem; figure 25 has variants of e3 instead."""
    decisions: dict[str, Decision]
    if figure == "25":
        decisions = {
            "e3": solve(problem, "e3"),
            "ramps at split ends": solve_in(problem, RAMPS_AT_SPLIT_ENDS, "e3"),
            "ramps chosen": solve_in(problem, RAMPS_CHOSEN, "e3"),
            "best": solve(problem),
        }
    else:
        decisions = {strategy: solve(problem, strategy) for strategy in STRATEGIES}
    best = decisions["best"]
    joint = _joint(problem, best, list(decisions.values())) if records_file and isinstance(best, Planned) else None
    return Row(figure=figure, label=label, problem=problem, decisions=decisions, joint=joint)


def _joint(problem: PlanProblem, best: Planned, others: Sequence[Decision]) -> Evaluation | None:
    """The best of all plans at hand by the records, not by the nested view."""
    stages = tuple(each.stages for each in others if isinstance(each, Planned) and each is not best)
    records = bert12_sst2("entropy")
    reach = joint_reach(records, dict.fromkeys(records.ramps, ENTROPY))
    chosen = rescore(problem, replace(best, candidates=best.candidates + stages), reach).chosen
    return None if chosen is None else chosen.joint


def _with_slo(problem: PlanProblem, latency_s: float) -> PlanProblem:
    return replace(problem, slo=Slo(latency_s=latency_s, slack=problem.slo.slack), objective=MaximizeRate())


def _plenty(problem: PlanProblem) -> dict[str, Supply]:
    return {name: replace(supply, count=PLENTY) for name, supply in problem.devices.items()}


def table(rows: Sequence[Row]) -> Table:
    """One figure, as text."""
    figure, names = rows[0].figure, list(rows[0].decisions)
    fixed = isinstance(rows[0].problem.objective, MinimizeCost)
    unit = f"USD/h for {RATE_PER_S:.0f}/s" if fixed else "inputs/s"
    ratios = RATIOS_OF_VARIANTS if figure == "25" else RATIOS
    drawn = Table(title=f"figure {figure}: {unit}", caption=f"E3: {PAPER[figure]}", title_justify="left")
    for name in ["", *names, *(f"{one} / {other}" for one, other in ratios), "best, joint records"]:
        drawn.add_column(name, justify="right")
    for row in rows:
        better = [_times_better(row.value(one), row.value(other), fixed) for one, other in ratios]
        joint = None if row.joint is None else (row.joint.usd_per_hour if fixed else row.joint.rate_per_s)
        drawn.add_row(row.label, *(_number(row.value(name)) for name in names), *better, _number(joint))
    return drawn


def _times_better(one: float | None, other: float | None, fixed: bool) -> str:
    if one is None or other is None:
        return "-"
    return f"{other / one if fixed else one / other:.2f}"


def _number(value: float | None) -> str:
    return "no plan" if value is None else f"{value:,.2f}" if value < 1000 else f"{value:,.0f}"


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


def run(times: float, report: Callable[[Row], None]) -> list[Row]:
    """Every row of every figure."""
    records_file = data_folder() is not None
    rows = []
    for figure, label, problem in figure_problems(times):
        rows.append(solved(figure, label, problem, records_file))
        report(rows[-1])
    return rows


def main() -> None:
    """Print the tables and write them."""
    parser = ArgumentParser(prog="python -m experiments.e3_plans", description=__doc__)
    parser.add_argument("--slower", type=float, default=1.0, help="stretch all latencies by this")
    arguments = parser.parse_args()
    rows = run(arguments.slower, lambda row: print(f"figure {row.figure}: {row.label}", flush=True))
    console = Console(width=200)
    for figure in PAPER:
        console.print(table([row for row in rows if row.figure == figure]), "")
    RUNS.mkdir(exist_ok=True)
    path = RUNS / f"e3_plans-{arguments.slower:g}x.json"
    path.write_text(json.dumps([document(row) for row in rows], indent=1), encoding="utf-8")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
