"""The plan of strategy `pame`: the stock plan with the exits that PAME's search finds for its batches."""

from __future__ import annotations

from dataclasses import replace

from earlyexit.errors import PlanError
from optimizer.decision import Decision, Found, NoPlan, Planned, gap_between, kept
from optimizer.pame.checks import GivenChecks
from optimizer.pame.search import FoundExits, SearchOptions, find_exits
from optimizer.pame.times import seconds_of
from optimizer.plan import Stage
from optimizer.problem import MinimizeLatency, PlanProblem
from optimizer.soonest.solve import solve_soonest
from optimizer.space import Space


def solve_pame(problem: PlanProblem, space: Space, options: SearchOptions | None = None) -> Decision:
    """The best stock plan's batch, device and thresholds that are there; of the exits found as many as may be.

    Exits are left out from the last one on where the problem's promises (SLO, rate, ramp budget) allow no more, and no
    more replicas are used than the rate needs. Where fewer inputs are recorded than a batch holds, there are no exits;
    where there is no stock plan, there is none. The bound is of the whole space, one stage and one split with any
    ramps, by the cost model, which knows the mean of batches only.

    Raises PlanError for another objective than early answers, and without recorded batches.
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
    # Of batches larger than all that was recorded nothing is known.
    known = stage.splits[0].batch <= len(problem.batches)
    found = _with_exits(problem, stock, exits_for(problem, stage, options).ramps if known else ())
    best = solve_soonest(problem, space)
    assert isinstance(best, Planned), "there is a plan, so none is ruled out"
    value = found.figures.mean_latency_s
    return Planned(
        strategy=space.strategy,
        stages=found.chain,
        figures=found.figures,
        bound=best.bound,
        gap=gap_between(value, best.bound),
    )


def exits_for(problem: PlanProblem, stage: Stage, options: SearchOptions | None = None) -> FoundExits:
    """The search on a stock plan's stage; raises PlanError where the recorded inputs make no batch of its size."""
    assert problem.batches is not None
    seconds = seconds_of(problem.latency[stage.device], problem.ramps)
    return find_exits(seconds, GivenChecks(batches=problem.batches), stage.splits[0].batch, options)


def _with_exits(problem: PlanProblem, stock: Planned, exits: tuple[int, ...]) -> Found:
    """The stock plan with the exits, or with the first of them, that keeps every promise."""
    [stage] = stock.stages
    for count in range(len(exits), 0, -1):
        splits = (replace(stage.splits[0], ramps=exits[:count]),)
        for replicas in range(1, problem.devices[stage.device].count + 1):
            found = kept(problem, (replace(stage, splits=splits, replicas=replicas),))
            if found is not None:
                return found
    return Found(chain=stock.stages, figures=stock.figures)
