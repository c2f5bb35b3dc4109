"""Plans of several parallel chains, by column generation: a label search finds chains, a master problem combines them.

The label search (`optimizer.search.label_search`) uses the dual prices of the relaxation
(`optimizer.search.relaxation`). The master problem (`optimizer.search.master`) combines the chains that it finds, and
further rounds add chains near the incumbent. If the search was complete and the master problem was solved to
optimality, the plan is proven optimal. Otherwise its gap is the distance to the relaxation's bound.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np

from optimizer.cost.evaluate import best_value, merit, objective_value, worst_value
from optimizer.plans.plan import chains_of
from optimizer.problems.problem import MaximizeRate, PlanProblem
from optimizer.search.decision import FeasiblePlan, Found, gap_between, if_feasible
from optimizer.search.exact import num_splits
from optimizer.search.label_search import (
    ABORTED,
    CLOSED,
    COMPLETE,
    MAX_STAGES,
    TOTAL,
    ChainLimits,
    completion_bounds,
    limits_of_prices,
    search_labels,
    trace,
)
from optimizer.search.master import Chain, best_mixture, fastest_options, without_idle_devices
from optimizer.search.moves import Graph, Path, build_graph
from optimizer.search.relaxation import Relaxation, solve_relaxation
from optimizer.search.space import Space
from optimizer.search.walks import Prices

PRICE_MARGINS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""Margins of a chain's price above the least price, widened while the label search completes."""
MAX_LABELS = 32_768
MAX_LABELS_OF_PART = 4096
"""Labels of the search for all chains on some of the accelerator types: it proves nothing, so it may end sooner."""
MAX_CHAINS = 2000
"""Chains of a master problem."""
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
GATHERING = 0.5
"""Share of the time within which chains are sought before they are mixed for the first time."""
MAX_ROUNDS = 4
"""Rounds in which chains of the incumbent are replaced."""
MAX_SPLITS = 200_000
"""Splits of a graph that is searched as a whole. In a larger graph, splits begin only near the relaxation's ramps."""
RANKS_NEAR = 2
SOLVED = 2e-4
"""Gap at which a search ends."""
ROUNDED = 1e-6
"""Relative difference that rounding may cause between equal values."""


def price_chains(graph: Graph, limits: ChainLimits, most: int = MAX_LABELS) -> tuple[bool, list[Chain]]:
    """Returns whether all chains of a graph that mixtures may use were found with `most` labels, and the chains."""
    outcome, chains = _search(graph, limits, most, most)
    if outcome == COMPLETE:
        return True, chains
    least = float(completion_bounds(graph.moves, limits, limits.price_C, limits.price_latency).least_PS[0, CLOSED])
    best: list[Chain] = []
    for share in PRICE_MARGINS:
        outcome, chains = _search(graph, limits._replace(max_price=least * (1 + share)), MAX_LABELS, LABELS_PER_GROUP)
        if outcome == ABORTED:
            break
        best = chains
    return False, best


def _search(graph: Graph, limits: ChainLimits, most: int, per_group: int) -> tuple[int, list[Chain]]:
    """Returns the outcome of a search with at most `most` labels, and the chains that it found."""
    outcome, labels, ends_L = search_labels(graph.moves, limits, most, per_group, False)
    return outcome, [_read_chain(graph, trace(labels, label), float(labels.float_LF[label, TOTAL])) for label in ends_L]


def _read_chain(graph: Graph, path: Path, price: float) -> Chain:
    """Returns the chain of a path."""
    moves = graph.moves
    latency_s, fill, work, wait = 0.0, 0.0, 0.0, 0.0
    devices, seconds, waits = list[int](), list[float](), list[float]()
    is_first = True
    for move, ends in path:
        latency_s += float(moves.seconds_M[move] + moves.cross_M[move])
        work += float(moves.work_M[move])
        if is_first or moves.pooled_M[move]:
            fill += float(moves.wait_M[move])
        else:
            wait += float(moves.wait_M[move])
        is_first = bool(ends)
        if ends:  # after the last stage, there is no hop
            latency_s += float(moves.hop_M[move])
            devices.append(int(moves.device_M[move]))
            seconds.append(max(work, float(moves.hop_work_M[move])))
            waits.append(wait)
            work, wait = 0.0, 0.0
    return Chain(
        stages=graph.stages_of(path),
        devices=tuple(devices),
        seconds=tuple(seconds),
        waits=tuple(waits),
        latency_s=latency_s,
        fill=fill,
        price=price,
    )


