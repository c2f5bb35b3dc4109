"""Exact search for the plan of one chain with the highest rate or the lowest cost, with proof.

E3's recursion (figure 6) fixes the batch that a rate allows, and it minimizes the longest cycle time. Here batch sizes,
ramps and the splits of a stage are free, and the wait for a batch depends on the rate that the plan will reach. So the
search determines which rates have plans, interval by interval, from the relaxation's bound down. In an interval (x, y]
it relaxes the problem: stages must reach only x, but batches fill as fast as at y. If the relaxed problem has no plan,
no plan has a rate in the interval. Costs are searched likewise, from the lowest up, at the required rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from optimizer.cost.evaluate import TOLERANCE, merit, objective_value
from optimizer.plans.plan import Stage
from optimizer.problems.problem import MaximizeRate, MinimizeCost, PlanProblem, device_names
from optimizer.search.decision import Decision, FeasiblePlan, nearest_slo_s, rate_of, why_infeasible
from optimizer.search.label_search import ABORTED, UNLIMITED, search_labels, trace
from optimizer.search.moves import Graph, build_graph, end_nodes
from optimizer.search.relaxation import CuttingPlanes
from optimizer.search.space import Space, parts_of, payable_names
from optimizer.search.stages import limits_of_plans, plan_at_rate, stage_oracle
from optimizer.search.step import FloatArray
from optimizer.search.walks import Prices

RESOLUTION = 1e-10
"""Relative difference below which two rates, or two costs, are equal."""
MAX_SPLITS = 2_000_000
MAX_SETS = 10**8
"""With more splits, or more sets of devices in use, the search would take minutes."""
FEW_LABELS = 20_000
"""Labels, dominated ones included, that the search of one interval may have at first."""
MAX_LABELS = 1_000_000
"""Labels of all intervals together."""
WIDEST, WIDE, NARROW = 0.2, 0.01, 0.002
"""Relative widths of intervals: the most, the first, and one below which more labels are allowed instead. Wider
intervals are weaker relaxations."""
FACTORS = (1.5, 0.67)
"""Factors of a single price in the other prices by which labels are pruned."""
ITERATIONS = 15
"""Iterations of the cutting-plane method. The bound is valid, and the search exact, after any number of them."""
MAX_LEVELS = 1_000_000
"""Largest number of costs that are enumerated one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best plan that was found, and what is proven about all plans."""

    found: FeasiblePlan | None
    """None if there is no plan at least as good as the incumbent (`proven`), or if none was found."""
    bound: float
    """No plan has a higher rate, or a lower cost."""
    proven: bool
    """Whether no better plan than `found` exists."""
    candidates: tuple[FeasiblePlan, ...] = ()
    """Other good plans, the best first."""


@dataclass(slots=True, kw_only=True)
class ExactSearch:
    """A search for the best plan among the paths of one graph."""

    graph: Graph
    space: Space
    labels_left: int = MAX_LABELS
    """The search gives up when it has used this number of labels."""
    incumbent: float | None = None
    """Rate or cost of a known plan: plans that are worse are not sought. None if no plan is known."""
    plans: list[FeasiblePlan] = field(default_factory=list)
    """All plans that were found on the way, the best last."""
    _labels_allowed: int = FEW_LABELS
    """Labels of a single interval."""
    _num_labels: int = 0
    """Labels of the last search."""
    _planes: CuttingPlanes = field(init=False)
    _prices: Prices = field(init=False)
    """Dual prices, by which labels are pruned."""

    def __post_init__(self) -> None:
        oracle = stage_oracle(self.graph, may_split=self.space.splits_per_stage, may_hop=self.space.several_stages)
        problem, names = self.graph.problem, self.graph.device_names
        self._planes = CuttingPlanes(problem=problem, names=names, oracle=oracle, iterations=ITERATIONS)

    def highest_rate(self, *, any_plan: bool = False) -> SearchResult:
        """Returns the plan of the highest rate. With `any_plan`, returns the first plan that is found."""
        low, width, best = (self.incumbent or 0.0) * (1 - RESOLUTION), WIDE, None
        bound = self._planes.highest_rate()
        self._prices, high = bound.prices, bound.value * (1 + RESOLUTION)
        while high > low * (1 + RESOLUTION) and not self._planes.is_too_slow(high):
            required = max(high * (1 - width), low)
            chains = self._relaxed_chains(required, required / high, self._max_usd)
            if chains is None:
                width = self._after_too_many_labels((high - required) / high)
                if self.labels_left <= 0:
                    if best is None and self.space.splits_per_stage:
                        best = self._simpler().highest_rate(any_plan=any_plan).found
                    return SearchResult(found=best, bound=high, proven=False)
                continue
            faster = [plan for plan in self._feasible_plans(chains, required) if plan.figures.rate_per_s > low]
            self.plans.extend(faster)
            if faster:
                best, low = faster[-1], faster[-1].figures.rate_per_s * (1 + RESOLUTION)
                if any_plan:
                    return SearchResult(found=best, bound=high, proven=False)
                width = max(high - low, 0.0) / high / 2
            elif not chains or high - required <= RESOLUTION * high:
                high, width = required, self._after_none(width)
            else:  # only the relaxation has plans: their batches fill more slowly than assumed
                width = (high - required) / high / 4
        if best is None:
            return SearchResult(found=None, bound=low, proven=True)
        best = self._cheapest_with_rate_of(best)
        return SearchResult(found=best, bound=best.figures.rate_per_s, proven=True)

    def least_cost(self, rate_per_s: float) -> SearchResult:
        """Returns the cheapest plan that reaches a rate.

        A quick search for plans with one split per stage gives an upper bound. Below it, only the costs that whole
        devices can have are tried, from the lowest up, because the number of labels grows with the budget.
        """
        above = self._simpler().least_cost(rate_per_s).found if self.space.splits_per_stage else None
        fastest, width = self._planes.highest_rate(enough=rate_per_s), WIDE
        if fastest.value < rate_per_s * (1 - TOLERANCE):
            return SearchResult(found=None, bound=math.inf, proven=True)
        bound = self._planes.least_cost(rate_per_s, fastest.prices)
        self._prices = bound.prices
        levels = self._cost_levels(bound.value, self._max_usd)
        if self.incumbent is not None:
            levels = levels[levels <= self.incumbent * (1 + RESOLUTION)]
        if above is not None:
            levels = levels[levels < above.figures.usd_per_hour * (1 - RESOLUTION)]
        while len(levels):
            tried = levels[levels <= levels[0] * (1 + width)]
            usd = float(tried[-1])
            chains = self._relaxed_chains(rate_per_s, 1.0, usd)
            if chains is None:
                width = self._after_too_many_labels(width if len(tried) > 1 else 0.0)
                if self.labels_left <= 0:
                    return SearchResult(found=above, bound=float(levels[0]), proven=False)
                continue
            plans = self._feasible_plans(chains, rate_per_s)
            if plans:
                self.plans.extend(plans)
                best = self._with_lower_latency(plans[-1], rate_per_s)
                return SearchResult(found=best, bound=best.figures.usd_per_hour, proven=True)
            levels, width = levels[levels > usd], self._after_none(width)
        return SearchResult(found=above, bound=above.figures.usd_per_hour if above else math.inf, proven=True)

    def _simpler(self) -> ExactSearch:
        """Returns the search for plans with one split per stage."""
        space = replace(self.space, splits_per_stage=False)
        return replace(self, space=space, labels_left=MAX_LABELS, _labels_allowed=FEW_LABELS)

    @property
    def _max_usd(self) -> float:
        return self.graph.problem.max_usd_per_hour

    def _cost_levels(self, least_usd: float, most_usd: float) -> FloatArray:
        """Returns the costs that whole devices can have, ascending; a geometric grid if there are too many."""
        supplies = [self.graph.problem.devices[name] for name in self.graph.device_names]
        if math.prod(supply.count + 1 for supply in supplies) > MAX_LEVELS:
            least_usd = max(least_usd, most_usd * 1e-6)
            steps = math.ceil(math.log(max(most_usd / least_usd, 1.0)) / math.log1p(NARROW)) + 1
            return np.geomspace(least_usd * (1 + NARROW), max(most_usd, least_usd * (1 + NARROW)), steps)
        usd = np.zeros(1)
        for supply in supplies:
            usd = np.unique(np.add.outer(usd, supply.usd_per_hour * np.arange(supply.count + 1)))
        usd = usd[(usd >= least_usd * (1 - TOLERANCE)) & (usd <= most_usd * (1 + TOLERANCE))]
        levels: FloatArray = usd[np.diff(usd, prepend=-1.0) > RESOLUTION * usd]  # sums in another order differ a little
        return levels

    def _cheapest_with_rate_of(self, best: FeasiblePlan) -> FeasiblePlan:
        """Returns the cheapest plan with the rate of `best`, if one search finds it, then with a lower latency."""
        rate, usd = best.figures.rate_per_s, best.figures.usd_per_hour * (1 - RESOLUTION)
        cheaper = self._with_rate(rate, usd) if usd else []
        return self._with_lower_latency(min([best, *cheaper], key=_cost_then_latency), rate)

    def _with_lower_latency(self, best: FeasiblePlan, rate_per_s: float) -> FeasiblePlan:
        """Halves the latency limit as long as a plan of the same rate and cost exists. Returns the last such plan."""
        while True:
            usd, latency_s = best.figures.usd_per_hour, best.figures.latency_s / 2
            quicker = min(self._with_rate(rate_per_s, usd, latency_s), key=_cost_then_latency, default=best)
            if quicker.figures.latency_s > latency_s * (1 + TOLERANCE):
                return best
            best = quicker

    def _with_rate(self, rate_per_s: float, usd: float, limit_s: float | None = None) -> list[FeasiblePlan]:
        required = rate_per_s * (1 - RESOLUTION)
        chains = self._relaxed_chains(required, 1 - RESOLUTION, usd, limit_s)
        plans = self._feasible_plans(chains or [], required)
        return [plan for plan in plans if plan.figures.rate_per_s >= required]

    def _relaxed_chains(
        self, required: float, wait_share: float, usd: float, limit_s: float | None = None
    ) -> list[tuple[Stage, ...]] | None:
        """Returns the undominated plans of a rate within a cost, or None after too many labels."""
        limits = limits_of_plans(
            self._planes, self._prices, self.space, required, usd, wait_share=wait_share, limit_s=limit_s,
            factors=FACTORS,
        )  # fmt: skip
        moves = self.graph.moves
        outcome, labels, ends_L = search_labels(
            moves, limits, min(self._labels_allowed, self.labels_left), UNLIMITED, False
        )
        self._num_labels = len(labels.int_LI)
        self.labels_left -= self._num_labels
        if outcome == ABORTED:
            return None
        return [self.graph.stages_of(trace(moves, labels, int(label))) for label in ends_L]

    def _feasible_plans(self, chains: list[tuple[Stage, ...]], rate_per_s: float) -> list[FeasiblePlan]:
        """Returns the chains that keep every promise, the best last."""
        problem = self.graph.problem
        plans = [plan for plan in (plan_at_rate(problem, chain, rate_per_s) for chain in chains) if plan]
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


def solve_exactly(problem: PlanProblem, space: Space, *, max_labels: int = MAX_LABELS) -> Decision | None:
    """Returns the best plan (gap 0 if it is proven optimal), or a proof that no plan exists.

    Returns None if the problem is too large, or if the search gave up without a plan.
    """
    if is_too_big(problem, space):
        return None
    result = search_space(problem, space, max_labels=max_labels)
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
    return num_sets > MAX_SETS or num_splits(problem, space) > MAX_SPLITS


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
    problem: PlanProblem, space: Space, *, any_plan: bool = False, max_labels: int = MAX_LABELS
) -> SearchResult:
    """Returns the best plan of all parts of a space with their joint bound. Candidates are all plans found."""
    is_cost = isinstance(problem.objective, MinimizeCost)
    results: list[SearchResult] = []
    plans: list[FeasiblePlan] = []
    best: FeasiblePlan | None = None
    for search in _searches(problem, space, max_labels):
        search.incumbent = None if best is None else objective_value(problem, best.figures)
        results.append(_run(search, problem, any_plan=any_plan))
        plans.extend(search.plans)
        found = [each for each in (best, results[-1].found) if each is not None]
        best = max(found, key=lambda plan: merit(problem, plan.figures), default=None)
    open_bounds = [result.bound for result in results if not result.proven]
    value = objective_value(problem, best.figures) if best else math.inf if is_cost else 0.0
    better = [bound for bound in open_bounds if (bound < value if is_cost else bound > value)]
    bound = (min if is_cost else max)(better, default=value)
    return SearchResult(found=best, bound=bound, proven=not better, candidates=tuple(reversed(plans)))


def better_plan(problem: PlanProblem, space: Space, incumbent: float) -> FeasiblePlan | None:
    """Returns the best plan of one chain that is no worse than an incumbent rate or cost. It may miss such a plan."""
    if is_too_big(problem, space):
        return None
    searches = (replace(search, incumbent=incumbent) for search in _searches(problem, space, MAX_LABELS))
    plans = [result.found for search in searches if (result := _run(search, problem)).found is not None]
    return max(plans, key=lambda plan: merit(problem, plan.figures), default=None)


def _run(search: ExactSearch, problem: PlanProblem, *, any_plan: bool = False) -> SearchResult:
    if isinstance(problem.objective, MinimizeCost):
        return search.least_cost(problem.objective.rate_per_s)
    return search.highest_rate(any_plan=any_plan)


def _searches(problem: PlanProblem, space: Space, max_labels: int) -> Iterator[ExactSearch]:
    """Yields one search per part of the space, or one per batch size if all splits must share it."""
    for part in parts_of(problem, space, payable_names(problem)):
        nodes = None if space.splits_per_stage or space.several_stages else end_nodes(problem)
        graph = build_graph(part, space.ramps, every_batch=space.one_batch, nodes=nodes)
        for batch in sorted(set(graph.moves.batch_M.tolist())) if space.one_batch else [None]:
            yield ExactSearch(
                graph=graph if batch is None else graph.with_batch(batch),
                space=space,
                labels_left=max_labels,
            )


def _any_plan(problem: PlanProblem, space: Space) -> FeasiblePlan | None:
    return search_space(problem, space, any_plan=True).found
