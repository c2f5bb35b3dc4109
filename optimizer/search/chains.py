"""Plans of several parallel chains, by column generation: a label search finds chains, a master problem combines them.

The label search (`optimizer.search.label_search`) uses the dual prices of the relaxation
(`optimizer.search.relaxation`). The master problem (`optimizer.search.by_devices` on a small cluster, otherwise
`optimizer.search.master`) combines the chains that it finds, and further rounds add chains near the incumbent. If the
search was complete and the master problem was solved to optimality, the plan is proven optimal. Otherwise its gap is
the distance to the relaxation's bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np

from optimizer.cost.evaluate import TOLERANCE, merit, objective_value
from optimizer.plans.plan import Stage, chains_of
from optimizer.problems.problem import MaximizeRate, PlanProblem
from optimizer.search.by_devices import is_small, mixture_by_devices
from optimizer.search.decision import Decision, FeasiblePlan, if_feasible, nearest_slo_s, rate_of, why_infeasible
from optimizer.search.exact import num_splits
from optimizer.search.label_search import ABORTED, COMPLETE, TOTAL, ChainLimits, completion_bounds, search_labels, trace
from optimizer.search.master import Cluster, Column, Demand, StageWork, rate_of_replicas, solve_master
from optimizer.search.moves import Graph, build_graph, end_nodes, nodes_around
from optimizer.search.relaxation import DualBound, Relaxation, solve_relaxation
from optimizer.search.space import Space, payable_names
from optimizer.search.step import FloatArray, Labels
from optimizer.search.walks import Prices

PRICE_MARGINS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Margins of a chain's price above the least price, widened while the label search completes."""
MAX_LABELS = 32_768
MAX_COLUMNS = 200
"""Columns of a master problem that HiGHS solves."""
MAX_COLUMNS_BY_DEVICES = 2000
"""Columns of a master problem on a small cluster."""
LABELS_PER_GROUP = 8
"""Labels with equal node and types that are kept if the search is truncated."""
LABELS_PER_GROUP_AT_RATE = 16
RATE_RESOLUTION = 0.003
"""Relative resolution of the search for the highest rate of a set of device types."""
MAX_SEARCHES = 6
"""Label searches for the highest rate of a set of device types."""
FIRST_STEP = 0.02
"""Relative distance of the first searched rate below its bound. It doubles after each failure."""
MAX_TYPES_IN_PAIRS = 4
"""With more device types, chains are searched on single types and on all types, but not on pairs."""
MAX_ROUNDS = 4
"""Rounds in which chains of the incumbent are replaced."""
MAX_SPLITS = 200_000
"""Splits of a graph that is searched as a whole. In a larger graph, splits begin only near the relaxation's ramps."""
RANKS_NEAR = 2
MASTER_SECONDS = 1.0
"""Time limit of one master problem."""
SOLVED = 2e-4
"""Relative difference up to which values are equal; twice the gap that HiGHS is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedChain:
    """A chain with one replica per stage, its column of the master problem, and its price."""

    stages: tuple[Stage, ...]
    column: Column
    price: float


def price_chains(graph: Graph, limits: ChainLimits) -> tuple[bool, list[PricedChain]]:
    """Returns whether all chains of a graph that mixtures may use were found, and the chains."""
    least = float(completion_bounds(graph.moves, limits, limits.price_C, limits.price_latency).closed_P[0])
    if math.isinf(least):
        return True, []
    outcome, labels, ends_L = search_labels(graph.moves, limits, MAX_LABELS, MAX_LABELS, False)
    if outcome == COMPLETE:
        return True, [_read_chain(graph, labels, int(label)) for label in ends_L]
    best: list[PricedChain] = []
    for share in PRICE_MARGINS:
        outcome, labels, ends_L = search_labels(
            graph.moves, limits._replace(max_price=least * (1 + share)), MAX_LABELS, LABELS_PER_GROUP, False
        )
        if outcome == ABORTED:
            break
        best = [_read_chain(graph, labels, int(label)) for label in ends_L]
    return False, best


def price_chains_at_rate(graph: Graph, limits: ChainLimits) -> tuple[bool, list[PricedChain]]:
    """Returns whether chains with integer replicas may serve a rate, and the chains that were found.

    If there are too many labels, no chains are returned: a search at a higher rate has fewer labels.
    """
    outcome, labels, ends_L = search_labels(graph.moves, limits, 4 * MAX_LABELS, LABELS_PER_GROUP_AT_RATE, False)
    return outcome == ABORTED or len(ends_L) > 0, [_read_chain(graph, labels, int(label)) for label in ends_L]


def _read_chain(graph: Graph, labels: Labels, label: int) -> PricedChain:
    """Returns the chain that a label at the model's end represents."""
    moves, path = graph.moves, trace(graph.moves, labels, label)
    latency_s, fill, seconds, wait = 0.0, 0.0, 0.0, 0.0
    works: list[StageWork] = []
    is_first = True
    for _, move, ends in path:
        latency_s += float(moves.seconds_M[move] + moves.cross_M[move])
        seconds += float(moves.work_M[move])
        if is_first or moves.pooled_M[move]:
            fill += float(moves.wait_M[move])
        else:
            wait += float(moves.wait_M[move])
        is_first = bool(ends)
        if ends:  # after the last stage, there is no hop
            seconds = max(seconds, float(moves.hop_work_M[move]))
            latency_s += float(moves.hop_M[move])
            works.append(StageWork(device=int(moves.device_M[move]), seconds=seconds, wait=wait))
            seconds, wait = 0.0, 0.0
    column = Column(stages=tuple(works), latency_s=latency_s, fill=fill)
    return PricedChain(stages=graph.stages_of(path), column=column, price=float(labels.float_LF[label, TOTAL]))


