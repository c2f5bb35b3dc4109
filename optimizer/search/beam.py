"""Solves problems that are too big for an exact search: a good plan, a proven bound, and the gap between them.

The bound comes from `optimizer.search.relaxation`. The active ramps of its best walk show which ramps are worthwhile.
On the graph of the splits between these ramps (`optimizer.search.moves.nodes_around`), prices are computed again, now
with exact hops and stages. They guide a beam search (`optimizer.search.label_search`) for plans of a given rate, or
within a given cost, ever closer to the bound. It first seeks plans of one split per stage, then plans of several
splits near the best of these. `optimizer.cost.evaluate` scores every plan that it finds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from earlyexit.errors import PlanError
from optimizer.cost.evaluate import merit, objective_value
from optimizer.problems.problem import ANY_LATENCY_S, MaximizeRate, MinimizeCost, PlanProblem, device_names
from optimizer.search.decision import Decision, FeasiblePlan, NoPlan, nearest_slo_s, rate_of, why_infeasible
from optimizer.search.exact import search_space
from optimizer.search.label_search import UNLIMITED, search_labels, trace
from optimizer.search.moves import Graph, build_graph, near_stages, nodes_around, single_split_stages
from optimizer.search.relaxation import CuttingPlanes, DualBound, Relaxation, solve_relaxation
from optimizer.search.space import Space, parts_of
from optimizer.search.stages import limits_of_plans, plan_at_rate, stage_oracle
from optimizer.search.walks import Prices

# Shares of the bound that are tried until one of them has a plan.
FIRST_SHARES = (0.95, 0.9, 0.8, 0.65, 0.5, 0.35, 0.2, 0.1, 0.05, 0.02, 0.01)
# Beam widths in labels per node: of the successive searches for stages of one split, and of the search near a plan.
WIDTHS = (300, 2000)
WIDE = 1000
# Relative improvements below this are not sought.
COARSE, FINE = 2e-3, 4e-4
# Distances in blocks within which plans near a plan are sought, and the last ramps per boundary in the final search.
WINDOWS = (3, 5)
RANKS_NEAR = 3
# Iterations of the cutting-plane method before a plan is known. The bound is valid after any number of them.
TIGHTENINGS = 20
# Graphs with at most this many moves are searched as a whole for stages of several splits.
FEW_MOVES = 5000
SLO_RESOLUTION = 0.05


def solve_at_scale(problem: PlanProblem, space: Space) -> Decision:
    """Returns the beam search's plan, or the best plan of one split, which is found exactly, if that is better."""
    decision = solve_by_beam(problem, space)
    single = search_space(problem, replace(space, splits_per_stage=False, several_stages=False)).found
    if single is None or isinstance(decision, NoPlan):
        return decision
    if merit(problem, single.figures) <= merit(problem, decision.figures):
        return decision
    return single.planned(problem, space.strategy, decision.bound, decision.candidates)


def bound_at_scale(problem: PlanProblem, space: Space) -> float | None:
    """Returns a bound on the rate, or on the cost, of all plans of a space; None if no plan exists."""
    bounds = [search.bound.value for search in _searches(problem, space)]
    return _best_value(problem, bounds) if bounds else None


def solve_by_beam(problem: PlanProblem, space: Space) -> Decision:
    """Returns a plan with its gap to a proven bound, or a proof that no plan exists.

    If there is no plan, the reported SLO and rate have a plan, but they are not proven to be the closest ones. Raises
    PlanError if no plan was found although one may exist.
    """
    searches = list(_searches(problem, space))
    if not searches:
        return why_infeasible(
            problem,
            space.strategy,
            possible=lambda other: next(_searches(other, space), None),
            nearest_slo_s=lambda _: _near_slo_s(problem, space),
            highest_rate_per_s=lambda other: rate_of(_any_plan(replace(other, objective=MaximizeRate()), space)),
        )
    plans = [plan for search in searches for plan in search.plans()]
    if not plans:
        kind = "cost no less than" if isinstance(problem.objective, MinimizeCost) else "do at most"
        bound = _best_value(problem, [search.bound.value for search in searches])
        raise PlanError(f"no plan was found, though there may be one: plans {kind} {bound:.6g}")
    plans.sort(key=lambda plan: merit(problem, plan.figures), reverse=True)
    best = plans[0]
    value = objective_value(problem, best.figures)
    bound = _best_value(problem, [*(search.tightened(value) for search in searches), value])
    return best.planned(problem, space.strategy, bound, (plan.stages for plan in plans))


def _best_value(problem: PlanProblem, values: list[float]) -> float:
    return min(values) if isinstance(problem.objective, MinimizeCost) else max(values)


def _searches(problem: PlanProblem, space: Space) -> Iterator[ScaleSearch]:
    """Yields a search for each part of the space that may have plans, per batch size if all splits must share it."""
    for part in parts_of(problem, space, device_names(problem)):
        batches = sorted({batch for name in part.devices for batch in problem.latency[name].batches})
        for batch in batches if space.one_batch else [None]:
            relaxation = solve_relaxation(part, space, tuple(part.devices), batch=batch, iterations=TIGHTENINGS)
            if relaxation is not None:
                yield ScaleSearch(problem=part, space=space, batch=batch, relaxation=relaxation)


