"""The best plan of a space, proven so, or what keeps it from having one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from optimizer.decision import Decision, FeasiblePlan, nearest_slo_s, rate_of, why_infeasible
from optimizer.evaluate import merit, objective_value
from optimizer.exact.intervals import MOST_LABELS, ExactSearch, Searched
from optimizer.moves import build_graph, end_nodes
from optimizer.problem import MaximizeRate, MinimizeCost, PlanProblem, device_names
from optimizer.space import Space, parts_of, payable_names

# Beyond these the search would take minutes, or more bits for a set of devices than an integer has.
MOST_SPLITS = 2_000_000
MOST_SETS = 2**58


def solve_exactly(problem: PlanProblem, space: Space, *, most_labels: int = MOST_LABELS) -> Decision | None:
    """A plan, with a gap of 0 where it is proven best, or proof that there is none; None where it gives up before."""
    if is_too_big(problem, space):
        return None
    answer, met = best_of(problem, space, most_labels=most_labels)
    found = answer.found
    if found is None and not answer.proven:
        return None
    if found is None:
        return why_infeasible(
            problem,
            space.strategy,
            possible=partial(_any_plan, space=space),
            nearest_slo_s=lambda patient: nearest_slo_s(problem, patient, partial(_any_plan, space=space)),
            highest_rate_per_s=lambda other: rate_of(best_of(replace(other, objective=MaximizeRate()), space)[0].found),
        )
    return found.planned(problem, space.strategy, answer.bound, (each.stages for each in reversed(met)))


def is_too_big(problem: PlanProblem, space: Space) -> bool:
    """Whether an exact search is out of reach, by the splits to choose from, or the sets of devices in use."""
    counts = [problem.devices[name].count + 1 for name in device_names(problem)]
    num_sets = math.prod(counts) if space.several_stages else max(counts, default=1)
    return num_sets > MOST_SETS or num_splits(problem, space) > MOST_SPLITS


def num_splits(problem: PlanProblem, space: Space) -> int:
    """At most so many, over all devices and batch sizes."""
    num_sizes = sum(len(problem.latency[name].batches) for name in device_names(problem))
    if not space.several_stages and not space.splits_per_stage:
        return num_sizes
    pairs = problem.num_blocks * (problem.num_blocks + 1) // 2
    if space.ramps in ("choose", "split-ends"):
        # A split leads from (first, entry) to (end, last): both ranks are of ramps before their boundary.
        after_Q = np.array([0, *(ramp + 1 for ramp in problem.ramps)])
        num_ranks_K = np.searchsorted(after_Q, np.arange(problem.num_blocks + 1), side="right")
        pairs = 0
        for first in range(problem.num_blocks):
            here, later_K = int(num_ranks_K[first]), num_ranks_K[first + 1 :]
            pairs += int((here * later_K).sum()) - len(later_K) * here * (here - 1) // 2
    return pairs * num_sizes


def best_of(
    problem: PlanProblem, space: Space, *, any_plan: bool = False, most_labels: int = MOST_LABELS
) -> tuple[Searched, list[FeasiblePlan]]:
    """The best plan of all searches with what they prove together, and the good plans met on the way."""
    cheapest = isinstance(problem.objective, MinimizeCost)
    best: FeasiblePlan | None = None
    open_bounds: list[float] = []
    met: list[FeasiblePlan] = []
    for search in _searches(problem, space, most_labels):
        answer = _asked(search, problem, any_plan=any_plan)
        met.extend(search.met)
        if not answer.proven:
            open_bounds.append(answer.bound)
        if answer.found is not None and (
            best is None or merit(problem, answer.found.figures) > merit(problem, best.figures)
        ):
            best = answer.found
    value = objective_value(problem, best.figures) if best else math.inf if cheapest else 0.0
    better = [bound for bound in open_bounds if (bound < value if cheapest else bound > value)]
    bound = (min if cheapest else max)(better, default=value)
    return Searched(found=best, bound=bound, proven=not better), met


def one_better(problem: PlanProblem, space: Space, value: float) -> FeasiblePlan | None:
    """The best plan of one chain, if it is better than a rate or a cost that several chains have; it may be missed."""
    if is_too_big(problem, space):
        return None
    searches = (replace(each, known=value) for each in _searches(problem, space, MOST_LABELS))
    found = [answer.found for each in searches if (answer := _ask(each, problem, any_plan=False)).found is not None]
    return max(found, key=lambda each: merit(problem, each.figures), default=None)


def _asked(search: ExactSearch, problem: PlanProblem, *, any_plan: bool) -> Searched:
    """One search; where it gives up without a plan, one of the plans with one split per stage."""
    ask = partial(_ask, problem=problem, any_plan=any_plan)
    answer = ask(search)
    if answer.found is None and not answer.proven and search.may_split:
        return replace(answer, found=ask(replace(search, may_split=False)).found)
    return answer


def _ask(search: ExactSearch, problem: PlanProblem, *, any_plan: bool) -> Searched:
    if isinstance(problem.objective, MinimizeCost):
        return search.least_cost(problem.objective.rate_per_s)
    return search.highest_rate(any_plan=any_plan)


def _searches(problem: PlanProblem, space: Space, most_labels: int) -> Iterator[ExactSearch]:
    """One per part of the space, or one per batch size where all splits share it."""
    for part in parts_of(problem, space, payable_names(problem)):
        nodes = None if space.splits_per_stage or space.several_stages else end_nodes(problem)
        graph = build_graph(part, space.ramps, every_batch=space.one_batch, nodes=nodes)
        for batch in sorted(set(graph.moves.batch_M.tolist())) if space.one_batch else [None]:
            yield ExactSearch(
                graph=graph if batch is None else graph.with_batch(batch),
                may_split=space.splits_per_stage,
                may_hop=space.several_stages,
                most_labels=most_labels,
            )


def _any_plan(problem: PlanProblem, space: Space) -> FeasiblePlan | None:
    return best_of(problem, space, any_plan=True)[0].found
