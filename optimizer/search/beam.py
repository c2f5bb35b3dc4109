"""Solves problems that are too big for an exact search: a good plan, a proven bound, and the gap between them.

The bound comes from `optimizer.search.relaxation`. The active ramps of its best walk show which ramps are worthwhile.
On the graph of the splits between these ramps (`optimizer.search.moves.build_graph`), prices are computed again, now
with exact hops and stages. They guide a beam search (`optimizer.search.label_search`) for plans of a given rate, or
within a given cost, ever closer to the bound. It first seeks plans of one split per stage, then plans of several
splits near the best of these. `optimizer.cost.evaluate` scores every plan that it finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from optimizer.cost.evaluate import best_value, merit, objective_value
from optimizer.problems.problem import PlanProblem
from optimizer.search.decision import FeasiblePlan, Found, joined, plan_at_rate
from optimizer.search.exact import limits_of_plans, one_split, search_exactly, stage_planes
from optimizer.search.label_search import UNLIMITED, search_labels, trace
from optimizer.search.moves import Graph, build_graph, near_stages
from optimizer.search.relaxation import Relaxation, solve_relaxation
from optimizer.search.space import Space, parts_of
from optimizer.search.walks import Prices

# Steps towards the bound, as shares of the distance: with a plan, and the first and the last one without any plan.
STEP, FIRST_STEP, LEAST_STEP = 0.5, 0.95, 0.01
# Beam widths in labels per node: of the successive searches for stages of one split, and of the search near a plan.
WIDTHS = (300, 2000)
WIDE = 1000
# Relative improvements below this are not sought.
COARSE, FINE = 2e-3, 4e-4
# Distances in blocks within which plans near the best one are sought.
WINDOWS = (3, 5)
# Distance in the final search, and its last ramps per boundary.
LAST_WINDOW = 2
RANKS_NEAR = 3
# Iterations of the cutting-plane method before a plan is known. The bound is valid after any number of them.
TIGHTENINGS = 20
# Graphs with at most this many moves are searched as a whole for stages of several splits.
FEW_MOVES = 5000


def search_at_scale(problem: PlanProblem, space: Space) -> Found:
    """Returns good plans of one chain, and a proven bound. Plans of one split are found exactly.

    Without a plan, the bound says whether one may exist.
    """
    single = search_exactly(problem, one_split(space))
    founds = [Found(plans=ScaleSearch(each).plans(), bound=each.bound.value) for each in _relaxed_parts(problem, space)]
    bound = best_value(problem, (found.bound for found in founds))
    return joined(problem, [*founds, *([single] if single else [])], bound)


def bound_at_scale(problem: PlanProblem, space: Space) -> float | None:
    """Returns a bound on the rate, or on the cost, of all plans of a space; None if no plan exists."""
    bounds = [relaxation.bound.value for relaxation in _relaxed_parts(problem, space)]
    return best_value(problem, bounds) if bounds else None


def _relaxed_parts(problem: PlanProblem, space: Space) -> Iterator[Relaxation]:
    """Yields the relaxation of each part of a space that may have plans."""
    for part, own in parts_of(problem, space):
        if (relaxation := solve_relaxation(part, own, TIGHTENINGS)) is not None:
            yield relaxation


@dataclass(slots=True)
class ScaleSearch:
    """A search for good plans in one part of a space."""

    relaxation: Relaxation
    _plans: list[FeasiblePlan] = field(default_factory=list)

    def plans(self) -> tuple[FeasiblePlan, ...]:
        """Returns all plans found that keep every promise, the best first."""
        space = self.relaxation.space
        if space.is_over():
            return ()
        graph, one_split = self._graph(1), replace(space, splits_per_stage=False)
        prices = stage_planes(graph, space).tightened(self.relaxation.bound).prices
        for width in WIDTHS:
            self._climb(graph, prices, width, COARSE, one_split)
        if not self._plans or graph.num_moves <= FEW_MOVES:
            self._climb(graph, prices, WIDE, COARSE, space)
        for distance in WINDOWS:
            self._climb(self._near_best(graph, distance), prices, WIDE, FINE, space)
        if not space.is_over():
            self._climb(self._near_best(self._graph(RANKS_NEAR), LAST_WINDOW), prices, WIDE, FINE, space)
        return tuple(sorted(self._plans, key=self._merit, reverse=True))

    def _merit(self, plan: FeasiblePlan) -> tuple[float, ...]:
        return merit(self.relaxation.problem, plan.figures)

    @property
    def _best(self) -> FeasiblePlan | None:
        return max(self._plans, key=self._merit, default=None)

    def _near_best(self, graph: Graph, distance: int) -> Graph:
        """Returns the splits near the best plan, whose ends or batch sizes differ a little. Without a plan, none."""
        return near_stages(graph, () if self._best is None else self._best.stages, distance)

    def _graph(self, width: int) -> Graph:
        relaxation = self.relaxation
        return build_graph(relaxation.problem, relaxation.space, around=relaxation.ramps, width=width)

    def _climb(self, graph: Graph, prices: Prices, width: int, resolution: float, space: Space) -> None:
        """Searches for better plans in steps towards the bound. A step that finds nothing halves the next one."""
        problem, bound = self.relaxation.problem, self.relaxation.bound.value
        share = STEP if self._plans else FIRST_STEP
        most_usd = problem.max_usd_per_hour * (1 + 2 * LEAST_STEP)  # so that the last step allows the whole cost
        worst = 0.0 if problem.required_per_s is None else most_usd
        while graph.num_moves > 0 and not space.is_over():
            best = self._best
            value = worst if best is None else objective_value(problem, best.figures)
            step = (bound - value) * share
            if share < LEAST_STEP if best is None else abs(step) <= resolution * abs(bound):
                return
            plan = self._search_at(graph, prices, value + step, width, space)
            if plan is None or (best is not None and self._merit(plan) <= self._merit(best)):
                share /= 2
            elif best is None:
                share = STEP

    def _search_at(self, graph: Graph, prices: Prices, level: float, width: int, space: Space) -> FeasiblePlan | None:
        """Runs the beam search for a plan of a given rate or, if the cost is minimized, within a given cost."""
        problem, required_per_s = self.relaxation.problem, self.relaxation.problem.required_per_s
        most_usd = problem.max_usd_per_hour
        rate, usd = (level, most_usd) if required_per_s is None else (required_per_s, min(level, most_usd))
        limits = limits_of_plans(problem, space, prices, rate, usd)
        _, labels, ends_L = search_labels(graph.moves, limits, UNLIMITED, width, True)
        if len(ends_L) == 0:
            return None
        plan = plan_at_rate(problem, graph.stages_of(trace(labels, ends_L[0])), rate)
        if plan is not None:
            self._plans.append(plan)
        return plan
