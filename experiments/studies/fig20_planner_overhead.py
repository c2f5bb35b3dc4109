"""E3, figure 20: the time that planning takes.

Measured in process, on the machine that runs it. `best` searches Offramp's whole space of plans, `e3` the paper's.
"""

from __future__ import annotations

from statistics import median
from timeit import repeat

from experiments.problems import PROBLEMS
from experiments.studies.picture import Bars
from experiments.studies.study import Comparison, Effort, StudyResult, declare, facts
from optimizer.problems.problem import PlanProblem
from optimizer.problems.problem_file import read_problem
from optimizer.search.decision import Planned, Strategy
from optimizer.search.planner import solve

STRATEGIES: tuple[Strategy, ...] = ("e3", "best")
ROUNDS = {"full": 5, "quick": 1}
FILES = {
    "BERT-base, 16 V100": ("bert_base_16_v100", 0.87),
    "BERT-base, 3 types": ("bert_base_hetero", 2.09),
    "BERT-large, 16 V100": ("bert_large_16_v100", 1.53),
    "BERT-large, 3 types": ("bert_large_hetero", 3.63),
    "ResNet-50, 16 V100": ("resnet50_16_v100", 1.13),
    "ResNet-50, 3 types": ("resnet50_hetero", 2.62),
}
"""By label: the problem, which is also in the paper, and the seconds of E3's optimizer."""
LABELS: dict[Effort, tuple[str, ...]] = {"full": tuple(FILES), "quick": ("BERT-base, 16 V100", "ResNet-50, 16 V100")}


def timed(problem: PlanProblem, rounds: int, strategy: Strategy) -> tuple[float, float]:
    """Returns the median seconds over the rounds after a first one, and the plan's gap."""
    decision = solve(problem, strategy)
    assert isinstance(decision, Planned), decision
    return median(repeat(lambda: solve(problem, strategy), number=1, repeat=rounds)), decision.gap


def run(effort: Effort) -> StudyResult:
    """Plans the problems in both spaces, and compares the seconds with the paper's."""
    problems = {label: read_problem(PROBLEMS / f"{FILES[label][0]}.yaml").problem for label in LABELS[effort]}
    rows = {
        label: {strategy: timed(problem, ROUNDS[effort], strategy) for strategy in STRATEGIES}
        for label, problem in problems.items()
    }
    labels = tuple(label.replace(", ", "\n") for label in rows)
    seconds = {str(name): tuple(row[name][0] for row in rows.values()) for name in STRATEGIES}
    paper = {"e3": tuple(FILES[label][1] for label in rows)}
    gaps = {f"best, {label}: how much better a plan could be": row["best"][1] for label, row in rows.items()}
    return StudyResult(
        comparisons=tuple(
            Comparison(f"{name}, {label} (s)", row[name][0], FILES[label][1])
            for name in STRATEGIES
            for label, row in rows.items()
        ),
        pictures=(Bars("Seconds to plan", "model and cluster", "seconds", labels, seconds, paper, log_y=True),),
        tables=(facts(gaps),),
    )


STUDY = declare(__name__, run)
