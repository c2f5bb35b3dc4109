"""E3's figure 22: goodput lost when survival is mispredicted by 0-100 %.

    python -m experiments.misprediction [--problem FILE]

The planner sees a survival that is wrong by a share e, either way: fewer inputs leave than it thinks
(s * (1 - e) predicted), or more (s + e * (1 - s) predicted, E3 section 5.8.3). Its plan then runs under the true
survival: its rate there counts as goodput while its worst-case latency keeps the SLO, slack included in it as the
reserve that it is. Compared with the plan that knows the truth, and with stock, which does not depend on survival.
E3: an error of 20 % costs 4-8 %. Computed on the cost model, nothing is served. Writes runs/misprediction.json.
Minutes: 1 on one core.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from experiments.data import RUNS
from experiments.e3_plans import PROBLEMS
from optimizer.decision import Planned, Strategy
from optimizer.evaluate import evaluate, nested_reach
from optimizer.planner import solve
from optimizer.problem import PlanProblem
from optimizer.problem_file import read_problem
from optimizer.what_if import with_batch_limit

ERRORS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
BATCHES = (2, 4, 8)
STRATEGIES: tuple[Strategy, ...] = ("e3", "best")


def too_few_leave(share: float, error: float) -> float:
    """Predicted survival when the forecast sees too few inputs leave."""
    return share + error * (1 - share)


def too_many_leave(share: float, error: float) -> float:
    """Predicted survival when the forecast sees too many inputs leave."""
    return share * (1 - error) if share < 1 else share


Predict = Callable[[float, float], float]
"""From a block's true survival and the error to what is predicted."""

DIRECTIONS: dict[str, Predict] = {
    "sees too few leave": too_few_leave,
    "sees too many leave": too_many_leave,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """One wrong forecast and what its plan does in truth."""

    batch: int
    strategy: str
    direction: str
    error: float
    rate_per_s: float
    latency_s: float
    keeps_slo: bool
    share_of_best: float
    """Goodput over that of the plan that knows the truth."""
    times_stock: float


def goodput(problem: PlanProblem, planned: Planned) -> tuple[float, float, bool]:
    """Rate and worst-case latency under the problem's survival, and whether the SLO holds."""
    figures = evaluate(problem, planned.stages, nested_reach(problem))
    return figures.rate_per_s, figures.latency_s, figures.latency_s <= problem.slo.latency_s


def mistaken(truth: PlanProblem, strategy: Strategy, predict: Predict, error: float) -> Planned:
    """The plan of who believes a wrong forecast; it predicts what that forecast says."""
    seen = replace(truth, survival_N=tuple(predict(share, error) for share in truth.survival_N))
    planned = solve(seen, strategy)
    assert isinstance(planned, Planned), "other survival asks for no less latency than the truth"
    return planned


def mispredicted(truth: PlanProblem, strategy: Strategy, batch: int) -> list[Outcome]:
    """All errors of one strategy on one problem."""
    known, stock = solve(truth, strategy), solve(truth, "stock")
    assert isinstance(known, Planned), "the true problem has a plan"
    assert isinstance(stock, Planned), "stock has one too"
    outcomes = []
    for direction, predict in DIRECTIONS.items():
        for error in ERRORS:
            planned = mistaken(truth, strategy, predict, error)
            rate_per_s, latency_s, keeps_slo = goodput(truth, planned)
            served = rate_per_s if keeps_slo else 0.0
            outcomes.append(
                Outcome(
                    batch=batch,
                    strategy=strategy,
                    direction=direction,
                    error=error,
                    rate_per_s=rate_per_s,
                    latency_s=latency_s,
                    keeps_slo=keeps_slo,
                    share_of_best=served / known.figures.rate_per_s,
                    times_stock=served / stock.figures.rate_per_s,
                )
            )
    return outcomes


def main() -> None:
    """Print the table and write it."""
    parser = ArgumentParser(prog="python -m experiments.misprediction", description=__doc__)
    parser.add_argument("--problem", type=Path, default=PROBLEMS / "bert_base_16_v100.yaml")
    problem = read_problem(parser.parse_args().problem).problem
    outcomes = [
        outcome
        for batch in BATCHES
        for strategy in STRATEGIES
        for outcome in mispredicted(with_batch_limit(problem, batch), strategy, batch)
    ]
    table = Table(title="goodput kept, of the plan that knows the truth (over stock)", title_justify="left")
    for name in ("batch <=", "plan", "forecast", *(f"{error:.0%}" for error in ERRORS)):
        table.add_column(name, justify="right")
    for start in range(0, len(outcomes), len(ERRORS)):
        row = outcomes[start : start + len(ERRORS)]
        cells = [f"{each.share_of_best:.3f} ({each.times_stock:.2f}x)" for each in row]
        table.add_row(str(row[0].batch), row[0].strategy, row[0].direction, *cells)
    Console(width=200).print(table)
    RUNS.mkdir(exist_ok=True)
    path = RUNS / "misprediction.json"
    path.write_text(json.dumps([asdict(each) for each in outcomes], indent=1), encoding="utf-8")
    print(f"written: {path}")


if __name__ == "__main__":
    main()
