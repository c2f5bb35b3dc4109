"""E3, figure 20: how long planning takes.

Measured, in process, on the machine that runs it. `best` searches Offramp's whole space of plans, `e3` the paper's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from statistics import median
from typing import Any

from experiments.problems import PROBLEMS
from experiments.studies.picture import Bars
from experiments.studies.study import Comparison, Effort, StudyResult, declare, facts
from optimizer.decision import Planned, Strategy
from optimizer.planner import solve
from optimizer.problem import PlanProblem
from optimizer.problem_file import read_problem

E3_S = {
    "bert_base_16_v100": 0.87,
    "bert_base_hetero": 2.09,
    "bert_large_16_v100": 1.53,
    "bert_large_hetero": 3.63,
    "resnet50_16_v100": 1.13,
    "resnet50_hetero": 2.62,
}
"""Seconds of E3's optimizer."""
STRATEGIES: tuple[Strategy, ...] = ("e3", "best")
ROUNDS = {"full": 5, "quick": 1}
FILES = {
    "BERT-base, 16 V100": "bert_base_16_v100",
    "BERT-base, 3 types": "bert_base_hetero",
    "BERT-large, 16 V100": "bert_large_16_v100",
    "BERT-large, 3 types": "bert_large_hetero",
    "ResNet-50, 16 V100": "resnet50_16_v100",
    "ResNet-50, 3 types": "resnet50_hetero",
}
"""By their labels."""

Rows = Mapping[str, Mapping[str, Mapping[str, Any]]]
"""What `timed` gives, by problem and strategy."""


def timed(name: str, problem: PlanProblem, rounds: int, strategy: Strategy) -> dict[str, Any]:
    """Median seconds of so many rounds after a first one, and the plan's rate per second and gap."""
    decision = solve(problem, strategy)
    assert isinstance(decision, Planned), decision
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        solve(problem, strategy)
        seconds.append(time.perf_counter() - start)
    return {
        "problem": name,
        "seconds": median(seconds),
        "e3_seconds": E3_S.get(name),
        "rate_per_s": decision.figures.rate_per_s,
        "gap": decision.gap,
    }


def measure(problems: Mapping[str, PlanProblem], rounds: int) -> Rows:
    """Plan every problem in either space."""
    return {
        label: {strategy: timed(FILES[label], problem, rounds, strategy) for strategy in STRATEGIES}
        for label, problem in problems.items()
    }


def compare(rows: Rows) -> StudyResult:
    """Seconds beside the paper's."""
    labels = tuple(label.replace(", ", "\n") for label in rows)
    seconds = {str(name): tuple(row[name]["seconds"] for row in rows.values()) for name in STRATEGIES}
    paper = {"e3": tuple(E3_S[FILES[label]] for label in rows)}
    return StudyResult(
        comparisons=tuple(
            Comparison(f"{name}, {label} (s)", row[name]["seconds"], E3_S[FILES[label]])
            for name in STRATEGIES
            for label, row in rows.items()
        ),
        pictures=(Bars("Seconds to plan", "model and cluster", "seconds", labels, seconds, paper, log_y=True),),
        tables=(
            facts(
                {f"best, {label}: how much better a plan could be": row["best"]["gap"] for label, row in rows.items()}
            ),
        ),
    )


def run(effort: Effort) -> StudyResult:
    """The problems that the paper and we both have."""
    problems = {label: read_problem(PROBLEMS / f"{file}.yaml").problem for label, file in FILES.items()}
    return compare(measure(problems, ROUNDS[effort]))


STUDY = declare(__name__, run)
