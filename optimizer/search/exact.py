"""Exact search for the plan of one chain with the highest rate or the lowest cost, with proof.

E3's recursion (figure 6) fixes the batch that a rate allows, and it minimizes the longest cycle time. Here batch sizes,
ramps and the splits of a stage are free, and the wait for a batch depends on the rate that the plan will reach. So the
search determines which rates have plans, interval by interval, from the relaxation's bound down. In an interval (x, y]
it relaxes the problem: stages must reach only x, but batches fill as fast as at y. If the relaxed problem has no plan,
no plan has a rate in the interval. Costs are searched likewise, from the lowest up, at the required rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import numpy as np

from optimizer.cost.evaluate import TOLERANCE, best_value, merit
from optimizer.plans.plan import Stage
from optimizer.problems.problem import PlanProblem, device_names
from optimizer.search.decision import FeasiblePlan, Found, joined, plan_at_rate
from optimizer.search.label_search import (
    ABORTED,
    CLOSED,
    UNLIMITED,
    ChainLimits,
    completion_bounds,
    limits_of,
    search_labels,
    trace,
)
from optimizer.search.moves import Graph, MoveArrays, build_graph
from optimizer.search.relaxation import ITERATIONS, CuttingPlanes, solve_relaxation
from optimizer.search.space import MAX_LABELS, Space, parts_of
from optimizer.search.walks import NO_WALK, Prices, Walk
from profiles.scores import IntArray

RESOLUTION = 1e-10
"""Relative difference below which two rates, or two costs, are equal."""
MAX_SPLITS = 2_000_000
MAX_SETS = 10**8
"""With more splits, or more sets of devices in use, the search would take minutes."""
FEW_LABELS = 20_000
"""Labels, dominated ones included, that the search of one interval may have at first."""
WIDEST, WIDE, NARROW = 0.2, 0.01, 0.002
"""Relative widths of intervals: the most, the first, and one below which more labels are allowed instead. Wider
intervals are weaker relaxations."""
FEW_ITERATIONS = 15
"""Iterations of the cutting-plane method. The bound is valid, and the search exact, after any number of them."""
LEAST_SHARE = 1e-6
"""The first cost that is tried, relative to the largest, if the bound is lower: accelerators may cost nothing."""


def stage_planes(graph: Graph, space: Space, *, iterations: int = ITERATIONS) -> CuttingPlanes:
    """Returns the cutting-plane method for the plans of a graph with fractions of replicas."""
    problem = graph.problem

    def cheapest(prices: Prices, fill_rate: float) -> tuple[float, Walk]:
        limits = limits_of(problem, space, prices.work_C + prices.hop_C, prices.latency, fill_rate)
        _, least_PS, first_PS = completion_bounds(graph.moves, limits, limits.price_C, limits.price_latency)
        if math.isinf(least_PS[0, CLOSED]):
            return math.inf, NO_WALK
        return float(least_PS[0, CLOSED]), _cheapest_walk(graph.moves, first_PS)

    return CuttingPlanes(problem=problem, space=space, oracle=cheapest, iterations=iterations)


def _cheapest_walk(moves: MoveArrays, first_PS: IntArray) -> Walk:
    """Returns the resource use of the cheapest path. Its devices' work includes hops."""
    work_C, latency_s, fill, node, device = np.zeros(first_PS.shape[1] - 1), 0.0, 0.0, 0, CLOSED
    while node < len(first_PS) - 1:
        move, ends = divmod(int(first_PS[node, device]), 2)
        is_first, node, device = device == CLOSED, int(moves.to_M[move]), int(moves.device_M[move])
        waits_alone = not is_first and not moves.pooled_M[move]
        latency_s += float(moves.seconds_M[move] + moves.cross_M[move])
        latency_s += float(moves.wait_M[move] * moves.work_M[move]) if waits_alone else 0.0
        fill += 0.0 if waits_alone else float(moves.wait_M[move])
        work_C[device] += max(moves.work_M[move], moves.hop_work_M[move] if is_first and ends else 0.0)
        if ends:
            latency_s, device = latency_s + float(moves.hop_M[move]), CLOSED
    return Walk(work_C, np.zeros(len(work_C)), latency_s, fill)


