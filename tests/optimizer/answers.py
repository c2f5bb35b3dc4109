"""What a strategy may answer, and how near its figures must be to those that are known."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from offramp.commands.plan import PlanAnswer, answer, answer_document
from optimizer.decision import Decision, NoPlan, Planned, Strategy
from optimizer.evaluate import Evaluation, evaluate, violations
from optimizer.plan import Stage
from optimizer.planner import solve
from optimizer.problem import PlanProblem
from optimizer.problem_file import ProblemFile
from tests.optimizer.brute_force import Optimum, Twin

AGREE = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Of the planner and its twin, to one problem."""

    problem: PlanProblem
    decision: Decision
    optimum: Optimum | None

    @classmethod
    def to(cls, problem: PlanProblem, strategy: Strategy) -> Answers:
        """Ask both."""
        return cls(problem=problem, decision=solve(problem, strategy), optimum=Twin(problem).best(strategy))


def as_good_as_the_twin(
    found: Mapping[int, Answers], strategy: Strategy, value: Callable[[PlanProblem, Evaluation], float]
) -> None:
    """Asserts that the planner's values equal the twin's, are proven best, and keep every promise; by seed."""
    num_planned = 0
    for seed, both in found.items():
        problem, decision, where = both.problem, both.decision, f"problem {seed}"
        if both.optimum is None:
            assert isinstance(decision, NoPlan), f"{where}: only the planner has {decision}"
            continue
        assert isinstance(decision, Planned), f"{where}: only the twin has {both.optimum}"
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
    """By strategy, the first seeds, and for `make test-all` all others."""
    rest = [
        pytest.param(each, range(first, many), id=f"{each}, many", marks=pytest.mark.slow)
        for each, first in few.items()
    ]
    first = [pytest.param(each, range(number), id=each) for each, number in few.items()]
    return pytest.mark.parametrize(("strategy", "seeds"), [*first, *rest])


def within(told: float | None, known: float | None, room: float) -> bool:
    """Whether `told` is `known`, or above it by no more than a share `room` of it."""
    if told is None or known is None:
        return told is known
    return -AGREE <= told / known - 1 <= room + AGREE


def in_space(problem: PlanProblem, strategy: Strategy, stages: Sequence[Stage]) -> bool:
    """Whether a strategy may answer this plan."""
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


def planned(problem: PlanProblem, strategy: Strategy = "best") -> Planned:
    """The planner's plan, where there must be one."""
    decision = solve(problem, strategy)
    assert isinstance(decision, Planned), decision
    return decision


def refused(problem: PlanProblem, strategy: Strategy = "best") -> NoPlan:
    """Why there is no plan, where there must be none."""
    decision = solve(problem, strategy)
    assert isinstance(decision, NoPlan), decision
    return decision


def told(file: ProblemFile, strategy: Strategy = "best") -> dict[str, Any]:
    """What `offramp plan --json` says of the plan, where there must be one."""
    found = answer(file, strategy, solve)
    assert isinstance(found, PlanAnswer)
    return answer_document(found)
