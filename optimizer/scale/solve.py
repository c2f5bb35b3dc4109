"""Plans for problems too big to search exactly: a good plan, a proven bound, and the gap between them.

The bound is that of `optimizer.scale.bound`; its best walk says which ramps are worth having. On the splits between
these (`optimizer.moves.nodes_around`) prices are found once more, with hops and stages as they are, and a beam search
(`optimizer.scale.beam`) seeks plans at one rate, or within one cost, after another: first of stages with one split
each, then, near the best of these, of stages with several. What it finds is evaluated like every plan.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from earlyexit.errors import PlanError
from optimizer.decision import Decision, FeasiblePlan, NoPlan, if_feasible, nearest_slo_s, rate_of, why_infeasible
from optimizer.evaluate import evaluate, merit, objective_value
from optimizer.exact.prices import Limits
from optimizer.exact.solve import best_of
from optimizer.moves import Graph, build_graph, near_stages, nodes_around, single_split_stages
from optimizer.plan import Stage
from optimizer.problem import ANY_LATENCY_S, MaximizeRate, MinimizeCost, PlanProblem, device_names
from optimizer.scale.beam import Steer, beam_search, incoming_moves, least_devices
from optimizer.scale.bound import Bounded, CuttingPlanes, Relaxation, relaxed
from optimizer.scale.stages import cheapest_ways, stages_of
from optimizer.space import Space, parts_of
from optimizer.walks import Prices

# Shares of the bound that are tried until one has a plan.
FIRST_SHARES = (0.95, 0.9, 0.8, 0.65, 0.5, 0.35, 0.2, 0.1, 0.05, 0.02, 0.01)
# Labels per node: of the beams for stages of one split each, one after the other, and of the beam near a plan.
WIDTHS = (300, 2000)
WIDE = 1000
# Differences below this are not sought any more.
COARSE, FINE = 2e-3, 4e-4
# How near a plan others are sought, in blocks; and in the end with how many last ramps per boundary.
WINDOWS = (3, 5)
RANKS_NEAR = 3
# Cutting planes that tighten the bound once a plan is known; it holds after any number.
TIGHTENINGS = 20
# Graphs up to this are searched whole for stages of several splits.
FEW_MOVES = 5000
SLO_RESOLUTION = 0.05


def solve_at_scale(problem: PlanProblem, space: Space) -> Decision:
    """What the beam finds, or the best of a single split where that is better: those are few, so it is known."""
    decision = solve_by_beam(problem, space)
    found = best_of(problem, replace(space, splits_per_stage=False, several_stages=False))[0].found
    if (
        found is None
        or isinstance(decision, NoPlan)
        or merit(problem, found.figures) <= merit(problem, decision.figures)
    ):
        return decision
    return found.planned(problem, space.strategy, decision.bound, decision.candidates)


def bound_at_scale(problem: PlanProblem, space: Space) -> float | None:
    """What no plan of a space is better than, a rate or a cost; None: proven to have none."""
    bounds = [search.bound.value for search in _searches(problem, space)]
    return _best_of(problem, bounds) if bounds else None


def solve_by_beam(problem: PlanProblem, space: Space) -> Decision:
    """A plan within a told gap of the best of a space, or proof that there is none.

    Where there is none, the nearest SLO and the highest rate are ones that have a plan, not proven to be the limits.
    Raises PlanError where no plan was found although some might exist.
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
    found = [each for search in searches for each in search.plans()]
    if not found:
        kind = "cost no less than" if isinstance(problem.objective, MinimizeCost) else "do at most"
        bound = _best_of(problem, [search.bound.value for search in searches])
        raise PlanError(f"no plan was found, though there may be one: plans {kind} {bound:.6g}")
    found.sort(key=lambda each: merit(problem, each.figures), reverse=True)
    best = found[0]
    value = objective_value(problem, best.figures)
    bound = _best_of(problem, [*(search.tightened(value) for search in searches), value])
    return best.planned(problem, space.strategy, bound, (each.stages for each in found))


def _best_of(problem: PlanProblem, values: list[float]) -> float:
    return min(values) if isinstance(problem.objective, MinimizeCost) else max(values)


def _searches(problem: PlanProblem, space: Space) -> Iterator[ScaleSearch]:
    """One per part of the space that may have plans, or one per batch size where all splits share it."""
    for part in parts_of(problem, space, device_names(problem)):
        batches = sorted({batch for name in part.devices for batch in problem.latency[name].batches})
        for batch in batches if space.one_batch else [None]:
            relaxation = relaxed(part, space, tuple(part.devices), batch=batch, iterations=TIGHTENINGS)
            if relaxation is not None:
                yield ScaleSearch(problem=part, space=space, batch=batch, relaxation=relaxation)


