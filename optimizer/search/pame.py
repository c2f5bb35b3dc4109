"""Strategy `pame`: the stock plan with the exits that PAME's search (ICS'22, section 6) finds for its batches.

The first exit is the one with the least mean answer time among those that slow down few enough batches. Further exits
are sought behind it in the same way, by the least tail latency, until none helps. PAME searches thresholds as well, for
a precision on the recorded inputs. Here a calibration's thresholds are fixed: its promise, which has a confidence for
new inputs, holds for every subset of the ramps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from earlyexit.errors import PlanError
from optimizer.cost.batching import ROUNDING, SLOWER, Batching
from optimizer.problems.problem import MinimizeLatency, PlanProblem
from optimizer.search.decision import Decision, FeasiblePlan, Found, NoPlan, Planned, plan_at_rate
from optimizer.search.soonest.solve import search_soonest, solve_soonest
from optimizer.search.space import Space
from profiles.records import RecordedBatches, batch_counts
from profiles.scores import BoolArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidate:
    """An exit in one step of the search, behind the exits found so far. By default, the state before the first exit."""

    inside_N: BoolArray
    """The inputs that move on."""
    slow_K: BoolArray
    """Batches that this exit or an earlier one makes slower than without exits."""
    allowed: int
    """n_i: largest number of inputs that may move on; -1 if even 0 is too slow."""
    ramp: int = -1
    leaving: float = 0.0
    """r_e: share of the inputs that reach the exit and leave there."""
    mean_s: float = np.inf
    """Equation 2: the mean answer time with this exit behind those found so far."""
    tail_s: float = np.inf
    """Equation 3's T_tail: the time with the largest number of inputs that move on, without the slow batches."""

    @property
    def slower(self) -> float:
        """The share of slow batches."""
        return float(self.slow_K.mean())


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SearchStep:
    """One step of the search: all candidates, and the chosen one."""

    batching: Batching
    """The batches behind the exits found so far."""
    candidates: tuple[Candidate, ...]
    chosen: Candidate | None
    """The best candidate; None if none helps, which ends the search."""


def exits_of(steps: Sequence[SearchStep]) -> tuple[int, ...]:
    """Returns the ramps that a search chose, in the order of the model."""
    return tuple(step.chosen.ramp for step in steps if step.chosen is not None)


Leaving = Callable[[Candidate, int], BoolArray]
"""Returns which of the inputs that the last exit lets move on leave at a ramp behind it."""


def fixed(batches: RecordedBatches) -> Leaving:
    """Returns the check of exits whose thresholds are fixed."""
    return lambda behind, ramp: behind.inside_N & batches.sure_NR[:, batches.ramps.index(ramp)]


