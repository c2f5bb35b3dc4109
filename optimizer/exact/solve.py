"""Solves a problem exactly: the best plan of a space with proof, or the promise that no plan can keep."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from optimizer.decision import Decision, FeasiblePlan, nearest_slo_s, rate_of, why_infeasible
from optimizer.evaluate import merit, objective_value
from optimizer.exact.intervals import MOST_LABELS, ExactSearch, SearchResult
from optimizer.moves import build_graph, end_nodes
from optimizer.problem import MaximizeRate, MinimizeCost, PlanProblem, device_names
from optimizer.space import Space, parts_of, payable_names

# With more splits the search would take minutes. More sets of devices in use do not fit the bits of an integer.
MOST_SPLITS = 2_000_000
MOST_SETS = 2**58


def solve_exactly(problem: PlanProblem, space: Space, *, most_labels: int = MOST_LABELS) -> Decision | None:
    """Returns the best plan (gap 0 if it is proven optimal), or a proof that no plan exists.

    Returns None if the problem is too large, or if the search gave up without a plan.
    """
    if is_too_big(problem, space):
        return None
    result = search_space(problem, space, most_labels=most_labels)
    if result.found is not None:
        candidates = (plan.stages for plan in result.candidates)
        return result.found.planned(problem, space.strategy, result.bound, candidates)
    if not result.proven:
        return None
    return why_infeasible(
        problem,
        space.strategy,
        possible=partial(_any_plan, space=space),
        nearest_slo_s=lambda patient: nearest_slo_s(problem, patient, partial(_any_plan, space=space)),
        highest_rate_per_s=lambda other: rate_of(search_space(replace(other, objective=MaximizeRate()), space).found),
    )


def is_too_big(problem: PlanProblem, space: Space) -> bool:
    """Returns whether the splits, or the sets of devices in use, are too many for an exact search."""
    counts = [problem.devices[name].count + 1 for name in device_names(problem)]
    num_sets = math.prod(counts) if space.several_stages else max(counts, default=1)
    return num_sets > MOST_SETS or num_splits(problem, space) > MOST_SPLITS


def num_splits(problem: PlanProblem, space: Space) -> int:
    """Returns an upper bound on the number of splits, over all devices and batch sizes."""
    num_sizes = sum(len(problem.latency[name].batches) for name in device_names(problem))
    if not space.several_stages and not space.splits_per_stage:
        return num_sizes
    pairs = problem.num_blocks * (problem.num_blocks + 1) // 2
    if space.ramps in ("choose", "split-ends"):
        # A split leads from (first, entry) to (end, last). Entry and last are ranks of ramps before these boundaries.
        after_Q = np.array([0, *(ramp + 1 for ramp in problem.ramps)])
        num_ranks_K = np.searchsorted(after_Q, np.arange(problem.num_blocks + 1), side="right")
        pairs = 0
        for first in range(problem.num_blocks):
            num_entries, later_K = int(num_ranks_K[first]), num_ranks_K[first + 1 :]
            pairs += int((num_entries * later_K).sum()) - len(later_K) * num_entries * (num_entries - 1) // 2
    return pairs * num_sizes


def search_space(
    problem: PlanProblem, space: Space, *, any_plan: bool = False, most_labels: int = MOST_LABELS
) -> SearchResult:
    """Returns the best plan of all parts of a space with their joint bound. Candidates are all plans found."""
    is_cost = isinstance(problem.objective, MinimizeCost)
    results: list[SearchResult] = []
    plans: list[FeasiblePlan] = []
    for search in _searches(problem, space, most_labels):
        results.append(_run_or_simplify(search, problem, any_plan=any_plan))
        plans.extend(search.plans)
    found = [result.found for result in results if result.found is not None]
    best = max(found, key=lambda plan: merit(problem, plan.figures), default=None)
    open_bounds = [result.bound for result in results if not result.proven]
    value = objective_value(problem, best.figures) if best else math.inf if is_cost else 0.0
    better = [bound for bound in open_bounds if (bound < value if is_cost else bound > value)]
    bound = (min if is_cost else max)(better, default=value)
    return SearchResult(found=best, bound=bound, proven=not better, candidates=tuple(reversed(plans)))


def better_plan(problem: PlanProblem, space: Space, incumbent: float) -> FeasiblePlan | None:
    """Returns the best plan of one chain that is better than an incumbent rate or cost. It may miss such a plan."""
    if is_too_big(problem, space):
        return None
    searches = (replace(search, incumbent=incumbent) for search in _searches(problem, space, MOST_LABELS))
    plans = [result.found for search in searches if (result := _run(search, problem)).found is not None]
    return max(plans, key=lambda plan: merit(problem, plan.figures), default=None)


def _run_or_simplify(search: ExactSearch, problem: PlanProblem, *, any_plan: bool) -> SearchResult:
    """Runs a search. If it gives up without a plan, takes a plan with one split per stage."""
    result = _run(search, problem, any_plan=any_plan)
    if result.found is None and not result.proven and search.may_split:
        return replace(result, found=_run(replace(search, may_split=False), problem, any_plan=any_plan).found)
    return result


def _run(search: ExactSearch, problem: PlanProblem, *, any_plan: bool = False) -> SearchResult:
    if isinstance(problem.objective, MinimizeCost):
        return search.least_cost(problem.objective.rate_per_s)
    return search.highest_rate(any_plan=any_plan)


def _searches(problem: PlanProblem, space: Space, most_labels: int) -> Iterator[ExactSearch]:
    """Yields one search per part of the space, or one per batch size if all splits must share it."""
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
    return search_space(problem, space, any_plan=True).found