@dataclass(slots=True, kw_only=True)
class ScaleSearch:
    """A search for good plans in one part of a space."""

    problem: PlanProblem
    space: Space
    batch: int | None
    relaxation: Relaxation
    _plans: list[FeasiblePlan] = field(default_factory=list)

    @property
    def bound(self) -> DualBound:
        """The bound on the objective."""
        return self.relaxation.bound

    def tightened(self, value: float) -> float:
        """Returns a bound that uses that plans better than `value` must have stages on certain devices."""
        if self.problem.required_per_s is not None or not self.space.several_stages:
            return self.bound.value
        needed = self.relaxation.planes.needed_for(value, self.bound)
        if not needed:
            return self.bound.value
        planes = replace(self.relaxation.planes, needed=needed)
        return min(self.bound.value, max(planes.tightened(self.bound).value, value))

    def plans(self) -> list[FeasiblePlan]:
        """Returns all plans found that keep every promise; none if none was found."""
        if (graph := self._graph(1)).num_moves == 0:
            return []
        singles = single_split_stages(graph, self.problem.required_per_s or self.bound.value)
        single_prices = self._prices(singles, may_split=False)
        prices = self._prices(graph, may_split=True) if self.space.splits_per_stage else single_prices
        best = self._first(singles, single_prices, may_split=False)
        if best is None and self.space.splits_per_stage:
            best = self._first(graph, prices, may_split=True)
        if best is None:
            return []
        if graph.num_moves <= FEW_MOVES:
            best = self._climb(graph, prices, WIDE, best, COARSE)
        single = best
        for width in WIDTHS:
            single = self._climb(singles, single_prices, width, single, COARSE, may_split=False)
        best = max(best, self._improved_nearby(graph, (prices, single_prices), single), key=self._merit)
        around = self._graph(RANKS_NEAR)
        self._climb(near_stages(around, best.stages, 2), prices, WIDE, best, FINE)
        return self._plans

    def _improved_nearby(self, graph: Graph, price_sets: tuple[Prices, Prices], best: FeasiblePlan) -> FeasiblePlan:
        """Returns the best plan near a plan: with stage boundaries, batch sizes or splits that differ a little."""
        for distance in WINDOWS:
            for prices in price_sets:
                best = self._climb(near_stages(graph, best.stages, distance), prices, WIDE, best, FINE)
        return best

    def _merit(self, plan: FeasiblePlan) -> tuple[float, ...]:
        return merit(self.problem, plan.figures)

    def _graph(self, width: int) -> Graph:
        nodes = nodes_around(self.problem, self.relaxation.ramps, width)
        graph = build_graph(self.problem, self.space.ramps, every_batch=self.space.one_batch, nodes=nodes)
        return graph if self.batch is None else graph.with_batch(self.batch)

    def _prices(self, graph: Graph, *, may_split: bool) -> Prices:
        oracle = stage_oracle(graph, may_split=may_split, may_hop=self.space.several_stages)
        planes = CuttingPlanes(problem=self.problem, names=graph.device_names, oracle=oracle)
        rate = self.problem.required_per_s
        if rate is None:
            return planes.tightened(self.bound).prices
        return planes.least_cost(rate, self.bound.prices).prices

    def _first(self, graph: Graph, prices: Prices, *, may_split: bool) -> FeasiblePlan | None:
        """Returns the first plan found at decreasing shares of the bound."""
        for share in FIRST_SHARES:
            level = self.bound.value * share
            if self.problem.required_per_s is not None:
                level = min(self.bound.value / share, self.problem.max_usd_per_hour)
            plan = self._search_at(graph, prices, level, WIDTHS[0], may_split=may_split)
            if plan is not None:
                return plan
        return None

    def _climb(
        self, graph: Graph, prices: Prices, width: int, best: FeasiblePlan, resolution: float, *, may_split: bool = True
    ) -> FeasiblePlan:
        """Improves a plan in steps towards the bound. A step that finds nothing halves the next one."""
        bound, share = self.bound.value, 0.5
        may_split = may_split and self.space.splits_per_stage
        while True:
            value = objective_value(self.problem, best.figures)
            step = (bound - value) * share
            if abs(step) <= resolution * abs(bound):
                return best
            plan = self._search_at(graph, prices, value + step, width, may_split=may_split)
            if plan is None or self._merit(plan) <= self._merit(best):
                share /= 2
            else:
                best = plan

    def _search_at(
        self, graph: Graph, prices: Prices, level: float, width: int, *, may_split: bool
    ) -> FeasiblePlan | None:
        """Runs the beam search for a plan of a given rate or, if the cost is minimized, within a given cost."""
        if graph.num_moves == 0:
            return None
        planes, required_per_s = self.relaxation.planes, self.problem.required_per_s
        space = replace(self.space, splits_per_stage=may_split)
        rate, usd = (level, self.problem.max_usd_per_hour) if required_per_s is None else (required_per_s, level)
        limits = limits_of_plans(planes, prices, space, rate, usd)
        _, labels, ends_L = search_labels(graph.moves, limits, UNLIMITED, width, True)
        if len(ends_L) == 0:
            return None
        plan = plan_at_rate(self.problem, graph.stages_of(trace(graph.moves, labels, int(ends_L[0]))), rate)
        if plan is not None:
            self._plans.append(plan)
        return plan


def _any_plan(problem: PlanProblem, space: Space) -> FeasiblePlan | None:
    plans = [plan for search in _searches(problem, space) for plan in search.plans()]
    return max(plans, key=lambda plan: merit(problem, plan.figures), default=None)


def _near_slo_s(problem: PlanProblem, space: Space) -> float | None:
    """Returns an SLO latency for which a plan was found, but none at 5 % less; None if no latency had a plan."""
    patient = _any_plan(replace(problem, slo=replace(problem.slo, latency_s=ANY_LATENCY_S)), space)
    if patient is None:
        return None
    return nearest_slo_s(problem, patient, lambda other: _any_plan(other, space), SLO_RESOLUTION)
