"""Helpers that check results of the planner against brute force, and against the space of a strategy."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from offramp.commands.plan import answer, answer_document
from optimizer.cost.evaluate import Evaluation, evaluate, violations
from optimizer.plans.plan import Stage
from optimizer.problems.problem import PlanProblem
from optimizer.problems.problem_file import ProblemFile
from optimizer.search.decision import Decision, NoPlan, Planned, Strategy
from optimizer.search.planner import solve
from optimizer.search.space import Space
from tests.optimizer.brute_force import BruteForce, Optimum

AGREE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """The results of the planner and of brute force for one problem."""

    problem: PlanProblem
    decision: Decision
    optimum: Optimum | None

    @classmethod
    def to(cls, problem: PlanProblem, strategy: Strategy) -> Answers:
        """Solves the problem with both."""
        return cls(problem=problem, decision=solve(problem, strategy), optimum=BruteForce(problem).best(strategy))


def check_against_brute_force(
    found: Mapping[int, Answers], strategy: Strategy, value: Callable[[PlanProblem, Evaluation], float]
) -> None:
    """Asserts that the planner's plans are as good as those of brute force, proven optimal, and feasible; by seed."""
    num_planned = 0
    for seed, both in found.items():
        problem, decision, where = both.problem, both.decision, f"problem {seed}"
        if both.optimum is None:
            assert isinstance(decision, NoPlan), f"{where}: only the planner found {decision}"
            continue
        assert isinstance(decision, Planned), f"{where}: only brute force found {both.optimum}"
        best = value(problem, both.optimum.figures)
        assert value(problem, decision.figures) == pytest.approx(best, rel=AGREE, abs=0), where
        assert decision.gap == pytest.approx(0, abs=AGREE), where
        assert decision.bound == pytest.approx(abs(best), rel=AGREE), where
        assert decision.strategy == strategy
        assert decision.figures == evaluate(problem, decision.stages), where
        for stages in (decision.stages, *decision.candidates):
            assert violations(problem, stages, evaluate(problem, stages)) == [], f"{where}: {stages}"
            assert in_space(problem, strategy, stages), f"{where}: {stages}"
        num_planned += 1
    assert num_planned


def chunks(few: Mapping[Strategy, int], many: int) -> pytest.MarkDecorator:
    """Parametrizes a test by strategy with the first seeds, and with all others for `make test-all`."""
    rest = [
        pytest.param(each, range(first, many), id=f"{each}, many", marks=pytest.mark.slow)
        for each, first in few.items()
    ]
    first = [pytest.param(each, range(number), id=each) for each, number in few.items()]
    return pytest.mark.parametrize(("strategy", "seeds"), [*first, *rest])


def within(value: float | None, optimum: float | None, gap: float) -> bool:
    """Returns whether a value equals the optimum, or exceeds it by at most a relative `gap`."""
    if value is None or optimum is None:
        return value is optimum
    return -AGREE <= value / optimum - 1 <= gap + AGREE


def in_space(problem: PlanProblem, strategy: Strategy, stages: Sequence[Stage]) -> bool:
    """Returns whether a plan belongs to a strategy's space."""
    splits = [split for stage in stages for split in stage.splits]
    ramps = tuple(ramp for split in splits for ramp in split.ramps)
    if strategy in ("stock", "early-exit", "e3") and any(split.stays for split in splits):
        return False
    return {
        "best": True,
        "stock": len(splits) == 1 and ramps == (),
        "early-exit": len(splits) == 1 and ramps == problem.ramps,
        "e3": len(splits) == len(stages) and ramps == problem.ramps and len({split.batch for split in splits}) == 1,
        "serial": len(stages) == 1,
        "apparate": len(splits) == 1 and splits[0].after_answer == "stay",
    }[strategy]


def planned(problem: PlanProblem, space: Space | Strategy = "best", **options: Any) -> Planned:
    """Returns the planner's plan, and fails if there is none. `options`: those of `solve`."""
    decision = solve(problem, space, **options)
    assert isinstance(decision, Planned), decision
    return decision


def refused(problem: PlanProblem, strategy: Strategy = "best") -> NoPlan:
    """Returns the reason why there is no plan, and fails if there is one."""
    decision = solve(problem, strategy)
    assert isinstance(decision, NoPlan), decision
    return decision


def plan_json(file: ProblemFile, strategy: Strategy = "best") -> dict[str, Any]:
    """Returns the output of `offramp plan --json`, and fails if there is no plan."""
    return answer_document(answer(file, strategy))