@dataclass(slots=True, kw_only=True)
class ScaleSearch:
    """The plans of one part of a space."""

    problem: PlanProblem
    space: Space
    batch: int | None
    relaxation: Relaxation
    _met: list[FeasiblePlan] = field(default_factory=list)

    @property
    def _rate_per_s(self) -> float | None:
        objective = self.problem.objective
        return float(objective.rate_per_s) if isinstance(objective, MinimizeCost) else None

    @property
    def bound(self) -> Bounded:
        """On the objective."""
        return self.relaxation.bound

    def tightened(self, value: float) -> float:
        """The bound on plans better than `value`: of each device that they cannot do without, they have a stage."""
        if self._rate_per_s is not None or not self.space.several_stages:
            return self.bound.value
        needed = self.relaxation.planes.needed_for(value, self.bound)
        if not needed:
            return self.bound.value
        planes = replace(self.relaxation.planes, needed=needed)
        return min(self.bound.value, max(planes.tightened(self.bound).value, value))

    def plans(self) -> list[FeasiblePlan]:
        """Plans that keep every promise; none where none was found."""
        if (graph := self._graph(1)).num_moves == 0:
            return []
        singles = single_split_stages(graph, self._rate_per_s or self.bound.value)
        alone = self._prices(singles, may_split=False)
        several = self._prices(graph, may_split=True) if self.space.splits_per_stage else alone
        best = self._first(singles, alone, may_split=False)
        if best is None and self.space.splits_per_stage:
            best = self._first(graph, several, may_split=True)
        if best is None:
            return []
        if graph.num_moves <= FEW_MOVES:
            best = self._climb(graph, several, WIDE, best, COARSE)
        single = best
        for width in WIDTHS:
            single = self._climb(singles, alone, width, single, COARSE, may_split=False)
        best = max(best, self._polished(graph, (several, alone), single), key=self._merit)
        around = self._graph(RANKS_NEAR)
        self._climb(near_stages(around, best.stages, 2), several, WIDE, best, FINE)
        return self._met

    def _polished(self, graph: Graph, prices: tuple[Prices, Prices], start: FeasiblePlan) -> FeasiblePlan:
        """The best plan near one that has other stages' bounds, batches or splits."""
        for distance in WINDOWS:
            for each in prices:
                start = self._climb(near_stages(graph, start.stages, distance), each, WIDE, start, FINE)
        return start

    def _merit(self, found: FeasiblePlan) -> tuple[float, ...]:
        return merit(self.problem, found.figures)

    def _graph(self, width: int) -> Graph:
        nodes = nodes_around(self.problem, self.relaxation.ramps, width)
        graph = build_graph(self.problem, self.space.ramps, every_batch=self.space.one_batch, nodes=nodes)
        return graph if self.batch is None else graph.with_batch(self.batch)

    def _prices(self, graph: Graph, *, may_split: bool) -> Prices:
        oracle = stages_of(graph, may_split=may_split, may_hop=self.space.several_stages)
        planes = CuttingPlanes(problem=self.problem, names=graph.device_names, oracle=oracle)
        rate = self._rate_per_s
        if rate is None:
            return planes.tightened(self.bound).prices
        return planes.least_cost(rate, self.bound.prices).prices

    def _first(self, graph: Graph, prices: Prices, *, may_split: bool) -> FeasiblePlan | None:
        for share in FIRST_SHARES:
            level = self.bound.value * share
            if self._rate_per_s is not None:
                level = min(self.bound.value / share, self.problem.max_usd_per_hour)
            found = self._seek(graph, prices, level, WIDTHS[0], may_split=may_split)
            if found is not None:
                return found
        return None

    def _climb(
        self, graph: Graph, prices: Prices, width: int, best: FeasiblePlan, resolution: float, *, may_split: bool = True
    ) -> FeasiblePlan:
        """From a plan towards the bound, in steps halved where they find nothing."""
        bound, share = self.bound.value, 0.5
        while True:
            step = (bound - objective_value(self.problem, best.figures)) * share
            if abs(step) <= resolution * abs(bound):
                return best
            found = self._seek(
                graph,
                prices,
                objective_value(self.problem, best.figures) + step,
                width,
                may_split=may_split and self.space.splits_per_stage,
            )
            if found is None or self._merit(found) <= self._merit(best):
                share /= 2
            else:
                best = found

    def _seek(self, graph: Graph, prices: Prices, level: float, width: int, *, may_split: bool) -> FeasiblePlan | None:
        """A plan at a rate, or within a cost."""
        if graph.num_moves == 0:
            return None
        rate, steer = self._rate_per_s or level, self._steer(prices, level)
        limits = Limits(
            count_C=self.relaxation.planes.count_C.astype(np.int64),
            usd_C=self.relaxation.planes.usd_C,
            budget=float(self.problem.max_usd_per_hour),
            latency_s=float(self.problem.slo.limit_s),
            required_rate=rate,
            wait_rate=rate,
            may_split=may_split,
            may_hop=self.space.several_stages,
        )
        ways = cheapest_ways(graph.moves, steer.used_C * rate, steer.latency, rate, may_split, limits.may_hop)
        least_PC = least_devices(graph.moves, len(limits.count_C))
        incoming = incoming_moves(graph.moves)
        way = beam_search(graph.moves, incoming, ways, least_PC, limits, steer, width, width // 2)
        steps = zip(*(each.tolist() for each in way), strict=True)
        found = self._scored(graph.stages_of(steps), rate)
        if found is not None:
            self._met.append(found)
        return found

    def _steer(self, prices: Prices, level: float) -> Steer:
        """Prices at a rate, or within a cost."""
        count_C, usd_C = self.relaxation.planes.count_C, self.relaxation.planes.usd_C
        rate = self._rate_per_s
        work_C = prices.work_C + prices.hop_C
        if rate is not None:
            used_C = np.maximum(work_C / rate, usd_C)
            idle_C = used_C - usd_C
            most = level + float(idle_C @ count_C)
            return Steer(used_C, idle_C, prices.latency, most)
        budget = self.problem.budget_usd_per_hour
        idle_C = np.maximum(work_C - prices.usd * usd_C, 0.0)
        most = float(idle_C @ count_C) + (0.0 if budget is None else prices.usd * budget)
        return Steer(work_C, idle_C, prices.latency * level, most)

    def _scored(self, stages: Sequence[Stage], rate_per_s: float) -> FeasiblePlan | None:
        """The plan with as many replicas as the rate needs; with more where what is left allows a higher rate."""
        if not stages:
            return None
        chain = _at_rate(self.problem, stages, rate_per_s)
        faster = None
        if self._rate_per_s is None:
            faster = if_feasible(self.problem, _fastest(self.problem, chain, rate_per_s))
        return faster or if_feasible(self.problem, chain)


def _any_plan(problem: PlanProblem, space: Space) -> FeasiblePlan | None:
    found = [each for search in _searches(problem, space) for each in search.plans()]
    return max(found, key=lambda each: merit(problem, each.figures), default=None)


def _near_slo_s(problem: PlanProblem, space: Space) -> float | None:
    """An SLO latency that has a plan, none a twentieth below it having been found; None where none was found."""
    patient = _any_plan(replace(problem, slo=replace(problem.slo, latency_s=ANY_LATENCY_S)), space)
    if patient is None:
        return None
    return nearest_slo_s(problem, patient, lambda other: _any_plan(other, space), SLO_RESOLUTION)


def _needed(problem: PlanProblem, stages: Sequence[Stage]) -> list[float]:
    """Replicas per input a second, by stage."""
    figures = evaluate(problem, stages)
    return [
        stage.replicas / min(each.rate_per_s, each.hop_rate_per_s)
        for stage, each in zip(stages, figures.stages, strict=True)
    ]


def _at_rate(problem: PlanProblem, stages: Sequence[Stage], rate_per_s: float) -> tuple[Stage, ...]:
    """The same stages with as many replicas as a rate needs, by work and by hops."""
    return tuple(
        replace(stage, replicas=max(1, math.ceil(rate_per_s * needed * (1 - 1e-9))))
        for stage, needed in zip(stages, _needed(problem, stages), strict=True)
    )


def _fastest(problem: PlanProblem, chain: Sequence[Stage], rate_per_s: float) -> tuple[Stage, ...]:
    """The same stages at the highest rate that the devices and the budget allow."""
    low, high = rate_per_s, 2 * rate_per_s
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if _fits(problem, _at_rate(problem, chain, middle)) else (low, middle)
    return _at_rate(problem, chain, low)


def _fits(problem: PlanProblem, chain: Sequence[Stage]) -> bool:
    usd = sum(stage.replicas * problem.devices[stage.device].usd_per_hour for stage in chain)
    if problem.budget_usd_per_hour is not None and usd > problem.budget_usd_per_hour:
        return False
    return all(
        sum(stage.replicas for stage in chain if stage.device == name) <= supply.count
        for name, supply in problem.devices.items()
    )
