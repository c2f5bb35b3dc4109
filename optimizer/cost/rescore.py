"""Scores plans again on joint exit records.

The planner models survival as nested: an input that passes a ramp passes all earlier ramps. Records are more exact: an
input that would leave at ramp 2 may pass ramp 5. If few ramps are active, more inputs stay than in the nested model,
and another of several good plans may be the best one. If the mean answer time is minimized and batches are recorded,
plans are also scored batch by batch rather than on the mean batch. The two differ because times are not linear in the
batch size: on accelerators they grow in steps (PAME, figure 13(c)), and a batch of 9 may take as long as one of 16.
Moreover, the inputs that wait longest are in the batches that shrink least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from earlyexit.errors import PlanError
from optimizer.cost.evaluate import Evaluation, evaluate, merit, objective_value, violations
from optimizer.plans.plan import Stage, used_networks
from optimizer.problems.problem import MinimizeLatency, PlanProblem, Reach
from optimizer.search.decision import Planned, gap_between
from profiles.records import ExitRecords


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescored:
    """A plan's figures with joint records."""

    stages: tuple[Stage, ...]
    joint: Evaluation
    broken: tuple[str, ...]
    """Constraints that the plan violates according to the records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescoring:
    """All rescored candidates, in the planner's order. The first one is the planner's choice."""

    candidates: tuple[Rescored, ...]
    chosen: Rescored | None
    """The best feasible candidate according to the records; None if no candidate is feasible."""
    planned: Planned
    """The plan of the chosen candidate, or else the planner's choice, with nested figures."""


def joint_reach(records: ExitRecords, thresholds: Mapping[int, float], *, by_tokens: bool = False) -> Reach:
    """Returns the survival of recorded inputs under these thresholds, as a function of the active ramps.

    `by_tokens` weights inputs by their tokens, if the records hold them.
    """

    def reach(active: Sequence[int]) -> Sequence[float]:
        missing = sorted(set(active) - set(thresholds))
        if missing:
            raise PlanError(f"active ramps {missing} have no threshold; there are thresholds for {sorted(thresholds)}")
        outcome = records.outcome({ramp: thresholds[ramp] for ramp in active})
        return outcome.survival_by(records.tokens_N) if by_tokens and records.tokens_N is not None else outcome.survival

    return reach


def by_networks(problem: PlanProblem, with_all: Reach, without_some: Reach) -> Reach:
    """Returns `with_all` for plans that use every network, that is if each has an active ramp, else `without_some`."""
    before_last = set(range(len(problem.networks) - 1))

    def reach(active: Sequence[int]) -> Sequence[float]:
        used = set(used_networks(problem.networks, set(active)))
        return with_all(active) if before_last <= used else without_some(active)

    return reach


def rescore(problem: PlanProblem, planned: Planned, reach: Reach) -> Rescoring:
    """Scores a plan and its candidates with `reach`, and selects the best feasible one, with its shares by `reach`."""
    by_batch = problem.batches if isinstance(problem.objective, MinimizeLatency) else None
    distinct = dict.fromkeys((planned.stages, *planned.candidates))
    plans = {stages: evaluate(problem, stages, by_batch or reach) for stages in distinct}
    candidates = tuple(
        Rescored(stages=stages, joint=joint, broken=tuple(violations(problem, stages, joint)))
        for stages, joint in plans.items()
    )
    feasible = [each for each in candidates if not each.broken]
    chosen = max(feasible, key=lambda each: merit(problem, each.joint), default=None)
    if chosen and (chosen.stages, chosen.joint.shares) != (planned.stages, planned.figures.shares):
        figures = evaluate(problem, chosen.stages, shares=chosen.joint.shares)
        gap = gap_between(objective_value(problem, figures), planned.bound)
        others = tuple(each for each in plans if each != chosen.stages)
        planned = replace(planned, stages=chosen.stages, figures=figures, gap=gap, candidates=others)
    return Rescoring(candidates=candidates, chosen=chosen, planned=planned)
