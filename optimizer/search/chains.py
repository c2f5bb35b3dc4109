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
from optimizer.problems.problem import MaximizeRate, PlanProblem, device_names
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
    limits_of,
    search_labels,
    trace,
)
from optimizer.search.master import CandidateChain, best_mixtures
from optimizer.search.moves import Graph, Path, build_graph
from optimizer.search.relaxation import Relaxation, solve_relaxation
from optimizer.search.space import Space

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


def _priced_chains(graph: Graph, limits: ChainLimits, most: int) -> tuple[bool, list[CandidateChain]]:
    """Returns whether all chains of a graph that mixtures may use were found with `most` labels, and the chains."""
    outcome, chains = _search(graph, limits, most, most)
    if outcome == COMPLETE:
        return True, chains
    least = float(completion_bounds(graph.moves, limits, limits.price_C, limits.price_latency).least_PS[0, CLOSED])
    best: list[CandidateChain] = []
    for share in PRICE_MARGINS:
        outcome, chains = _search(graph, limits._replace(max_price=least * (1 + share)), MAX_LABELS, LABELS_PER_GROUP)
        if outcome == ABORTED:
            break
        best = chains
    return False, best


def _search(graph: Graph, limits: ChainLimits, most: int, per_group: int) -> tuple[int, list[CandidateChain]]:
    """Returns the outcome of a search with at most `most` labels, and the chains that it found."""
    outcome, labels, ends_L = search_labels(graph.moves, limits, most, per_group, False)
    return outcome, [_read_chain(graph, trace(labels, label), float(labels.float_LF[label, TOTAL])) for label in ends_L]


def _read_chain(graph: Graph, path: Path, price: float) -> CandidateChain:
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
    return CandidateChain(
        stages=graph.stages_of(path),
        devices=tuple(devices),
        seconds=tuple(seconds),
        waits=tuple(waits),
        latency_s=latency_s,
        fill=fill,
        price=price,
    )


def most_promising(candidates: Sequence[CandidateChain], most: int) -> list[CandidateChain]:
    """Returns `most` chains: the cheapest of each sequence of device types, then the second cheapest, and so on."""
    num_before: Counter[tuple[int, ...]] = Counter()
    turns: list[tuple[int, CandidateChain]] = []
    for chain in sorted(dict.fromkeys(candidates), key=lambda chain: chain.price):
        turns.append((num_before[chain.devices], chain))
        num_before[chain.devices] += 1
    return [chain for _, chain in sorted(turns, key=lambda turn: turn[0])[:most]]


def search_chains(problem: PlanProblem, space: Space) -> Found:
    """Returns the best plan that was found, and a proven bound."""
    problem = replace(problem, most_chains=min(problem.most_chains, space.most_chains))
    relaxation = solve_relaxation(problem, space)
    if relaxation is None or space.is_over():
        return Found(plans=(), bound=best_value(problem, [] if relaxation is None else [relaxation.bound.value]))
    return ChainSearch.of(relaxation).found()


def find_chains(problem: PlanProblem, space: Space, most: int) -> list[CandidateChain]:
    """Returns up to `most` chains that good mixtures of a problem may use."""
    relaxation = solve_relaxation(problem, space)
    found = [] if relaxation is None else ChainSearch.of(relaxation).candidates()[1]
    return most_promising(found, most)


