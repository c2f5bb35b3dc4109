"""Plans of several chains side by side: chains from the label search, devices from the master problem.

The dual prices of the relaxation (`optimizer.scale.bound`) steer the label search; the master problem chooses among the
chains that it finds, and once more among those near the chosen ones. Where the search left none out and the program was
solved to its end, the plan is proven best over all chains; else its gap is that to the relaxation's bound.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np

from optimizer.columns import (
    ALL,
    CLOSED,
    DEVICE,
    MOVE,
    NONE,
    PARENT,
    TOTAL,
    ChainLimits,
    least_prices,
    search,
)
from optimizer.decision import Decision, FeasiblePlan, if_feasible, nearest_slo_s, rate_of, why_infeasible
from optimizer.evaluate import TOLERANCE, merit, objective_value
from optimizer.exact.solve import num_splits
from optimizer.master import Cluster, Column, Demand, StageWork, highest_rate, solve_master
from optimizer.moves import Graph, build_graph, end_nodes, nodes_around
from optimizer.plan import Stage, chains_of
from optimizer.problem import MaximizeRate, PlanProblem
from optimizer.scale.bound import Bounded, Relaxation, relaxed
from optimizer.space import Space, payable_names
from optimizer.step import FloatArray, Labels
from optimizer.walks import Prices

SHARES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
"""How much above the least price chains may be, as long as all labels find room."""
MOST_LABELS = 20_000
MOST_COLUMNS = 200
"""Of one master problem."""
ALIKE = 8
"""Labels of a node with the same types that go on, where not all do."""
ALIKE_AT_RATE = 16
FURTHER = 0.003
"""Rates closer than this are not told apart where a part's highest is sought."""
SEARCHES = 6
"""For the highest rate of a part."""
WIDTH = 0.02
"""How far below its bound they begin; then twice as far."""
MOST_IN_PAIRS = 4
"""With more types, chains are sought on each one and on all, not on pairs."""
ROUNDS = 4
"""Of looking for a better chain on the devices that the other chains leave."""
MOST_SPLITS = 200_000
"""Of a graph that is searched whole; else only the ramps of the relaxation's plan begin splits."""
RANKS_NEAR = 2
SECONDS = 1.0
"""Of one master problem."""
SOLVED = 2e-4
"""Of values that are one: HiGHS is asked for half of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedChain:
    """A chain with one replica per stage, and what the master problem sees of it."""

    stages: tuple[Stage, ...]
    column: Column
    price: float


def candidates_of(graph: Graph, reach: ChainLimits) -> tuple[bool, list[PricedChain]]:
    """Chains of one graph for mixtures, and whether none was left out."""
    least = float(least_prices(graph.moves, reach)[0][0])
    if math.isinf(least):
        return True, []
    outcome, labels, ends_L = search(graph.moves, reach, MOST_LABELS, MOST_LABELS)
    if outcome == ALL:
        return True, [_candidate(graph, labels, int(label)) for label in ends_L]
    best: list[PricedChain] = []
    for share in SHARES:
        outcome, labels, ends_L = search(
            graph.moves, reach._replace(most_price=least * (1 + share)), MOST_LABELS, ALIKE
        )
        if outcome == NONE:
            break
        best = [_candidate(graph, labels, int(label)) for label in ends_L]
    return False, best


def candidates_at(graph: Graph, reach: ChainLimits) -> tuple[bool, list[PricedChain]]:
    """Whether chains of whole replicas may do a rate, and those that were found to.

    Where so many may that not all beginnings find room, none is returned: a higher rate has fewer.
    """
    outcome, labels, ends_L = search(graph.moves, reach, 4 * MOST_LABELS, ALIKE_AT_RATE)
    return outcome == NONE or len(ends_L) > 0, [_candidate(graph, labels, int(label)) for label in ends_L]


def _candidate(graph: Graph, labels: Labels, label: int) -> PricedChain:
    """Read a label back to its beginning."""
    moves, int_LI = graph.moves, labels.int_LI
    price = float(labels.float_LF[label, TOTAL])
    of_stages: list[list[int]] = []
    while int_LI[label, PARENT] >= 0:
        if int_LI[label, DEVICE] == CLOSED:
            of_stages.insert(0, [])
        of_stages[0].insert(0, int(int_LI[label, MOVE]))
        label = int(int_LI[label, PARENT])
    latency_s, fill, works, way, node = 0.0, 0.0, [], [], 0
    for splits in of_stages:
        device, last = int(moves.device_M[splits[0]]), splits[-1]
        pooled = [move for place, move in enumerate(splits) if not place or moves.pooled_M[move]]
        latency_s += float(sum(moves.seconds_M[move] + moves.cross_M[move] for move in splits))
        fill += float(sum(moves.wait_M[move] for move in pooled))
        seconds = float(sum(moves.work_M[move] for move in splits))
        if splits is not of_stages[-1]:
            seconds, latency_s = max(seconds, float(moves.hop_work_M[last])), latency_s + float(moves.hop_M[last])
        wait = float(sum(moves.wait_M[move] for move in splits if move not in pooled))
        works.append(StageWork(device=device, seconds=seconds, wait=wait))
        for move in splits:
            way.append((node, move, int(move == last)))
            node = int(moves.to_M[move])
    column = Column(stages=tuple(works), latency_s=latency_s, fill=fill)
    return PricedChain(stages=graph.stages_of(way), column=column, price=price)


def chosen(candidates: Sequence[PricedChain]) -> list[PricedChain]:
    """Of every sequence of types the cheapest chains in turns, so that all sequences are tried."""
    groups: dict[tuple[int, ...], list[PricedChain]] = {}
    for each in dict.fromkeys(candidates):
        groups.setdefault(tuple(stage.device for stage in each.column.stages), []).append(each)
    ranked = [
        (turn, each.price, place, each)
        for place, group in enumerate(groups.values())
        for turn, each in enumerate(sorted(group, key=lambda each: each.price))
    ]
    return [each for *_, each in sorted(ranked, key=lambda each: each[:3])[:MOST_COLUMNS]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """What the master problem made of candidates."""

    found: FeasiblePlan
    bound: float
    used: tuple[PricedChain, ...] = ()


def mixed(
    problem: PlanProblem, candidates: Sequence[PricedChain], names: Sequence[str], most_chains: int
) -> Mixed | None:
    """The best mixture of candidates that keeps every promise, and what no mixture of them is better than."""
    if not candidates:
        return None
    budget = problem.budget_usd_per_hour
    cluster = Cluster(
        count_C=np.array([float(problem.devices[name].count) for name in names]),
        usd_C=np.array([problem.devices[name].usd_per_hour for name in names]),
        budget=math.inf if budget is None else budget,
    )
    demand = Demand(limit_s=problem.slo.limit_s, rate_per_s=problem.required_per_s, most_chains=most_chains)
    mixture = solve_master([each.column for each in candidates], [demand], cluster, seconds=SECONDS)
    if mixture is None or not mixture.replicas:
        return None
    stages = tuple(
        replace(stage, replicas=count)
        for q, replicas in mixture.replicas.items()
        for stage, count in zip(candidates[q].stages, _needed(problem, candidates[q].column, replicas), strict=True)
    )
    shares = tuple(mixture.rates[q] for q in mixture.replicas) if problem.required_per_s is not None else ()
    found = if_feasible(problem, stages, tuple(share / sum(shares) for share in shares))
    used = tuple(candidates[q] for q in mixture.replicas)
    return None if found is None else Mixed(found=found, bound=mixture.bound, used=used)


def _needed(problem: PlanProblem, column: Column, replicas: Sequence[int]) -> list[int]:
    """The replicas without those that do not raise the rate, where that is sought."""
    if problem.required_per_s is not None:
        return list(replicas)
    rate = highest_rate(column, replicas)
    return [max(1, math.ceil(rate * each.seconds * (1 - TOLERANCE))) for each in column.stages]


def solve_chains(problem: PlanProblem, space: Space) -> Decision | None:
    """The best plan that is found, with its gap, or proof that there is none; None where neither was found."""
    search = _search_of(problem, space)
    best, complete = (None, True) if search is None else search.best()
    if best is None and complete:
        return why_infeasible(
            problem,
            space.strategy,
            possible=lambda other: _any_plan(other, space),
            nearest_slo_s=lambda patient: nearest_slo_s(problem, patient, lambda other: _any_plan(other, space)),
            highest_rate_per_s=lambda other: rate_of(_any_plan(replace(other, objective=MaximizeRate()), space)),
        )
    if best is None or search is None:
        return None
    value, bound = objective_value(problem, best.found.figures), search.whole.value
    tighter = min if isinstance(problem.objective, MaximizeRate) else max
    bound = tighter(bound, best.bound) if complete else bound
    is_proven = abs(value - bound) <= SOLVED * abs(bound)
    others = (each.stages for each in search.others)
    return best.found.planned(problem, space.strategy, value if is_proven else bound, others)


def _search_of(problem: PlanProblem, space: Space) -> ChainSearch | None:
    """None: the problem is proven to have no plan."""
    names = payable_names(problem)
    relaxation = relaxed(problem, space, names) if names else None
    return None if relaxation is None else ChainSearch(problem=problem, space=space, names=names, relaxation=relaxation)


@dataclass(slots=True, kw_only=True)
class ChainSearch:
    """The best plan of one question."""

    problem: PlanProblem
    space: Space
    names: tuple[str, ...]
    """Of the accelerator types."""
    relaxation: Relaxation
    others: list[FeasiblePlan] = field(default_factory=list)
    """Other plans that were met, best first."""
    _of_types: list[PricedChain] = field(default_factory=list)
    """The best chain of each accelerator type: a candidate of every master problem."""

    @property
    def whole(self) -> Bounded:
        """What no plan is better than."""
        return self.relaxation.bound

    def best(self) -> tuple[Mixed | None, bool]:
        """The best plan that was found, and whether no chain was left out."""
        graph, complete = self._graph()
        finished, candidates = candidates_of(graph, self._reach(graph, self.whole.prices, self.names, math.inf))
        if complete and finished and len(candidates) <= MOST_COLUMNS:
            return self._mixed([*candidates, *self._again(candidates)], None), True
        best = self._mixed(candidates, None)
        candidates += self._of_parts(graph)
        best = self._mixed(candidates, self._mixed(self._of_types, best))
        for _ in range(ROUNDS):
            if best is None or self._is_proven(best):
                break
            near = [*candidates, *best.used, *self._on_the_rest(graph, best)]
            before, best = best, self._mixed(near, best)
            if best is before:
                break
        return best, False

    def _again(self, candidates: Sequence[PricedChain]) -> list[PricedChain]:
        """Chains that may be worth having twice: more replicas fill their own batches more slowly."""
        slower = [each for each in candidates if any(stage.wait for stage in each.column.stages)]
        return slower * (self._most_chains - 1)

    def _of_parts(self, graph: Graph) -> list[PricedChain]:
        """Chains on each accelerator type, on each pair, and on all of them.

        On several types also chains that are slower than the best ones of each type together: they leave devices to
        other chains.
        """
        found: list[PricedChain] = []
        for names in self._parts():
            is_whole = names == self.names
            faster = replace(self.problem, objective=MaximizeRate())
            alone = self.relaxation if is_whole else relaxed(faster, self.space, names)
            if alone is None:
                continue
            bounded = alone.bound
            devices = [graph.device_names.index(name) for name in names]
            part = graph if is_whole else graph.only(np.isin(graph.moves.device_M, devices))
            reach = self._reach(graph, bounded.prices, names, math.inf if is_whole else bounded.value)
            chains = [] if is_whole else candidates_of(part, reach)[1]
            chains += self._at_rates(part, reach._replace(count_C=self._count_C(graph)))
            if len(names) == 1 and self.problem.required_per_s is None:
                best = mixed(self.problem, chosen(chains), self.names, 1)
                self._of_types += () if best is None else best.used
            found += chains
        return found

    def _parts(self) -> list[tuple[str, ...]]:
        """Sets of types that chains are sought on."""
        if self._most_chains == 1 or not self.space.several_stages:
            return [self.names]
        sizes = (1, 2, len(self.names)) if len(self.names) <= MOST_IN_PAIRS else (1, len(self.names))
        return list(dict.fromkeys(part for size in sizes for part in combinations(self.names, size)))

    def _at_rates(self, graph: Graph, reach: ChainLimits, low: float = 0.0) -> list[PricedChain]:
        """Chains of whole replicas: at the rate that is asked for, or near the highest above `low` that has any."""
        reach = reach._replace(is_whole=True)
        if self.problem.required_per_s is not None:
            usd_C = np.array([self.problem.devices[name].usd_per_hour for name in graph.device_names])
            return candidates_at(graph, reach._replace(price_C=usd_C.astype(float), price_latency=0.0))[1]
        found: list[PricedChain] = []
        high, width = reach.rate, WIDTH
        for _ in range(SEARCHES):
            if high <= low * (1 + FURTHER):
                break
            middle = max(high * (1 - width), (low + high) / 2)
            most_price = float(reach.price_C @ reach.count_C) / middle + reach.price_latency * reach.limit_s
            may, here = candidates_at(graph, reach._replace(rate=middle, most_price=most_price * (1 + 1e-9)))
            found += here
            if may:
                low = middle
            else:
                high, width = middle, 2 * width
        return found

    def _on_the_rest(self, graph: Graph, best: Mixed) -> list[PricedChain]:
        """Chains in the place of each one of the best plan, on what the others leave."""
        found: list[PricedChain] = []
        problem, figures = self.problem, best.found.figures
        chains = chains_of(best.found.stages, problem.num_blocks)
        for chain, share in zip(chains, figures.shares, strict=True):
            left_C = self._count_C(graph)
            for stage in (stage for other in chains if other is not chain for stage in other):
                left_C[graph.device_names.index(stage.device)] -= stage.replicas
            own_rate = share * figures.served_per_s
            highest = self.whole.value
            if problem.required_per_s is None:
                highest = min(own_rate + self.whole.value - figures.rate_per_s, highest)
            reach = self._reach(graph, self.whole.prices, self.names, highest)._replace(count_C=left_C)
            if problem.required_per_s is not None:
                reach = reach._replace(rate=own_rate)
            found += self._at_rates(graph, reach, own_rate)
        return found

    def _graph(self) -> tuple[Graph, bool]:
        """What chains are paths of, and whether all splits are there."""
        problem, space = self.problem, self.space
        nodes, whole = None if space.splits_per_stage or space.several_stages else end_nodes(problem), True
        if nodes is None and num_splits(problem, space) > MOST_SPLITS:
            nodes, whole = nodes_around(problem, self.relaxation.ramps, RANKS_NEAR), False
        paid = replace(problem, devices={name: problem.devices[name] for name in self.names})
        return build_graph(paid, space.ramps, nodes=nodes), whole

    def _count_C(self, graph: Graph) -> FloatArray:
        return np.array([float(self.problem.devices[name].count) for name in graph.device_names])

    @property
    def _most_chains(self) -> int:
        return min(self.problem.most_chains, self.space.most_chains)

    def _reach(self, graph: Graph, prices: Prices, names: tuple[str, ...], rate: float) -> ChainLimits:
        """Of chains on some types, at their prices, that do at most so much."""
        by_name = dict(zip(names, prices.work_C + prices.hop_C, strict=True))
        asked = self.problem.required_per_s
        return ChainLimits(
            price_C=np.array([float(by_name.get(name, 0.0)) for name in graph.device_names]),
            price_latency=float(prices.latency),
            most_price=math.inf,
            limit_s=float(self.problem.slo.limit_s),
            rate=float(min(rate, self.whole.value if asked is None else asked)),
            is_whole=False,
            count_C=np.zeros(len(graph.device_names)),
            may_split=self.space.splits_per_stage,
            may_hop=self.space.several_stages,
        )

    def _mixed(self, candidates: Sequence[PricedChain], best: Mixed | None) -> Mixed | None:
        """The better of the best so far and what the master problem makes of candidates."""
        several = candidates if len(candidates) <= self._most_chains * MOST_COLUMNS else chosen(candidates)
        tried = list(dict.fromkeys([*self._of_types, *several]))
        # Of several chains, and, where the search for these may end early, of one.
        for most_chains in sorted({1, self._most_chains}):
            found = mixed(self.problem, tried, self.names, most_chains)
            if found is None:
                continue
            self.others.append(found.found)
            if best is None or merit(self.problem, found.found.figures) > merit(self.problem, best.found.figures):
                best = found
        return best

    def _is_proven(self, best: Mixed) -> bool:
        value = objective_value(self.problem, best.found.figures)
        return abs(value - self.whole.value) <= SOLVED * abs(self.whole.value)


def _any_plan(problem: PlanProblem, space: Space) -> FeasiblePlan | None:
    search = _search_of(problem, space)
    best = None if search is None else search.best()[0]
    return None if best is None else best.found