def most_promising(candidates: Sequence[Chain], most: int) -> list[Chain]:
    """Returns `most` chains: the cheapest of each sequence of device types, then the second cheapest, and so on."""
    num_before: Counter[tuple[int, ...]] = Counter()
    turns: list[tuple[int, Chain]] = []
    for chain in sorted(dict.fromkeys(candidates), key=lambda chain: chain.price):
        turns.append((num_before[chain.devices], chain))
        num_before[chain.devices] += 1
    return [chain for _, chain in sorted(turns, key=lambda turn: turn[0])[:most]]


def search_chains(problem: PlanProblem, space: Space) -> Found:
    """Returns the best plan that was found, and a proven bound."""
    relaxation = solve_relaxation(problem, space)
    if relaxation is None or space.is_over():
        return Found(plans=(), bound=best_value(problem, [] if relaxation is None else [relaxation.bound.value]))
    problem = replace(problem, most_chains=min(problem.most_chains, space.most_chains))
    return ChainSearch(problem=problem, space=space, relaxation=relaxation).found()


def find_chains(problem: PlanProblem, space: Space, most: int) -> list[Chain]:
    """Returns up to `most` chains that good mixtures of a problem may use."""
    relaxation = solve_relaxation(problem, space)
    if relaxation is None:
        return []
    return most_promising(ChainSearch(problem=problem, space=space, relaxation=relaxation).candidates()[1], most)