def limits_of_plans(
    problem: PlanProblem, space: Space, prices: Prices, rate_per_s: float, usd_per_hour: float, *,
    wait_share: float = 1.0, limit_s: float | None = None,
) -> ChainLimits:  # fmt: skip
    """Returns the limits of plans that serve a rate within a cost, at dual prices.

    `wait_share` is that of `ChainLimits`. `limit_s` defaults to the problem's limit.
    """
    usd_C = problem.usd_C
    affordable_C = [usd_per_hour * (1 + TOLERANCE) // usd if usd else math.inf for usd in usd_C]
    count_C = np.minimum(problem.count_C, affordable_C)
    limit_s = problem.slo.limit_s if limit_s is None else limit_s
    used_C, latency, budget = prices.work_C + prices.hop_C, prices.latency, usd_per_hour
    if problem.required_per_s is not None:
        used_C = np.maximum(used_C / rate_per_s, usd_C)
        idle_C = used_C - usd_C
    else:
        latency, budget = latency * rate_per_s, prices.usd * usd_per_hour
        idle_C = np.maximum(used_C - prices.usd * usd_C, 0.0)
    return limits_of(problem, space, used_C * rate_per_s, latency, rate_per_s)._replace(
        max_price=float(budget + idle_C @ count_C + latency * limit_s) * (1 + TOLERANCE),
        limit_s=float(limit_s),
        wait_share=float(wait_share),
        is_whole=True,
        count_C=count_C,
        idle_C=idle_C,
        budget=float(usd_per_hour),
    )


@dataclass(slots=True, kw_only=True)
class ExactSearch:
    """A search for the best plan among the paths of one graph."""

    graph: Graph
    space: Space
    labels_left: int
    """The search gives up when it has used this number of labels in all intervals together."""
    incumbent: float
    """Rate or cost of a known plan: plans that are worse are not sought. Without any, 0 or infinity."""
    _plans: list[FeasiblePlan] = field(default_factory=list)
    """All plans that were found on the way, the best last."""
    _labels_allowed: int = FEW_LABELS
    """Labels of a single interval."""
    _num_labels: int = 0
    """Labels of the last search."""
    _planes: CuttingPlanes = field(init=False)
    _prices: Prices = field(init=False)
    """Dual prices, by which labels are pruned."""

    def __post_init__(self) -> None:
        self._planes = stage_planes(self.graph, self.space, iterations=FEW_ITERATIONS)

    def highest_rate(self, *, any_plan: bool = False) -> Found:
        """Returns the plan of the highest rate. With `any_plan`, returns the first plan that is found."""
        low, width, best = self.incumbent * (1 - RESOLUTION), WIDE, None  # rates up to `low` are not sought
        bound = self._planes.highest_rate(least=low)
        self._prices, high = bound.prices, bound.value * (1 + RESOLUTION)  # no plan has a rate above `high`
        while high > low * (1 + RESOLUTION) and not self._planes.is_too_slow(high):
            if self.space.is_over():
                return self._found(best, high)
            required = max(high * (1 - width), low)
            chains = self._relaxed_chains(required, required / high, self.graph.problem.max_usd_per_hour)
            if chains is None:
                width = self._after_too_many_labels((high - required) / high)
                if self.labels_left > 0:
                    continue
                if best is None and self.space.splits_per_stage:
                    return replace(self._simpler().highest_rate(any_plan=any_plan), bound=high)
                return self._found(best, high)
            plans = self._feasible_plans(chains, required, math.inf)
            faster = [plan for plan in plans if plan.figures.rate_per_s > low]
            self._plans.extend(faster)
            if faster:
                best, low = faster[-1], faster[-1].figures.rate_per_s * (1 + RESOLUTION)
                if any_plan:
                    return self._found(best, high)
                width = max(high - low, 0.0) / high / 2
            elif not chains or high - required <= RESOLUTION * high:
                high, width = required, self._after_none(width)
            else:  # only the relaxation has plans: their batches fill more slowly than assumed
                width = (high - required) / high / 4
        if best is None:
            return self._found(None, low)
        rate_per_s, usd = best.figures.rate_per_s, best.figures.usd_per_hour * (1 - RESOLUTION)
        cheaper = self._with_rate(rate_per_s, usd) if usd else []
        best = self._with_lower_latency(min([best, *cheaper], key=_cost_then_latency), rate_per_s)
        return self._found(best, best.figures.rate_per_s)

    def least_cost(self, rate_per_s: float) -> Found:
        """Returns the cheapest plan that reaches a rate.

        A quick search for plans with one split per stage gives an upper bound. Below it, costs are tried in steps from
        the lowest up, because the number of labels grows with the budget.
        """
        simpler = self._simpler().least_cost(rate_per_s) if self.space.splits_per_stage else self._found(None, math.inf)
        fastest, width, problem = self._planes.highest_rate(enough=rate_per_s), WIDE, self.graph.problem
        if fastest.value < rate_per_s * (1 - TOLERANCE):
            return self._found(None, math.inf)
        bound = self._planes.tightened(fastest)
        self._prices, known_usd = bound.prices, simpler.value(problem) * (1 - RESOLUTION)
        most_usd = min(problem.max_usd_per_hour * (1 + TOLERANCE), self.incumbent * (1 + RESOLUTION), known_usd)
        low, is_possible = max(bound.value * (1 - TOLERANCE), most_usd * LEAST_SHARE), True
        proven = min(low, bound.value)
        while is_possible and low <= most_usd:  # no plan costs less than `proven`
            if self.space.is_over():
                return replace(simpler, bound=proven)
            usd = min(low * (1 + width), most_usd)
            chains = self._relaxed_chains(rate_per_s, 1.0, usd)
            if chains is None:
                width = self._after_too_many_labels(width if usd > low else 0.0)
                if self.labels_left <= 0:
                    return replace(simpler, bound=proven)
                continue
            plans = self._feasible_plans(chains, rate_per_s, usd)
            if plans:
                self._plans.extend(plans)
                best = self._with_lower_latency(plans[-1], rate_per_s)
                return self._found(best, best.figures.usd_per_hour)
            low = proven = usd
            is_possible, width = usd < most_usd, self._after_none(width)
        return replace(simpler, bound=simpler.value(problem))

    def _found(self, best: FeasiblePlan | None, bound: float) -> Found:
        return Found(plans=(best, *reversed(self._plans)) if best else (), bound=bound)

    def _simpler(self) -> ExactSearch:
        """Returns the search for plans with one split per stage."""
        space = replace(self.space, splits_per_stage=False)
        return replace(self, space=space, labels_left=MAX_LABELS, _labels_allowed=FEW_LABELS)

    def _with_lower_latency(self, best: FeasiblePlan, rate_per_s: float) -> FeasiblePlan:
        """Halves the latency limit as long as a plan of the same rate and cost exists. Returns the last such plan."""
        while True:
            usd, latency_s = best.figures.usd_per_hour, best.figures.latency_s / 2
            quicker = min(self._with_rate(rate_per_s, usd, latency_s), key=_cost_then_latency, default=best)
            if quicker.figures.latency_s > latency_s * (1 + TOLERANCE):
                return best
            best = quicker

    def _with_rate(self, rate_per_s: float, usd: float, limit_s: float | None = None) -> list[FeasiblePlan]:
        """Returns plans of a rate within a cost and a latency. If time is over, returns none."""
        required = rate_per_s * (1 - RESOLUTION)
        chains = [] if self.space.is_over() else self._relaxed_chains(required, 1 - RESOLUTION, usd, limit_s)
        plans = self._feasible_plans(chains or [], required, usd)
        return [plan for plan in plans if plan.figures.rate_per_s >= required]

    def _relaxed_chains(
        self, required: float, wait_share: float, usd: float, limit_s: float | None = None
    ) -> list[tuple[Stage, ...]] | None:
        """Returns the undominated plans of a rate within a cost, or None after too many labels."""
        problem, prices = self.graph.problem, self._prices
        limits = limits_of_plans(problem, self.space, prices, required, usd, wait_share=wait_share, limit_s=limit_s)
        most = min(self._labels_allowed, self.labels_left)
        outcome, labels, ends_L = search_labels(self.graph.moves, limits, most, UNLIMITED, False)
        self._num_labels = len(labels.int_LI)
        self.labels_left -= self._num_labels
        if outcome == ABORTED:
            return None
        return [self.graph.stages_of(trace(labels, label)) for label in ends_L]

    def _feasible_plans(self, chains: list[tuple[Stage, ...]], rate_per_s: float, usd: float) -> list[FeasiblePlan]:
        """Returns the chains that keep every promise within a cost, the best last."""
        problem, most = self.graph.problem, usd * (1 + TOLERANCE)
        found = (plan_at_rate(problem, chain, rate_per_s) for chain in chains)
        plans = [plan for plan in found if plan and plan.figures.usd_per_hour <= most]
        return sorted(plans, key=lambda plan: merit(problem, plan.figures))

    def _after_none(self, width: float) -> float:
        """Returns the width of the next interval after one without plans."""
        return min(2 * width, WIDEST) if self._num_labels < self._labels_allowed / 8 else width

    def _after_too_many_labels(self, width: float) -> float:
        """Returns the width of a narrower interval. If it is narrow already, allows more labels instead."""
        if width > NARROW:
            return width / 4
        self._labels_allowed *= 4
        return width


def _cost_then_latency(plan: FeasiblePlan) -> tuple[float, float]:
    return plan.figures.usd_per_hour, plan.figures.latency_s


def search_exactly(
    problem: PlanProblem,
    space: Space,
    *,
    any_plan: bool = False,
    incumbent: float | None = None,
) -> Found | None:
    """Returns the best plan of one chain, and the other plans that were found. The plan is optimal if labels suffice.

    Returns None if the problem is too large, or if the search gave up without a plan. With `any_plan`, the search ends
    at the first plan. Plans worse than `incumbent`, the rate or cost of a known plan, are not sought.
    """
    if space.max_labels == 0 or is_too_big(problem, space):
        return None
    founds: list[Found] = []
    best = best_value(problem, [] if incumbent is None else [incumbent])
    for part, own in parts_of(problem, space):
        is_over = space.is_over()
        if is_over or (incumbent is not None and not space.several_stages):  # a bound takes less time than a graph
            relaxation = solve_relaxation(part, own)
            bound = best_value(problem, [] if relaxation is None else [relaxation.bound.value])
            if is_over or best_value(problem, [bound, best]) != bound:
                founds.append(Found(plans=(), bound=bound))
                continue
        search = ExactSearch(graph=build_graph(part, own), space=own, labels_left=own.max_labels, incumbent=best)
        rate_per_s = problem.required_per_s
        founds.append(search.highest_rate(any_plan=any_plan) if rate_per_s is None else search.least_cost(rate_per_s))
        best = best_value(problem, [best, founds[-1].value(problem)])
    found = joined(problem, founds, best_value(problem, (each.bound for each in founds)))
    return found if found.plans or found.is_proven(problem) else None


def one_split(space: Space) -> Space:
    """Returns the part of a space with plans of one split, which an exact search finds in milliseconds."""
    return replace(space, splits_per_stage=False, several_stages=False, max_labels=MAX_LABELS)


def is_too_big(problem: PlanProblem, space: Space) -> bool:
    """Returns whether the splits, or the sets of devices in use, are too many for an exact search."""
    counts = [problem.devices[name].count + 1 for name in device_names(problem)]
    num_sets = math.prod(counts) if space.several_stages else max(counts, default=1)
    return num_sets > MAX_SETS or num_splits(problem, space) > MAX_SPLITS


def num_splits(problem: PlanProblem, space: Space) -> int:
    """Returns an upper bound on the number of splits, over all devices and batch sizes."""
    num_sizes = sum(len(problem.latency[name].batches) for name in device_names(problem))
    if not space.several_stages and not space.splits_per_stage:
        return num_sizes
    ramps = problem.ramps if space.ramps in ("choose", "split-ends") else ()
    # A split leads from (first, entry) to (end, last). Entry and last are ranks of ramps before these boundaries.
    ranks_K = np.searchsorted([-1, *ramps], np.arange(problem.num_blocks + 1))
    entries_X, lasts_X = (ranks_K[boundary_X] for boundary_X in np.triu_indices(problem.num_blocks + 1, 1))
    return int((entries_X * lasts_X - entries_X * (entries_X - 1) // 2).sum()) * num_sizes
