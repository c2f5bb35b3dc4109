"""E3's figure 22: goodput lost when survival is mispredicted by 0-100 %.

    python -m experiments.planning.misprediction [--problem FILE]

The planner sees a survival that is wrong by a share e, either way: fewer inputs leave than it thinks
(s * (1 - e) predicted), or more (s + e * (1 - s) predicted, E3 section 5.8.3). Its plan then runs under the true
survival: its rate there counts as goodput while its worst-case latency keeps the SLO, slack included in it as the
reserve that it is. Compared with the plan that knows the truth, and with stock, which does not depend on survival.
E3: an error of 20 % costs 4-8 %. Computed on the cost model, nothing is served. Writes runs/misprediction.json.
Minutes: 1 on one core.
"""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from experiments.data import RUNS
from experiments.kit import keep, show
from experiments.planning.e3_plans import PROBLEMS
from optimizer.decision import Planned, Strategy
from optimizer.evaluate import evaluate
from optimizer.planner import solve
from optimizer.problem import PlanProblem
from optimizer.problem_file import read_problem
from optimizer.reach import nested_reach
from optimizer.what_if import with_batch_limit

ERRORS = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)
BATCHES = (2, 4, 8)
STRATEGIES: tuple[Strategy, ...] = ("e3", "best")

Simulate = Callable[[Planned], float]
"""From a plan to its goodput in truth, in inputs per second."""


def too_few_leave(share: float, error: float) -> float:
    """Predicted survival when the forecast sees too few inputs leave."""
    return share + error * (1 - share)


def too_many_leave(share: float, error: float) -> float:
    """Predicted survival when the forecast sees too many inputs leave."""
    return share * (1 - error) if share < 1 else share


DIRECTIONS = {"sees too few leave": too_few_leave, "sees too many leave": too_many_leave}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistakes:
    """What one strategy's plans do in truth, wrong in one direction."""

    case: str
    strategy: Strategy
    direction: str
    errors: tuple[float, ...]
    """From 0 on."""
    goodput_per_s: tuple[float, ...]
    """Per error."""
    stock_per_s: float

    @property
    def name(self) -> str:
        return f"{self.strategy} {self.direction}"

    def at(self, error: float) -> float | None:
        """Goodput there."""
        return dict(zip(self.errors, self.goodput_per_s, strict=True)).get(error)


def mispredicted(
    case: str, truth: PlanProblem, strategy: Strategy, errors: tuple[float, ...], simulate: Simulate
) -> list[Mistakes]:
    """All errors of one strategy on one problem, in either direction."""
    stock = solve(truth, "stock")
    assert isinstance(stock, Planned), "the problems of this experiment have plans"
    stock_per_s, found = simulate(stock), []
    for direction, predict in DIRECTIONS.items():
        rates = []
        for error in errors:
            seen = replace(truth, survival_N=tuple(predict(share, error) for share in truth.survival_N))
            planned = solve(seen, strategy)
            assert isinstance(planned, Planned), "other survival asks for no less latency than the truth"
            rates.append(simulate(planned))
        found.append(
            Mistakes(
                case=case,
                strategy=strategy,
                direction=direction,
                errors=errors,
                goodput_per_s=tuple(rates),
                stock_per_s=stock_per_s,
            )
        )
    return found


def by_cost_model(truth: PlanProblem) -> Simulate:
    """The rate of a plan under the problem's survival; 0 where its worst-case latency breaks the SLO."""

    def simulate(planned: Planned) -> float:
        figures = evaluate(truth, planned.stages, nested_reach(truth))
        return figures.rate_per_s if figures.latency_s <= truth.slo.latency_s else 0.0

    return simulate


def main() -> None:
    """Print the table and write it."""
    parser = ArgumentParser(prog="python -m experiments.planning.misprediction", description=__doc__)
    parser.add_argument("--problem", type=Path, default=PROBLEMS / "bert_base_16_v100.yaml")
    problem = read_problem(parser.parse_args().problem).problem
    found = []
    for batch in BATCHES:
        truth = with_batch_limit(problem, batch)
        for strategy in STRATEGIES:
            found += mispredicted(f"batch <= {batch}", truth, strategy, ERRORS, by_cost_model(truth))
    show(
        "goodput kept, of the plan that knows the truth (over stock)",
        ("", "forecast", *(f"{error:.0%}" for error in ERRORS)),
        [
            (
                each.case,
                each.name,
                *(
                    f"{rate / each.goodput_per_s[0]:.3f} ({rate / each.stock_per_s:.2f}x)"
                    for rate in each.goodput_per_s
                ),
            )
            for each in found
        ],
    )
    print(f"written: {keep([asdict(each) for each in found], RUNS / 'misprediction.json')}")


if __name__ == "__main__":
    main()