def most_promising(candidates: Sequence[PricedChain], most: int) -> list[PricedChain]:
    """Returns `most` chains: the cheapest of each sequence of device types, then the second cheapest, and so on."""
    groups: dict[tuple[int, ...], list[PricedChain]] = {}
    for chain in dict.fromkeys(candidates):
        groups.setdefault(tuple(stage.device for stage in chain.column.stages), []).append(chain)
    ranked = [
        (rank, chain.price, group_index, chain)
        for group_index, group in enumerate(groups.values())
        for rank, chain in enumerate(sorted(group, key=lambda chain: chain.price))
    ]
    return [chain for *_, chain in sorted(ranked, key=lambda each: each[:3])[:most]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Incumbent:
    """A plan that the master problem found."""

    plan: FeasiblePlan
    bound: float
    """Bound on the mixtures of the columns of that master problem."""
    used: tuple[PricedChain, ...] = ()


def solve_mixture(
    problem: PlanProblem, candidates: Sequence[PricedChain], names: Sequence[str], most_chains: int
) -> Incumbent | None:
    """Returns the best feasible mixture of candidates, or None if the master problem has no solution.

    Raises TimeoutError if none was found in time.
    """
    if not candidates:
        return None
    cluster = cluster_of(problem, names)
    demand = Demand(limit_s=problem.slo.limit_s, rate_per_s=problem.required_per_s, most_chains=most_chains)
    columns, is_found, mixture = [each.column for each in candidates], False, None
    if is_small(cluster):
        is_found, mixture = mixture_by_devices(columns, demand, cluster)
    if not is_found:
        mixture = solve_master(columns, [demand], cluster, seconds=MASTER_SECONDS)
    if mixture is None or not mixture.replicas:
        return None
    stages: list[Stage] = []
    for q, replicas in mixture.replicas.items():
        counts = _needed_replicas(problem, candidates[q].column, replicas)
        stages += [replace(stage, replicas=count) for stage, count in zip(candidates[q].stages, counts, strict=True)]
    rates = [mixture.rates[q] for q in mixture.replicas] if problem.required_per_s is not None else []
    plan = if_feasible(problem, tuple(stages), tuple(rate / sum(rates) for rate in rates))
    used = tuple(candidates[q] for q in mixture.replicas)
    return None if plan is None else Incumbent(plan=plan, bound=mixture.bound, used=used)


def cluster_of(problem: PlanProblem, names: Sequence[str]) -> Cluster:
    """Returns the devices of these types, and the budget."""
    devices, budget = [problem.devices[name] for name in names], problem.budget_usd_per_hour
    return Cluster(
        count_C=np.array([float(device.count) for device in devices]),
        usd_C=np.array([device.usd_per_hour for device in devices]),
        budget=math.inf if budget is None else budget,
    )


def _needed_replicas(problem: PlanProblem, column: Column, replicas: Sequence[int]) -> list[int]:
    """Returns the replicas without those that do not raise the chain's rate, if the rate is maximized."""
    if problem.required_per_s is not None:
        return list(replicas)
    rate = rate_of_replicas(column, replicas)
    return [max(1, math.ceil(rate * each.seconds * (1 - TOLERANCE))) for each in column.stages]


def solve_chains(problem: PlanProblem, space: Space) -> Decision | None:
    """Returns the best plan (gap 0 if it is proven optimal) or a proof that no plan exists.

    None: neither was found, or no plan has any rate. Then the search for one chain finds the reason sooner.
    """
    search = _search_of(problem, space)
    best, complete = (None, True) if search is None else search.best()
    if best is None and complete and problem.required_per_s is not None:
        return why_infeasible(
            problem,
            space.strategy,
            possible=lambda other: _any_plan(other, space),
            nearest_slo_s=lambda patient: nearest_slo_s(problem, patient, lambda other: _any_plan(other, space)),
            highest_rate_per_s=lambda other: rate_of(_any_plan(replace(other, objective=MaximizeRate()), space)),
        )
    if best is None or search is None:
        return None
    value, bound = objective_value(problem, best.plan.figures), search.bounded.value
    tighter = min if isinstance(problem.objective, MaximizeRate) else max
    bound = tighter(bound, best.bound) if complete else bound
    is_proven = abs(value - bound) <= SOLVED * abs(bound)
    others = (each.stages for each in search.others)
    return best.plan.planned(problem, space.strategy, value if is_proven else bound, others)


def _search_of(problem: PlanProblem, space: Space) -> ChainSearch | None:
    """Returns None if the problem is proven to have no plan."""
    names = payable_names(problem)
    relaxation = solve_relaxation(problem, space, names) if names else None
    return None if relaxation is None else ChainSearch(problem=problem, space=space, names=names, relaxation=relaxation)


@dataclass(slots=True, kw_only=True)
class ChainSearch:
    """The search for the best plan of one problem."""

    problem: PlanProblem
    space: Space
    names: tuple[str, ...]
    """The accelerator types."""
    relaxation: Relaxation
    others: list[FeasiblePlan] = field(default_factory=list)
    """All plans that the master problems found."""
    _best_of_types: list[PricedChain] = field(default_factory=list)
    """The best chain of each accelerator type, which is a candidate of every master problem."""
    _tried: frozenset[PricedChain] = frozenset()
    """The candidates of the last master problem. Some of them alone make no better mixture."""
    _is_cut_short: bool = False
    """Whether a master problem reached its time limit without a solution, so that having none proves nothing."""

    @property
    def bounded(self) -> DualBound:
        """The bound on all plans."""
        return self.relaxation.bound

    def best(self) -> tuple[Incumbent | None, bool]:
        """Returns the best plan that was found, and whether all chains were considered."""
        graph, complete = self._graph()
        finished, candidates = price_chains(graph, self._limits(graph, self.bounded.prices, self.names, math.inf))
        best = None
        if complete and finished and len(candidates) <= self._most_columns:
            best = self._improve(candidates, None)
            if not self._is_cut_short:
                return best, True
        candidates += self._chains_by_types(graph)
        best = self._improve(candidates, self._improve(self._best_of_types, best))
        for _ in range(MAX_ROUNDS):
            if best is None or self._is_proven(best):
                break
            near = [*candidates, *best.used, *self._replacements(graph, best)]
            before, best = best.plan, self._improve(near, best)
            if best is None or best.plan is before:
                break
        return best, False

    def _chains_by_types(self, graph: Graph) -> list[PricedChain]:
        """Returns chains on each accelerator type, on each pair of types, and on all types.

        On several types, slow chains are useful as well, because they leave devices to other chains.
        """
        priced: list[PricedChain] = []
        for names in self._sets_of_types():
            is_whole = names == self.names
            faster = replace(self.problem, objective=MaximizeRate())
            alone = self.relaxation if is_whole else solve_relaxation(faster, self.space, names)
            if alone is None:
                continue
            bounded = alone.bound
            devices = [graph.device_names.index(name) for name in names]
            part = graph if is_whole else graph.only(np.isin(graph.moves.device_M, devices))
            limits = self._limits(graph, bounded.prices, names, math.inf if is_whole else bounded.value)
            chains = [] if is_whole else price_chains(part, limits)[1]
            chains += self._chains_at_rates(part, limits._replace(count_C=self._count_C(graph)))
            if len(names) == 1 and self.problem.required_per_s is None:
                best = self._mixture(most_promising(chains, self._most_columns), 1)
                self._best_of_types += () if best is None else best.used
            priced += chains
        return priced

    def _sets_of_types(self) -> list[tuple[str, ...]]:
        """Returns the sets of accelerator types on which chains are searched."""
        if self._most_chains == 1 or not self.space.several_stages:
            return [self.names]
        sizes = (1, 2, len(self.names)) if len(self.names) <= MAX_TYPES_IN_PAIRS else (1, len(self.names))
        return list(dict.fromkeys(part for size in sizes for part in combinations(self.names, size)))

    def _chains_at_rates(self, graph: Graph, limits: ChainLimits, low: float = 0.0) -> list[PricedChain]:
        """Returns chains with integer replicas, at the required rate or near the highest possible rate above `low`."""
        limits = limits._replace(is_whole=True)
        if self.problem.required_per_s is not None:
            usd_C = np.array([self.problem.devices[name].usd_per_hour for name in graph.device_names])
            return price_chains_at_rate(graph, limits._replace(price_C=usd_C.astype(float), price_latency=0.0))[1]
        priced: list[PricedChain] = []
        high, step = limits.rate, FIRST_STEP
        for _ in range(MAX_SEARCHES):
            if high <= low * (1 + RATE_RESOLUTION):
                break
            middle = max(high * (1 - step), (low + high) / 2)
            max_price = float(limits.price_C @ limits.count_C) / middle + limits.price_latency * limits.limit_s
            is_possible, chains = price_chains_at_rate(
                graph, limits._replace(rate=middle, max_price=max_price * (1 + 1e-9))
            )
            priced += chains
            if is_possible:
                low = middle
            else:
                high, step = middle, 2 * step
        return priced

    def _replacements(self, graph: Graph, best: Incumbent) -> list[PricedChain]:
        """Returns chains that could replace a chain of the incumbent, on the devices that its other chains leave."""
        priced: list[PricedChain] = []
        problem, figures = self.problem, best.plan.figures
        chains = chains_of(best.plan.stages, problem.num_blocks)
        for chain, share in zip(chains, figures.shares, strict=True):
            left_C = self._count_C(graph)
            for stage in (stage for other in chains if other is not chain for stage in other):
                left_C[graph.device_names.index(stage.device)] -= stage.replicas
            own_rate = share * figures.served_per_s
            highest = self.bounded.value
            if problem.required_per_s is None:
                highest = min(own_rate + self.bounded.value - figures.rate_per_s, highest)
            limits = self._limits(graph, self.bounded.prices, self.names, highest)._replace(count_C=left_C)
            if problem.required_per_s is not None:
                limits = limits._replace(rate=own_rate)
            priced += self._chains_at_rates(graph, limits, own_rate)
        return priced

    def _graph(self) -> tuple[Graph, bool]:
        """Returns the graph of splits, and whether it is complete."""
        problem, space = self.problem, self.space
        nodes, is_complete = None if space.splits_per_stage or space.several_stages else end_nodes(problem), True
        if nodes is None and num_splits(problem, space) > MAX_SPLITS:
            nodes, is_complete = nodes_around(problem, self.relaxation.ramps, RANKS_NEAR), False
        payable = replace(problem, devices={name: problem.devices[name] for name in self.names})
        return build_graph(payable, space.ramps, nodes=nodes), is_complete

    def _count_C(self, graph: Graph) -> FloatArray:
        return np.array([float(self.problem.devices[name].count) for name in graph.device_names])

    @property
    def _most_columns(self) -> int:
        return MAX_COLUMNS_BY_DEVICES if is_small(cluster_of(self.problem, self.names)) else MAX_COLUMNS

    @property
    def _most_chains(self) -> int:
        return min(self.problem.most_chains, self.space.most_chains)

    def _limits(self, graph: Graph, prices: Prices, names: tuple[str, ...], rate: float) -> ChainLimits:
        """Returns the prices and limits of chains on these accelerator types, with a rate of at most `rate`."""
        by_name = dict(zip(names, prices.work_C + prices.hop_C, strict=True))
        required_per_s, nothing_C = self.problem.required_per_s, np.zeros(len(graph.device_names))
        return ChainLimits(
            price_C=np.array([float(by_name.get(name, 0.0)) for name in graph.device_names]),
            price_latency=float(prices.latency),
            max_price=math.inf,
            limit_s=float(self.problem.slo.limit_s),
            rate=float(min(rate, self.bounded.value if required_per_s is None else required_per_s)),
            wait_share=1.0,
            is_whole=False,
            count_C=nothing_C,
            idle_C=nothing_C,
            usd_C=nothing_C,
            budget=math.inf,
            may_split=self.space.splits_per_stage,
            may_hop=self.space.several_stages,
        )

    def _improve(self, candidates: Sequence[PricedChain], best: Incumbent | None) -> Incumbent | None:
        """Returns the better of the incumbent and the best mixture of candidates."""
        most = self._most_columns
        several = candidates if len(candidates) <= self._most_chains * most else most_promising(candidates, most)
        tried = list(dict.fromkeys([*self._best_of_types, *several]))
        if best is not None and self._tried.issuperset(tried):
            return best
        self._tried = frozenset(tried)
        # Mixtures of a single chain are solved as well, because a larger master problem may reach its time limit.
        for most_chains in sorted({1, self._most_chains}):
            mixture = self._mixture(tried, most_chains)
            if mixture is None:
                continue
            self.others.append(mixture.plan)
            if best is None or merit(self.problem, mixture.plan.figures) > merit(self.problem, best.plan.figures):
                best = mixture
            best = replace(best, bound=mixture.bound)  # the larger master problem bounds both
        return best

    def _mixture(self, candidates: Sequence[PricedChain], most_chains: int) -> Incumbent | None:
        try:
            return solve_mixture(self.problem, candidates, self.names, most_chains)
        except TimeoutError:
            self._is_cut_short = True
            return None

    def _is_proven(self, best: Incumbent) -> bool:
        value = objective_value(self.problem, best.plan.figures)
        return abs(value - self.bounded.value) <= SOLVED * abs(self.bounded.value)


def _any_plan(problem: PlanProblem, space: Space) -> FeasiblePlan | None:
    search = _search_of(problem, space)
    best = None if search is None else search.best()[0]
    return None if best is None else best.plan
