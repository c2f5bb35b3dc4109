"""Finds the best division of a cluster among models, with a proven bound."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from earlyexit.clock import MonotonicClock
from optimizer.problems.tokens import in_tokens, with_budgets
from optimizer.search.fleet.columns import divided_by_columns
from optimizer.search.fleet.prices import Division, Fleet, FleetModel, priced
from optimizer.search.fleet.sets import divided_by_sets

MAX_SETS = 1000
"""Different sets of devices, among which the models' chains are divided exactly."""
GAP = 0.005
"""The gap that suffices."""


def solve_fleet(fleet: Fleet, *, time_limit_s: float, now_s: Callable[[], float] = MonotonicClock.now_s) -> Division:
    """Returns the best division of the accelerators that was found; a model without stages cannot be served.

    What is computed when `time_limit_s` has passed by the clock `now_s` is finished first.
    """
    ends_s, inner = now_s() + time_limit_s, Fleet(models=_in_tokens(fleet.models), most_chains=fleet.most_chains)
    prices = priced(inner)

    def is_over() -> bool:
        return now_s() >= ends_s

    if np.prod(inner.count_C + 1) <= MAX_SETS:
        division = divided_by_sets(inner, prices, is_over, GAP)
    else:
        division = divided_by_columns(inner, prices, is_over)
    pairs = zip(fleet.problems, division.stages, strict=True)
    stages = tuple(own if problem.lengths is None else with_budgets(problem, own) for problem, own in pairs)
    return replace(division, stages=stages)


def _in_tokens(models: Mapping[str, FleetModel]) -> dict[str, FleetModel]:
    """Returns the models with tokens in place of inputs where inputs have lengths."""
    return {
        name: FleetModel(in_tokens(problem), rate_per_s * problem.lengths.mean) if problem.lengths else model
        for name, model in models.items()
        for problem, rate_per_s in [model]
    }