@dataclass(slots=True)
class ChainSearch:
    """The search for the best plan of one problem."""

    relaxation: Relaxation
    _graph: Graph
    _is_whole: bool
    """Whether every chain is a path of the graph that the label search can find."""
    _until: Space
    """The space with the time until which chains are sought. They are mixed then."""
    _plans: list[FeasiblePlan] = field(default_factory=list)
    """All plans that the master problems found."""

    @classmethod
    def of(cls, relaxation: Relaxation) -> ChainSearch:
        """Returns the search of a relaxed problem, with its graph of splits."""
        problem, space = relaxation.problem, relaxation.space
        is_large = num_splits(problem, space) > MAX_SPLITS
        graph = build_graph(problem, space, around=relaxation.ramps, width=RANKS_NEAR if is_large else None)
        is_whole = not is_large and (problem.num_blocks <= MAX_STAGES or not space.several_stages)
        return cls(relaxation, graph, is_whole, space.with_share(GATHERING))

    def found(self) -> Found:
        """Returns all plans that were found, the best first, and a bound on all plans."""
        problem, bound = self.relaxation.problem, self.relaxation.bound.value
        is_complete, candidates = self.candidates()
        mixed_bound = self._mix(candidates)
        self._until = self.relaxation.space
        if is_complete and mixed_bound is not None:
            bound = worst_value(problem, (bound, mixed_bound))
        for _ in range(0 if is_complete else MAX_ROUNDS):
            before = self._best
            if before is None or self.relaxation.space.is_over():
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
        return max(self._plans, key=lambda plan: merit(self.relaxation.problem, plan.figures), default=None)

    def candidates(self) -> tuple[bool, list[CandidateChain]]:
        """Returns whether all chains that mixtures may use were found, and the chains."""
        limits = self._limits(self.relaxation, math.inf)
        finished, candidates = _priced_chains(self._graph, limits, MAX_LABELS)
        if self._is_whole and finished and len(candidates) <= MAX_CHAINS:
            return True, candidates
        candidates += self._chains_on_some_types() if self.relaxation.space.several_stages else []
        candidates += self._chains_at_rates(self._graph, limits)
        return False, list(dict.fromkeys(candidates))

    def _chains_on_some_types(self) -> list[CandidateChain]:
        """Returns chains on each accelerator type, and on each pair of types.

        On several types, slow chains are useful as well, because they leave devices to other chains.
        """
        chains, names, device_M = list[CandidateChain](), self._graph.device_names, self._graph.moves.device_M
        faster = replace(self.relaxation.problem, objective=MaximizeRate())
        sizes = (1, 2) if len(names) <= MAX_TYPES_IN_PAIRS else (1,)
        for some in (some for size in sizes if size < len(names) for some in combinations(names, size)):
            if self._until.is_over():
                break
            alone = solve_relaxation(faster.on(some), self.relaxation.space)
            if alone is None:
                continue
            part = self._graph.only(np.isin(device_M, [names.index(name) for name in some]))
            limits = self._limits(alone, alone.bound.value)
            chains += _priced_chains(part, limits, MAX_LABELS_OF_PART)[1]
            chains += self._chains_at_rates(part, limits)
        return chains

    def _chains_at_rates(self, graph: Graph, limits: ChainLimits, low: float = 0.0) -> list[CandidateChain]:
        """Returns chains with integer replicas, at the required rate or near the highest possible rate above `low`."""
        limits, required_per_s = limits._replace(is_whole=True), self.relaxation.problem.required_per_s
        most, per_group = 4 * MAX_LABELS, LABELS_PER_GROUP_AT_RATE
        if required_per_s is not None:
            limits = limits._replace(price_C=limits.usd_C, price_latency=0.0)
            return _search(graph, limits, most, per_group)[1]
        found, high, step = list[CandidateChain](), limits.rate, FIRST_STEP
        for _ in range(MAX_SEARCHES):
            if high <= low * (1 + RATE_RESOLUTION) or self._until.is_over():
                break
            middle = max(high * (1 - step), (low + high) / 2)
            max_price = float(limits.price_C @ limits.count_C) / middle + limits.price_latency * limits.limit_s
            limits = limits._replace(rate=middle, max_price=max_price * (1 + 1e-9))
            outcome, chains = _search(graph, limits, most, per_group)
            found += chains
            if chains or outcome == ABORTED:  # a search at a higher rate has fewer labels
                low = middle
            else:
                high, step = middle, 2 * step
        return found

    def _replacements(self, best: FeasiblePlan) -> list[CandidateChain]:
        """Returns chains that could replace a chain of a plan, on the devices that its other chains leave."""
        found, figures = list[CandidateChain](), best.figures
        chains = chains_of(best.stages)
        is_rate = self.relaxation.problem.required_per_s is None
        spare_per_s = self.relaxation.bound.value - figures.rate_per_s if is_rate else 0.0
        for chain, share in zip(chains, figures.shares, strict=True):
            left_C = self.relaxation.problem.count_C
            for stage in (stage for other in chains if other is not chain for stage in other):
                left_C[self._graph.device_names.index(stage.device)] -= stage.replicas
            rate = share * figures.served_per_s
            limits = self._limits(self.relaxation, rate + spare_per_s)._replace(count_C=left_C)
            found += self._chains_at_rates(self._graph, limits, rate)
        return found

    def _limits(self, relaxation: Relaxation, rate: float) -> ChainLimits:
        """Returns the limits of chains at the prices of a relaxation, with a rate of at most `rate`."""
        prices, names = relaxation.bound.prices, device_names(relaxation.problem)
        by_name = dict(zip(names, (prices.work_C + prices.hop_C).tolist(), strict=True))
        price_C = np.array([by_name.get(name, 0.0) for name in self._graph.device_names])
        rate = min(rate, self.relaxation.problem.required_per_s or self.relaxation.bound.value)
        return limits_of(self.relaxation.problem, self.relaxation.space, price_C, prices.latency, rate)

    def _mix(self, candidates: Sequence[CandidateChain]) -> float | None:
        """Adds the best mixtures of candidates to the plans. Returns a bound on all mixtures; None: unknown.

        Exit records may prefer a plan of a single chain.
        """
        if self.relaxation.space.is_over():
            return None
        if len(candidates) > self.relaxation.problem.most_chains * MAX_CHAINS:
            candidates = most_promising(candidates, MAX_CHAINS)
        mixtures = best_mixtures(candidates, self.relaxation.problem)
        plans = [if_feasible(self.relaxation.problem, each.stages) for each in mixtures if each.chains]
        self._plans += [plan for plan in plans if plan is not None]
        return mixtures[-1].bound