@dataclass(slots=True, kw_only=True)
class ChainSearch:
    """The search for the best plan of one problem."""

    problem: PlanProblem
    space: Space
    relaxation: Relaxation
    _graph: Graph = field(init=False)
    _until: Space = field(init=False)
    """The space with the time until which chains are sought. They are mixed then."""
    _plans: list[FeasiblePlan] = field(default_factory=list)
    """All plans that the master problems found."""

    def found(self) -> Found:
        """Returns all plans that were found, the best first, and a bound on all plans."""
        problem, bound = self.problem, self.relaxation.bound.value
        is_complete, candidates = self.candidates()
        mixed_bound = self._mix(candidates)
        self._until = self.space
        if is_complete and mixed_bound is not None:
            bound = worst_value(problem, (bound, mixed_bound))
        for _ in range(0 if is_complete else MAX_ROUNDS):
            before = self._best
            if before is None or self.space.is_over():
                break
            if gap_between(objective_value(problem, before.figures), bound) <= SOLVED:
                break
            num_known, candidates = len(candidates), list(dict.fromkeys([*candidates, *self._replacements(before)]))
            if len(candidates) > num_known:
                self._mix(candidates)
            if self._best is before:
                break
        if self._best is None:
            return Found(plans=(), bound=bound)
        value = objective_value(problem, self._best.figures)
        bound = value if gap_between(value, bound) <= ROUNDED else bound
        return Found(plans=(self._best, *self._plans), bound=bound)

    @property
    def _best(self) -> FeasiblePlan | None:
        return max(self._plans, key=lambda plan: merit(self.problem, plan.figures), default=None)

    def candidates(self) -> tuple[bool, list[Chain]]:
        """Returns whether all chains that mixtures may use were found, and the chains."""
        self._until = self.space.with_share(GATHERING)
        self._graph, is_whole = self._splits()
        limits = self._limits(self.relaxation.bound.prices, self._names, math.inf)
        finished, candidates = price_chains(self._graph, limits)
        if is_whole and finished and len(candidates) <= MAX_CHAINS:
            return True, candidates
        candidates += self._chains_on_some_types() if self.space.several_stages else []
        candidates += self._chains_at_rates(self._graph, limits)
        return False, list(dict.fromkeys(candidates))

    def _chains_on_some_types(self) -> list[Chain]:
        """Returns chains on each accelerator type, and on each pair of types.

        On several types, slow chains are useful as well, because they leave devices to other chains.
        """
        priced: list[Chain] = []
        faster = replace(self.problem, objective=MaximizeRate())
        sizes = (1, 2) if len(self._names) <= MAX_TYPES_IN_PAIRS else (1,)
        sets = [part for size in sizes if size < len(self._names) for part in combinations(self._names, size)]
        for names in sets:
            if self._until.is_over():
                break
            alone = solve_relaxation(faster, self.space, names)
            if alone is None:
                continue
            devices = [self._graph.device_names.index(name) for name in names]
            part = self._graph.only(np.isin(self._graph.moves.device_M, devices))
            limits = self._limits(alone.bound.prices, names, alone.bound.value)
            priced += price_chains(part, limits, MAX_LABELS_OF_PART)[1]
            priced += self._chains_at_rates(part, limits)
        return priced

    def _chains_at_rates(self, graph: Graph, limits: ChainLimits, low: float = 0.0) -> list[Chain]:
        """Returns chains with integer replicas, at the required rate or near the highest possible rate above `low`."""
        limits, required_per_s = limits._replace(is_whole=True), self.problem.required_per_s
        most, per_group = 4 * MAX_LABELS, LABELS_PER_GROUP_AT_RATE
        if required_per_s is not None:
            limits = limits._replace(price_C=self.relaxation.planes.usd_C, price_latency=0.0)
            return _search(graph, limits, most, per_group)[1]
        priced: list[Chain] = []
        high, step = limits.rate, FIRST_STEP
        for _ in range(MAX_SEARCHES):
            if high <= low * (1 + RATE_RESOLUTION) or self._until.is_over():
                break
            middle = max(high * (1 - step), (low + high) / 2)
            max_price = float(limits.price_C @ limits.count_C) / middle + limits.price_latency * limits.limit_s
            limits = limits._replace(rate=middle, max_price=max_price * (1 + 1e-9))
            outcome, chains = _search(graph, limits, most, per_group)
            priced += chains
            if chains or outcome == ABORTED:  # a search at a higher rate has fewer labels
                low = middle
            else:
                high, step = middle, 2 * step
        return priced

    def _replacements(self, best: FeasiblePlan) -> list[Chain]:
        """Returns chains that could replace a chain of a plan, on the devices that its other chains leave."""
        priced: list[Chain] = []
        bound, figures = self.relaxation.bound, best.figures
        chains = chains_of(best.stages, self.problem.num_blocks)
        for chain, share in zip(chains, figures.shares, strict=True):
            left_C = self.relaxation.planes.count_C
            for stage in (stage for other in chains if other is not chain for stage in other):
                left_C[self._graph.device_names.index(stage.device)] -= stage.replicas
            rate = share * figures.served_per_s
            spare_per_s = 0.0 if self.problem.required_per_s is not None else bound.value - figures.rate_per_s
            limits = self._limits(bound.prices, self._names, rate + spare_per_s)._replace(count_C=left_C)
            priced += self._chains_at_rates(self._graph, limits, rate)
        return priced

    def _splits(self) -> tuple[Graph, bool]:
        """Returns the graph of splits, and whether it is complete."""
        problem, space = self.problem, self.space
        is_large = num_splits(problem, space) > MAX_SPLITS
        payable = replace(problem, devices={name: problem.devices[name] for name in self._names})
        is_complete = problem.num_blocks <= MAX_STAGES or not space.several_stages
        graph = build_graph(payable, space, around=self.relaxation.ramps, width=RANKS_NEAR if is_large else None)
        return graph, is_complete and not is_large

    @property
    def _names(self) -> tuple[str, ...]:
        return self.relaxation.planes.names

    def _limits(self, prices: Prices, names: tuple[str, ...], rate: float) -> ChainLimits:
        """Returns the prices and limits of chains on these accelerator types, with a rate of at most `rate`."""
        by_name = dict(zip(names, prices.work_C + prices.hop_C, strict=True))
        price_C = np.array([float(by_name.get(name, 0.0)) for name in self._graph.device_names])
        rate = min(rate, self.problem.required_per_s or self.relaxation.bound.value)
        limits = limits_of_prices(price_C, prices.latency, rate, self.space)
        return limits._replace(limit_s=float(self.problem.slo.limit_s), count_C=self.relaxation.planes.count_C)

    def _mix(self, candidates: Sequence[Chain]) -> float | None:
        """Adds the best mixtures of candidates to the plans. Returns a bound on all mixtures; None: unknown."""
        if len(candidates) > self.problem.most_chains * MAX_CHAINS:
            candidates = most_promising(candidates, MAX_CHAINS)
        problem = without_idle_devices(self._graph.problem, candidates)
        options, bound = fastest_options(candidates, problem), None
        for most_chains in sorted({1, problem.most_chains}):  # exit records may prefer a plan of a single chain
            if self.space.is_over():
                return None
            mixture = best_mixture(candidates, options, replace(problem, most_chains=most_chains))
            plan = if_feasible(self.problem, mixture.stages) if mixture.chains else None
            self._plans += [] if plan is None else [plan]
            bound = mixture.bound
        return bound
