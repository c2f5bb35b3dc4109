"""Mean answer time of BERT-base over the rate: without exits, as Apparate, and planned with inputs that stop or stay.

    python -m experiments.planning.mean_latency [--rates 100 1000 ...] [--ramp-budget 0.02] [--batches 1 2 4 ...]

On the cost model; nothing is served. Published V100 figures and recorded exits (`problems/bert_base_soonest.yaml`).
`apparate` is one batch on replicas of the whole model, all inputs to the end, with the ramps that the planner finds
best; `stop` and `stay` choose from all plans, one of them only. Empty: no plan. Minutes: about 1.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from experiments.kit import keep, show
from experiments.planning.e3_plans import PROBLEMS
from optimizer.decision import Decision, Planned
from optimizer.planner import solve
from optimizer.problem import MinimizeLatency, PlanProblem
from optimizer.problem_file import read_problem
from optimizer.space import SPACES, Space
from profiles.table import LatencyTable

PROBLEM = PROBLEMS / "bert_base_soonest.yaml"
SIDES: dict[str, Space] = {
    "stock": SPACES["stock"],
    "apparate": SPACES["apparate"],
    "stay": replace(SPACES["best"], after_answer=("stay",)),
    "stop": replace(SPACES["best"], after_answer=("stop",)),
}
RATES = (100.0, 300.0, 1_000.0, 3_000.0, 10_000.0, 20_000.0, 30_000.0, 40_000.0, 60_000.0)


def answered(problem: PlanProblem, rate_per_s: float, ramp_budget: float | None) -> dict[str, Decision]:
    """Every side's plan for a rate."""
    asked = replace(problem, objective=MinimizeLatency(rate_per_s=rate_per_s, ramp_budget=ramp_budget))
    return {name: solve(asked, space) for name, space in SIDES.items()}


def with_batches(problem: PlanProblem, batches: Sequence[int]) -> PlanProblem:
    """Only some of the measured sizes: a runtime that was built for a few."""
    return replace(problem, latency={name: _of_sizes(table, batches) for name, table in problem.latency.items()})


def _of_sizes(table: LatencyTable, batches: Sequence[int]) -> LatencyTable:
    columns = [index for index, batch in enumerate(table.batches) if batch in batches]
    return LatencyTable(
        batches=tuple(table.batches[index] for index in columns),
        block_s_NB=table.block_s_NB[:, columns],
        ramp_s_EB=table.ramp_s_EB[:, columns],
    )


def row(rate_per_s: float, decisions: dict[str, Decision]) -> dict[str, Any]:
    """Milliseconds of every side, and what the best of them saves of the answer time without exits."""
    plans = {name: each for name, each in decisions.items() if isinstance(each, Planned)}
    mean_s = {name: each.figures.mean_latency_s for name, each in plans.items()}
    return {
        "rate_per_s": rate_per_s,
        "mean_s": mean_s,
        "gap": max((each.gap for each in plans.values()), default=0.0),
        "saved": {name: 1 - mean_s[name] / mean_s["stock"] for name in mean_s if "stock" in mean_s},
        "replicas": {name: sum(stage.replicas for stage in each.stages) for name, each in plans.items()},
        "splits": {name: len(each.figures.splits) for name, each in plans.items()},
    }


def main() -> None:
    """Plan, print, and keep the figures."""
    parser = ArgumentParser(prog="python -m experiments.planning.mean_latency", description=__doc__)
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--ramp-budget", type=float, default=None)
    parser.add_argument("--batches", type=int, nargs="+")
    parser.add_argument("--slo-ms", type=float)
    parser.add_argument("--out", type=Path, default=Path("runs/mean_latency"))
    options = parser.parse_args()
    problem = read_problem(PROBLEM).problem
    if options.batches is not None:
        problem = with_batches(problem, options.batches)
    if options.slo_ms is not None:
        problem = replace(problem, slo=replace(problem.slo, latency_s=options.slo_ms / 1000))
    rows = [row(rate, answered(problem, rate, options.ramp_budget)) for rate in options.rates]
    columns = ("rate /s", *(f"{name} ms" for name in SIDES), *(f"{name} saves" for name in SIDES if name != "stock"))
    show("", (*columns, "gap"), [_cells(each) for each in rows])
    print(f"written: {keep(rows, options.out / 'mean_latency.json')}")


def _cells(figures: dict[str, Any]) -> list[object]:
    times = [figures["mean_s"].get(name) for name in SIDES]
    saved = [figures["saved"].get(name) for name in SIDES if name != "stock"]
    return [
        f"{figures['rate_per_s']:,.0f}",
        *("-" if each is None else f"{each * 1e3:.3f}" for each in times),
        *("-" if each is None else f"{each:.1%}" for each in saved),
        figures["gap"],
    ]


if __name__ == "__main__":
    main()
