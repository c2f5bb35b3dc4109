"""Strategy `pame`: the stock plan with the exits that PAME's search finds for its batches."""

from __future__ import annotations

from dataclasses import replace

from earlyexit.errors import PlanError
from optimizer.batching import Batching
from optimizer.decision import Decision, FeasiblePlan, NoPlan, Planned, if_feasible
from optimizer.pame.search import SLOWER, ExitSearchResult, find_exits, fixed_checks
from optimizer.problem import MinimizeLatency, PlanProblem
from optimizer.soonest.solve import solve_soonest
from optimizer.space import Space


def solve_pame(problem: PlanProblem, space: Space) -> Decision:
    """Returns the best stock plan with as many of the exits found as the promises (SLO, rate, ramp budget) allow.

    Exits are removed from the last one on until the promises are kept. The plan has only the replicas that the rate
    needs. If fewer inputs are recorded than a batch holds, it has no exits. The bound is that of the cost model, which
    knows only mean batches, over all plans of one stage and one split.

    Raises PlanError for another objective than the answer time, and without recorded batches.
    """
    if not isinstance(problem.objective, MinimizeLatency):
        raise PlanError("strategy pame seeks early answers; its objective is {minimize: latency, rate_per_s: ...}")
    if problem.batches is None:
        raise PlanError(
            "strategy pame needs the distribution of batches, where survival has only their mean; give survival from "
            "exit records, or `batches`"
        )
    stock = solve_soonest(problem, replace(space, ramps="none"))
    if isinstance(stock, NoPlan):
        return replace(stock, strategy=space.strategy)
    [stage] = stock.stages
    batching = Batching(table=problem.latency[stage.device], ramps=problem.ramps, size=stage.splits[0].batch)
    search = None
    if batching.size <= len(problem.batches):  # thresholds are fixed: a calibration's promise holds for all subsets
        search = find_exits(batching, fixed_checks(problem.batches), kept=None)
    found = _with_exits(problem, stock, () if search is None else search.ramps)
    best = solve_soonest(problem, space)
    assert isinstance(best, Planned), "the stock plan is a plan of the space"
    note = "" if found.stages[0].splits[0].ramps else _why_no_exit(search, batching.size)
    return replace(found.planned(problem, space.strategy, best.bound), note=note)


def _with_exits(problem: PlanProblem, stock: Planned, exits: tuple[int, ...]) -> FeasiblePlan:
    """Returns the stock plan with as many of the first exits as keep every promise, and with the fewest replicas."""
    [stage] = stock.stages
    for count in range(len(exits), 0, -1):
        splits = (replace(stage.splits[0], ramps=exits[:count]),)
        for replicas in range(1, problem.devices[stage.device].count + 1):
            found = if_feasible(problem, (replace(stage, splits=splits, replicas=replicas),))
            if found is not None:
                return found
    return FeasiblePlan(stages=stock.stages, figures=stock.figures)


def _why_no_exit(search: ExitSearchResult | None, batch: int) -> str:
    if search is None:
        return f"no exit: fewer inputs are recorded than a batch of {batch} holds"
    if search.ramps:
        return "no exit: with any of those that were found the plan would break a promise (SLO, rate or ramp budget)"
    slower = [each.slower for each in search.steps[0].candidates if each.leaving]
    if not slower:
        return "no exit: no input leaves at any ramp"
    if min(slower) > SLOWER:
        return f"no exit: at least {min(slower):.1%} of the batches of {batch} would be slower, {SLOWER:.1%} may be"
    return f"no exit: none makes batches of {batch} sooner on average without slowing more than {SLOWER:.1%} of them"
