"""Finds the best division of a cluster among models, with a proven bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np

from earlyexit.clock import MonotonicClock
from earlyexit.errors import PlanError
from optimizer.cost.evaluate import worst_value
from optimizer.plans.plan import replicas_of
from optimizer.problems.fleet import Fleet, FleetModel
from optimizer.problems.tokens import in_tokens, with_budgets
from optimizer.search.decision import Planned, gap_between
from optimizer.search.fleet.columns import MAX_SEARCHED, divided_by_columns
from optimizer.search.fleet.prices import Division, priced
from optimizer.search.fleet.sets import divided_by_sets
from optimizer.search.planner import solve
from optimizer.search.space import SPACES, Space, TimeLimit

MAX_SETS = 1000
"""Different sets of devices, among which the models' chains are divided exactly."""
EXACT = 0.8
"""Part of the time for exact divisions, before quick ones are sought."""
GAP = 0.005
"""The gap that suffices."""


def solve_fleet(fleet: Fleet, *, time_limit_s: float, now_s: Callable[[], float] = MonotonicClock.now_s) -> Division:
    """Returns the best division of the accelerators that was found; a model without stages cannot be served.

    What is computed when `time_limit_s` has passed by the clock `now_s` is finished first. Even then, a quick division
    is returned if there is one.
    """
    limit = TimeLimit(seconds=time_limit_s, ends_s=now_s() + time_limit_s, now_s=now_s)
    space, models = replace(SPACES["best"], limit=limit), dict(fleet.models)
    for name, (problem, rate_per_s) in fleet.models.items():
        if problem.lengths is not None:
            models[name] = FleetModel(in_tokens(problem), rate_per_s * problem.lengths.mean)
    inner = replace(fleet, models=models)
    prices, divisions = priced(inner), list[Division]()
    if np.prod(inner.count_C + 1) <= MAX_SETS:
        divisions.append(divided_by_sets(inner, prices, space.with_share(EXACT), GAP))
    if not divisions or gap_between(abs(divisions[0].merit(inner)), divisions[0].bound) > GAP:
        divisions.append(divided_by_columns(inner, prices, space))
    best = max(divisions, key=lambda each: each.merit(inner))
    bound = worst_value(fleet.problems[0], [each.bound for each in divisions])
    is_small = inner.count_C.sum() <= MAX_SEARCHED
    if inner.is_cost and is_small and not space.is_over() and gap_between(abs(best.merit(inner)), bound) > GAP:
        divisions += _planned_again(inner, best, space)
        best = max(divisions, key=lambda each: each.merit(inner))
    pairs = zip(fleet.problems, best.stages, strict=True)
    stages = tuple(own if problem.lengths is None else with_budgets(problem, own) for problem, own in pairs)
    return Division(bound=bound, stages=stages)


def _planned_again(fleet: Fleet, division: Division, space: Space) -> Iterator[Division]:
    """Yields divisions in which one model after the other is planned on the devices that the others leave.

    A division's chains may serve more than the model's rate, at which their batches then fill too slowly.
    """
    stages_M = list(division.stages)
    for model in range(len(stages_M)):
        others = replicas_of(stage for own in (*stages_M[:model], *stages_M[model + 1 :]) for stage in own)
        left_C = fleet.count_C - [others[name] for name in fleet.names]
        with suppress(PlanError):  # none was found in time
            alone = fleet.problem_on(model, left_C.astype(int).tolist())
            found = solve(alone, space.with_share(1 / (len(stages_M) - model)))
            stages_M[model] = found.stages if isinstance(found, Planned) else stages_M[model]
            yield replace(division, stages=tuple(stages_M))
