"""From plan problems to the plan that is proposed: solved, scored on what was seen, within slots, without blame."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from optimizer.decision import Decision, NoPlan, Planned, Strategy, gap_between
from optimizer.evaluate import Evaluation, evaluate, sought, violations
from optimizer.live.blame import Blamed
from optimizer.plan import Stage
from optimizer.problem import PlanProblem
from optimizer.reach import Reach
from optimizer.rescore import rechosen, rescore

Solve = Callable[[PlanProblem, Strategy], Awaitable[Decision]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """The best plan found."""

    problem: PlanProblem
    """That it is the answer to."""
    planned: Planned
    reach: Reach | None
    """Of joint exit records; None where there were too few."""

    @property
    def figures(self) -> Evaluation:
        """What it will do, by all that was seen."""
        return evaluate(self.problem, self.planned.stages, self.reach)


async def propose(
    questions: Sequence[PlanProblem],
    solve: Solve,
    strategy: Strategy,
    *,
    slots: Mapping[str, int],
    blamed: Blamed,
    reach: Reach | None,
) -> Proposal | NoPlan:
    """Answer the first question that has an answer; what the first said where none has."""
    refusals: list[NoPlan] = []
    for problem in questions:
        found = await _solved(problem, solve, strategy, slots, blamed)
        if isinstance(found, NoPlan):
            refusals.append(found)
            continue
        if reach is not None:
            found = rechosen(problem, found, rescore(problem, found, reach))
        return Proposal(problem=problem, planned=found, reach=reach)
    return refusals[0]


async def _solved(
    problem: PlanProblem, solve: Solve, strategy: Strategy, slots: Mapping[str, int], blamed: Blamed
) -> Decision:
    """The planner knows nothing of slots and blame: its other good plans are tried, then those of one stage."""
    decision = await solve(problem, strategy)
    if isinstance(decision, NoPlan):
        return decision
    allowed = _allowed(problem, decision, slots, blamed)
    if allowed is not None:
        return allowed
    serial = await solve(problem, "serial")
    if isinstance(serial, NoPlan):
        return serial
    return _allowed(problem, serial, slots, blamed) or NoPlan(strategy=strategy, binding="devices")


def _allowed(problem: PlanProblem, planned: Planned, slots: Mapping[str, int], blamed: Blamed) -> Planned | None:
    stages = [
        each
        for each in dict.fromkeys((planned.stages, *planned.candidates))
        if _fits(each, slots) and not blamed.holds(each, problem)
    ]
    kept = [each for each in stages if each == planned.stages or not violations(problem, each, evaluate(problem, each))]
    if not kept:
        return None
    if kept[0] == planned.stages:
        return replace(planned, candidates=tuple(kept[1:]))
    figures = evaluate(problem, kept[0])
    gap = gap_between(sought(problem, figures), planned.bound)
    return replace(planned, stages=kept[0], figures=figures, gap=gap, candidates=tuple(kept[1:]))


def _fits(stages: Sequence[Stage], slots: Mapping[str, int]) -> bool:
    needed = Counter(stage.device for stage in stages)
    return all(count <= slots.get(device, 0) for device, count in needed.items())