def find_exits(batching: Batching, ramps: Sequence[int], num_inputs: int, leaving: Leaving) -> list[SearchStep]:
    """Searches for exits among ascending ramps, for batches of recorded inputs in order of arrival.

    Raises PlanError if fewer inputs are recorded than a batch holds.
    """
    size = batching.size
    if not 1 <= size <= num_inputs:
        raise PlanError(f"the batch must have from 1 to {num_inputs} inputs, which are recorded, not {size}")
    none_slow_K = np.zeros(num_inputs // size, dtype=bool)
    behind = Candidate(inside_N=np.ones(num_inputs, dtype=bool), slow_K=none_slow_K, allowed=size)
    steps: list[SearchStep] = []
    while True:
        stage = replace(batching, first=behind.ramp + 1, size=behind.allowed)
        later = [ramp for ramp in ramps if ramp > behind.ramp]
        candidates = tuple(_candidate(ramp, leaving(behind, ramp), behind, stage, size) for ramp in later)
        chosen = _chosen(candidates, stage)
        steps.append(SearchStep(batching=stage, candidates=candidates, chosen=chosen))
        if chosen is None or chosen.allowed < 1 or not chosen.inside_N.any() or chosen is candidates[-1]:
            return steps
        behind = chosen


def _candidate(ramp: int, leaves_N: BoolArray, behind: Candidate, stage: Batching, size: int) -> Candidate:
    """Returns an exit at which these inputs leave, with its times (section 6.4).

    Equation 2 sums ((n - j) t[i, 0] + j t[i, j]) C[i, j] / (n k) over j, with C[i, j] batches in which j inputs move
    on; this sums batch by batch.
    """
    inside_N = behind.inside_N & ~leaves_N
    remaining_K, seconds_J = batch_counts(inside_N, size), stage.exit_seconds_J(ramp)
    allowed = int(np.logical_and.accumulate(seconds_J <= stage.whole_s * (1 + ROUNDING)).sum()) - 1
    slow_K, within_K = behind.slow_K | (remaining_K > allowed), np.minimum(remaining_K, stage.size)
    moving_K = within_K / stage.size
    return Candidate(
        inside_N=inside_N,
        slow_K=slow_K,
        allowed=allowed,
        ramp=ramp,
        leaving=float(leaves_N.sum() / behind.inside_N.sum()),
        mean_s=float(((1 - moving_K) * seconds_J[0] + moving_K * seconds_J[within_K]).mean()),
        tail_s=float(seconds_J[remaining_K[~slow_K].max()]) if not slow_K.all() else np.inf,
    )


def _chosen(candidates: tuple[Candidate, ...], stage: Batching) -> Candidate | None:
    """Returns the candidate that saves most time, if inputs leave there and it slows down few enough batches."""

    def seconds(each: Candidate) -> float:
        return each.tail_s if stage.first else each.mean_s

    sooner_s = stage.whole_s * (1 - ROUNDING)
    helping = [each for each in candidates if each.leaving and each.slower <= SLOWER and seconds(each) < sooner_s]
    return min(helping, key=seconds, default=None)


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
    stock = solve_soonest(problem.without_queues(), replace(space, ramps="none"))
    if isinstance(stock, NoPlan):
        return replace(stock, strategy=space.strategy)
    [stage] = stock.stages
    batching = Batching(table=problem.latency[stage.device], ramps=problem.ramps, size=stage.splits[0].batch)
    search: list[SearchStep] = []
    if batching.size <= len(problem.batches):
        search = find_exits(batching, problem.batches.ramps, len(problem.batches), fixed(problem.batches))
    found = _with_exits(problem, stock, exits_of(search))
    bound = search_soonest(problem.without_queues(), space).bound
    note = "" if found.stages[0].splits[0].ramps else _why_no_exit(search, batching.size)
    return replace(Found(plans=(found,), bound=bound).planned(problem, space.strategy), note=note)


def _with_exits(problem: PlanProblem, stock: Planned, exits: tuple[int, ...]) -> FeasiblePlan:
    """Returns the stock plan with as many of the first exits as keep every promise, and with the fewest replicas."""
    [stage], rate_per_s = stock.stages, problem.required_per_s or 0.0
    for count in range(len(exits), -1, -1):
        splits = (replace(stage.splits[0], ramps=exits[:count]),)
        found = plan_at_rate(problem, (replace(stage, splits=splits),), rate_per_s)
        if found is not None:
            return found
    return stock


def _why_no_exit(search: Sequence[SearchStep], batch: int) -> str:
    if not search:
        return f"no exit: fewer inputs are recorded than a batch of {batch} holds"
    if exits_of(search):
        return "no exit: with any of those that were found the plan would break a promise (SLO, rate or ramp budget)"
    slower = [each.slower for each in search[0].candidates if each.leaving]
    if not slower:
        return "no exit: no input leaves at any ramp"
    if min(slower) > SLOWER:
        return f"no exit: at least {min(slower):.1%} of the batches of {batch} would be slower, {SLOWER:.1%} may be"
    return f"no exit: none makes batches of {batch} sooner on average without slowing more than {SLOWER:.1%} of them"
