"""Plans of one chain or of several side by side: chains from the label search, devices from the master problem.

Prices steer the label search (`optimizer.search.prices`). Where the graph is small, every chain that can be part of a
best plan is found, and the best plan among them is proven best. Otherwise:

- one chain is sought at one rate after another, from its bound downwards, or at the rate that is asked for;
- for several chains the master problem chooses among the chains that were found on parts of the devices, and once more
  among those near the chosen ones, on the devices that the others leave.

The gap of what is found is then that to the bound of the prices, or to what the label search dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations, product

import numpy as np

from earlyexit.errors import PlanError
from earlyexit.network.boundary import AfterAnswer
from optimizer.decision import (
    Decision,
    Found,
    NoPlan,
    Planned,
    Relaxed,
    gap_between,
    kept,
    rate_of,
    why_none,
    without_budget,
)
from optimizer.evaluate import TOLERANCE, sought
from optimizer.plan import Stage, chains_of
from optimizer.problem import ANY_LATENCY_S, MaximizeRate, MinimizeCost, MinimizeLatency, PlanProblem, device_names
from optimizer.search.alone import options_of
from optimizer.search.block_graph import build_block_graph
from optimizer.search.graph import RULES, Graph, build_graph, ends_of, nodes_around
from optimizer.search.labels import CLOSED, DEVICE, MOVE, PARENT, TOTAL, ChainLabels, ChainLimits, Rows, search
from optimizer.search.master import Cluster, Column, Demand, StageWork, highest_rate, solve_master
from optimizer.search.prices import (
    Bounded,
    CuttingPlanes,
    Goal,
    Oracle,
    Prices,
    UnitPrices,
    Ways,
    affordable_moves,
    chains_of_graph,
    cheapest_ways,
)
from optimizer.search.walks import Allowed, Walks, tables_of
from optimizer.space import Space
from optimizer.step import FloatArray, IntArray

SHARES = (0.003, 0.03, 0.3)
"""How much above the least price chains may be, as long as all labels find room."""
MOST_LABELS = 10_000
FEW_LABELS = 20_000
"""Of a search without prices, which is complete where it needs no more."""
FEW_MOVES = 5_000
"""Of a graph on which it is tried."""
MOST_COLUMNS = 200
"""Of one master problem."""
ALIKE = 8
"""Labels of a node with the same types that go on, where not all do."""
ALIKE_AT_RATE = 16
WIDTHS = (16, 200, 2_000)
"""The same where one chain is sought: one search after the other, until one drops nothing that could be better."""
MOST_AT_RATE = 400_000
"""Labels of such a search."""
FURTHER = 0.003
"""Rates closer than this are not told apart where a part's highest is sought."""
SEARCHES = 6
"""For the highest rate of a part."""
CLIMBS = 40
"""For the highest rate of one chain."""
WIDTH = 0.02
"""How far below its bound they begin; then twice as far."""
WIDEST = 0.1
MOST_IN_ALL = 1_000_000
"""Labels of all searches for one chain's highest rate."""
FEW_IN_ALL = 100_000
"""The same where several chains were found before."""
NARROW = 1e-10
MOST_IN_PAIRS = 4
"""With more types, chains are sought on each one and on all, not on pairs."""
ROUNDS = 4
"""Of looking for a better chain on the devices that the other chains leave."""
MOST_SPLITS = 2_000_000
"""Of a graph that is searched whole; else only the ramps of the relaxation's plan begin splits."""
RANKS_NEAR = 2
SECONDS = 1.0
"""Of one master problem."""
SLO_RESOLUTION = 1e-3
SOLVED = 2e-4
"""Of values that are one where several chains are mixed: HiGHS is asked for half of it."""
SAME = 1e-11
"""Of mean answer times that are one: plans of equal ones are told apart by what they cost."""
MOST_TRIED = 200
"""Chains of one search that are evaluated as plans."""
MOST_CHAINS = 20_000
"""Of one search that are read."""
MOST_OTHERS = 8
RATE_RESOLUTION = 0.01
LEAST_RATE = 1e-3
"""How exactly the highest rate inside a ramp budget is told, and how far below the highest at any it is sought."""


@dataclass(frozen=True, kw_only=True, eq=False)
class PricedChain:
    """A chain, and what the master problem sees of it."""

    graph: Graph
    ways: tuple[tuple[int, ...], ...]
    """By stage, the moves of its splits."""
    column: Column
    price: float

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """With one replica each."""
        names = self.graph.device_names
        return tuple(
            Stage(device=names[work.device], replicas=1, splits=self.graph.splits_of(way))
            for way, work in zip(self.ways, self.column.stages, strict=True)
        )

    def replicated(self, counts: Iterable[int]) -> tuple[Stage, ...]:
        """Its stages with so many replicas."""
        return tuple(replace(stage, replicas=int(count)) for stage, count in zip(self.stages, counts, strict=True))


def chain_of(graph: Graph, labels: ChainLabels, label: int) -> PricedChain:
    """Read a label back to its beginning."""
    moves, whole_LI = graph.moves, labels.whole_LI
    price = float(labels.real_LF[label, TOTAL])
    ways: list[list[int]] = []
    while whole_LI[label, PARENT] >= 0:
        if whole_LI[label, DEVICE] == CLOSED:
            ways.append([])
        ways[-1].append(int(whole_LI[label, MOVE]))
        label = int(whole_LI[label, PARENT])
    ways = [way[::-1] for way in reversed(ways)]
    latency_s, fill, works = 0.0, 0.0, []
    for way in ways:
        last = way[-1]
        apart = [move for place, move in enumerate(way) if place and not moves.pooled_M[move]]
        latency_s += float(moves.seconds_M[way].sum() + moves.cross_M[way].sum())
        wait = float(moves.wait_M[apart].sum()) if apart else 0.0
        fill += float(moves.wait_M[way].sum()) - wait
        seconds = float(moves.work_M[way].sum())
        if way is not ways[-1]:
            seconds, latency_s = max(seconds, float(moves.hop_work_M[last])), latency_s + float(moves.hop_M[last])
        works.append(StageWork(device=int(moves.device_M[last]), seconds=seconds, wait=wait))
    column = Column(stages=tuple(works), latency_s=latency_s, fill=fill)
    return PricedChain(graph=graph, ways=tuple(map(tuple, ways)), column=column, price=price)


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    """What a label search found."""

    graph: Graph
    dropped: float
    """No chain that was missed is cheaper than this; infinite where none was."""
    num_labels: int
    labels: ChainLabels
    ends_L: IntArray
    """The ended ones, cheapest first."""

    def chains(self) -> list[PricedChain]:
        """The cheapest chains."""
        return [chain_of(self.graph, self.labels, int(label)) for label in self.ends_L[:MOST_CHAINS]]


def _near(prices: Prices) -> Iterator[Prices]:
    """Prices that differ in one of them, each a proof of its own."""
    work_C = prices.work_C + prices.hop_C
    for factor in (1.5, 0.67):
        for device in range(len(work_C)):
            changed_C = work_C.copy()
            changed_C[device] *= factor
            yield prices._replace(work_C=changed_C, hop_C=0 * work_C)
        yield prices._replace(latency=prices.latency * factor)


def _stacked(rows: Sequence[tuple[UnitPrices, float]]) -> Rows:
    return Rows(
        price_VC=np.array([prices.price_C for prices, _ in rows]),
        latency_V=np.array([prices.latency for prices, _ in rows]),
        mean_V=np.array([prices.mean for prices, _ in rows]),
        ramps_V=np.array([prices.ramps for prices, _ in rows]),
        most_V=np.array([most for _, most in rows]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """What one search found, best first, and what it proves."""

    found: tuple[Found, ...] = ()
    bound: float | None = None
    """No plan is better; None: there is proven to be none."""


def solve_chains(problem: PlanProblem, space: Space) -> Decision:
    """The best plan that is found, proven so or with its gap, or proof that there is none.

    Raises PlanError where no plan is found and none is ruled out.
    """
    searched = _best_of(problem, space)
    if searched.bound is None:
        return _why_none(problem, space)
    if not searched.found:
        raise PlanError(f"no plan was found, though there may be one: none is better than {searched.bound:.6g}")
    best, value = searched.found[0], sought(problem, searched.found[0].figures)
    return Planned(
        strategy=space.strategy,
        stages=best.chain,
        figures=best.figures,
        bound=searched.bound,
        gap=gap_between(value, searched.bound),
        candidates=tuple(dict.fromkeys(each.chain for each in searched.found[1:] if each.chain != best.chain)),
    )


def bound_of(problem: PlanProblem, space: Space) -> float | None:
    """What no plan of a space is better than, soon told; None: there is proven to be none."""
    bounds = [bound for each in searches_of(problem, space) if (bound := each.bound()) is not None]
    return _best_bound(problem, bounds)


def _best_of(problem: PlanProblem, space: Space, goal: Goal | None = None) -> Searched:
    """All variants of a space together: what one finds, the next has to match."""
    found: list[Found] = []
    bounds: list[float] = []
    for each in searches_of(problem, space, goal):
        answer = each.best(_value_of(best_first(found, goal or goal_of(problem)), each.goal))
        found += answer.found
        bounds += [] if answer.bound is None else [answer.bound]
    found = list(best_first(found, goal or goal_of(problem)))
    return Searched(found=tuple(found), bound=_best_bound(problem, bounds))


def _best_bound(problem: PlanProblem, bounds: Sequence[float]) -> float | None:
    return (max if isinstance(problem.objective, MaximizeRate) else min)(bounds) if bounds else None


def searches_of(problem: PlanProblem, space: Space, goal: Goal | None = None) -> Iterator[ChainSearch]:
    """One search, or several.

    One per accelerator type where a plan has one stage, per batch size where all splits share it, and per what inputs
    do after their answer where early answers are sought.
    """
    goal = goal or goal_of(problem)
    payable = tuple(name for name in device_names(problem) if _can_pay(problem, name))
    is_early = goal in ("mean", "worst")
    is_single = not space.several_stages and (is_early or min(problem.most_chains, space.most_chains) == 1)
    groups = [(name,) for name in payable] if is_single else [payable] if payable else []
    modes: tuple[AfterAnswer, ...] = space.after_answer if is_early else ("stop",)
    for after_answer, names in product(modes, groups):
        batches = sorted({batch for name in names for batch in problem.latency[name].batches})
        shared: Graph | None = None
        for batch in batches if space.one_batch else [None]:
            each = ChainSearch(
                problem=problem, space=space, goal=goal, names=names, after_answer=after_answer, batch=batch,
                all_batches=shared,
            )  # fmt: skip
            yield each
            shared = each.all_batches


def goal_of(problem: PlanProblem) -> Goal:
    """What a problem seeks."""
    if isinstance(problem.objective, MaximizeRate):
        return "rate"
    return "cost" if isinstance(problem.objective, MinimizeCost) else "mean"


def _can_pay(problem: PlanProblem, name: str) -> bool:
    """Whether the budget pays for one device of that type."""
    budget = problem.budget_usd_per_hour
    return budget is None or problem.devices[name].usd_per_hour <= budget * (1 + TOLERANCE)


def _value_of(found: Sequence[Found], goal: Goal) -> float:
    """Of the best plan, by what is sought; the worst there can be without one."""
    if not found:
        return 0.0 if goal == "rate" else math.inf
    figures = found[0].figures
    by_goal: dict[Goal, float] = {
        "rate": figures.rate_per_s,
        "cost": figures.usd_per_hour,
        "mean": figures.mean_latency_s,
        "worst": figures.latency_s,
    }
    return by_goal[goal]


def best_first(found: Iterable[Found], goal: Goal) -> tuple[Found, ...]:
    """Of plans that are as good, the cheaper comes first, then the shorter worst case, then the one that stops."""
    found = list(found)
    sign = -1 if goal == "rate" else 1
    best = min((sign * _value_of([each], goal) for each in found), default=0.0)

    def order(each: Found) -> tuple[float, float, float, bool]:
        value = sign * _value_of([each], goal)
        apart = 0.0 if abs(value - best) <= SAME * abs(best) else value - best
        # Both modes sum the same seconds in their own order: no difference is made of what rounding leaves.
        return apart, each.figures.usd_per_hour, float(f"{each.figures.latency_s:.10g}"), each.chain[0].splits[0].stays

    return tuple(sorted(found, key=order))


@dataclass(kw_only=True)
class ChainSearch:
    """One question: its bound, then its best plan."""

    problem: PlanProblem
    space: Space
    goal: Goal
    names: tuple[str, ...]
    """Of accelerator types that the budget pays for."""
    after_answer: AfterAnswer = "stop"
    batch: int | None = None
    """Of all splits; None: each has its own."""
    all_batches: Graph | None = None
    """The graph of all batch sizes, where another search has built it."""
    most_splits: int = MOST_SPLITS
    few_moves: int = FEW_MOVES
    widths: tuple[int, ...] = WIDTHS

    @cached_property
    def limit_s(self) -> float:
        return math.inf if self.goal == "worst" else self.problem.slo.limit_s

    @cached_property
    def cluster(self) -> Cluster:
        devices, budget = self.problem.devices, self.problem.budget_usd_per_hour
        return Cluster(
            count_C=np.array([float(devices[name].count) for name in self.names]),
            usd_C=np.array([float(devices[name].usd_per_hour) for name in self.names]),
            budget=math.inf if budget is None else float(budget),
        )

    @property
    def is_whole(self) -> bool:
        """Whether the graph has all splits."""
        return self.goal in ("mean", "worst") or num_splits(self.problem, self.space) <= self.most_splits

    @cached_property
    def graph(self) -> Graph:
        """What chains are paths of: all splits, or those near the relaxation's plan."""
        if self.all_batches is None:
            self.all_batches = self._built()
        return self.all_batches if self.batch is None else self.all_batches.with_batch(self.batch)

    def _built(self) -> Graph:
        problem, space = self.problem, self.space
        problem = replace(problem, devices={name: problem.devices[name] for name in self.names})
        if self.goal in ("mean", "worst"):
            return build_block_graph(problem, space, self.after_answer)
        nodes = None if space.splits_per_stage or space.several_stages else ends_of(problem)
        if nodes is None and not self.is_whole:
            nodes = nodes_around(problem, self._relaxed_ramps, RANKS_NEAR)
        return build_graph(problem, space.ramps, every_batch=space.one_batch, nodes=nodes)

    @cached_property
    def _walks(self) -> Walks:
        """The relaxation of problems whose graph has not all splits."""
        allowed = Allowed(RULES[self.space.ramps], self.space.splits_per_stage, self.space.several_stages)
        return Walks.of(tables_of(self.problem, self.names, self.batch), allowed)

    @cached_property
    def _relaxed_ramps(self) -> tuple[int, ...]:
        assert self._bounded is not None
        self._walks.cheapest(self._bounded.prices, self.problem.asked_per_s or self._bounded.value)
        return self._walks.last_ramps(self.problem)

    def _planes(self, names: tuple[str, ...], goal: Goal) -> CuttingPlanes:
        """The relaxation on some types."""
        may_split, may_hop = self.space.splits_per_stage, self.space.several_stages
        oracle: Oracle
        if self.is_whole:
            graph = self.graph if names == self.names else self._part(names)
            oracle = chains_of_graph(graph, may_split=may_split, may_hop=may_hop)
            names = self.names
        elif names == self.names:
            oracle = self._walks.cheapest
        else:
            oracle = Walks.of(tables_of(self.problem, names, self.batch), self._walks.allowed).cheapest
        return CuttingPlanes(problem=self.problem, names=names, oracle=oracle, goal=goal, limit_s=self.limit_s)

    def _part(self, names: Sequence[str]) -> Graph:
        """Only the splits on some types."""
        return self.graph.only(np.isin(self.graph.moves.device_M, [self.names.index(name) for name in names]))

    def bound(self) -> float | None:
        """What no plan is better than; None: there is proven to be none."""
        return None if self._bounded is None else self._bounded.value

    @cached_property
    def _bounded(self) -> Bounded | None:
        rate = self.problem.asked_per_s
        planes = self._planes(self.names, "rate")
        if planes.least_latency_s() > self.limit_s * (1 + TOLERANCE):
            return None
        bounded = planes.highest_rate(enough=math.inf if rate is None else rate)
        if bounded.value <= 0 or (rate is not None and bounded.value < rate * (1 - TOLERANCE)):
            return None
        if rate is None:
            return bounded
        bounded = self._planes(self.names, self.goal).least(rate, bounded.prices)
        most = min(float(self.cluster.count_C @ self.cluster.usd_C), self.cluster.budget)
        if bounded.value > (most if self.goal == "cost" else self.limit_s) * (1 + TOLERANCE):
            return None
        return bounded

    @property
    def _prices(self) -> Prices:
        assert self._bounded is not None, "plans were looked for"
        return self._bounded.prices

    @property
    def _most_chains(self) -> int:
        return min(self.problem.most_chains, self.space.most_chains) if self.goal in ("rate", "cost") else 1

    def best(self, known: float) -> Searched:
        """The best plans; where nothing is as good as a `known` value, there may be none."""
        if self.goal in ("mean", "worst"):
            return Searched() if self._bounded is None else self._soonest(known)
        every = self.every_chain()
        if every is not None and self._most_chains == 1:
            found = self._alone(every)
            return Searched(found=found, bound=_value_of(found, self.goal) if found else None)
        if every is not None and len(every) <= MOST_COLUMNS:
            return self._mixed_of_all(every)
        if self._bounded is None:
            return Searched()
        return self._one() if self._most_chains == 1 else self._several()

    def every_chain(self) -> list[PricedChain] | None:
        """Every chain that can be part of a best plan; None where there are too many to tell."""
        if not self.is_whole or self.graph.num_moves > self.few_moves:
            return None
        price_C = 1 / (self.cluster.count_C * len(self.names))
        prices = Prices(price_C, 0 * price_C)
        per_input = float(self._ways(self.graph, prices, math.inf).closed_P[0])
        if math.isinf(per_input):
            return []
        # By weak duality no plan does more than 1 / per_input.
        rate = float(self.problem.asked_per_s or (1 + TOLERANCE) / per_input)
        prices = prices._replace(latency=1 / self.limit_s)
        answer = self._search(self.graph, prices, rate, width=FEW_LABELS, most_labels=FEW_LABELS)
        return answer.chains() if math.isinf(answer.dropped) else None

    def _ways(self, graph: Graph, prices: Prices, fill_rate: float) -> Ways:
        return cheapest_ways(
            graph.moves, prices.units, fill_rate, self.space.splits_per_stage, self.space.several_stages
        )

    def _alone(self, chains: Iterable[PricedChain], best: Sequence[Found] = ()) -> tuple[Found, ...]:
        """The best plans of one of these chains each, and those that are known already, best first."""
        asked, met = self.problem.asked_per_s, list[tuple[float, float, float, int, PricedChain, IntArray]]()
        known = _value_of(best, self.goal)
        for place, each in enumerate(chains):
            options = options_of(each.column, self.cluster, asked, known if asked is None else 0.0)
            kept_K = np.flatnonzero(options.latency_s_K <= self.limit_s * (1 + TOLERANCE))
            if len(kept_K) == 0:
                continue
            k = kept_K[0]
            known = max(known, float(options.rate_K[k])) if asked is None else known
            value = -float(options.rate_K[k]) if self.goal == "rate" else float(options.usd_K[k])
            met.append(
                (value, float(options.usd_K[k]), float(options.latency_s_K[k]), place, each, options.replicas_KS[k])
            )
        found = list(best)
        for place, (*_, each, replicas_S) in enumerate(sorted(met, key=lambda one: one[:4])):
            if place >= MOST_TRIED or len(found) >= MOST_OTHERS + len(best):
                break
            plan = kept(self.problem, each.replicated(replicas_S))
            found += [] if plan is None else [plan]
        return best_first(found, self.goal)

    def _search(
        self,
        graph: Graph,
        prices: Prices,
        rate: float,
        fill_rate: float | None = None,
        *,
        width: int,
        most_labels: int,
        is_whole: bool = False,
        count_C: FloatArray | None = None,
        most: Callable[[Prices], float] = lambda _: math.inf,
    ) -> Labelled:
        """The label search at a rate; `most` is what a chain may cost at any prices."""
        fill_rate, ramp_budget = rate if fill_rate is None else fill_rate, self.problem.ramp_budget
        may_split, may_hop = self.space.splits_per_stage, self.space.several_stages
        limits = ChainLimits(
            limit_s=float(self.limit_s),
            most_ramps=math.inf if ramp_budget is None else self._rounding_of_ramps(ramp_budget),
            rate=float(rate),
            fill_rate=float(fill_rate),
            is_whole=is_whole,
            count_C=self.cluster.count_C if count_C is None else count_C,
            usd_C=self.cluster.usd_C,
            budget=float(self.cluster.budget),
            may_split=may_split,
            may_hop=may_hop,
        )
        most_price = float(most(prices)) * (1 + TOLERANCE)
        if math.isfinite(most_price):
            graph = self._affordable(graph, prices, fill_rate, most_price)
        rows = [(prices.units, most_price)]
        if math.isfinite(self.limit_s):
            rows.append((UnitPrices(0 * limits.usd_C, 1.0, 0.0, 0.0), self.limit_s * (1 + TOLERANCE)))
        if ramp_budget is not None:
            rows.append((UnitPrices(0 * limits.usd_C, 0.0, 0.0, 1.0), limits.most_ramps))
        if is_whole and math.isfinite(most_price):
            rows += [(each.units, float(most(each)) * (1 + TOLERANCE)) for each in _near(prices)]
        dropped, num_labels, labels, ends_L = search(graph.moves, limits, _stacked(rows), most_labels, width)
        return Labelled(graph=graph, dropped=dropped, num_labels=num_labels, labels=labels, ends_L=ends_L)

    def _affordable(self, graph: Graph, prices: Prices, fill_rate: float, most_price: float) -> Graph:
        """Only what is part of a chain that costs no more."""
        may = self.space.splits_per_stage, self.space.several_stages
        return graph.only(affordable_moves(graph.moves, prices.units, float(fill_rate), *may, float(most_price)))

    def _rounding_of_ramps(self, budget: float) -> float:
        """What a whole plan's ramps may take beyond their budget for all that is known."""
        tables = [self.problem.latency[name].block_s_NB for name in self.names]
        return 5e-10 * budget * float(np.min([table.min(axis=1) for table in tables], axis=0).sum())

    def _soonest(self, known: float) -> Searched:
        """The plans of the least mean answer time, or of the shortest worst case."""
        assert self._bounded is not None
        rate, bound = float(self.problem.asked_per_s or 0.0), self._bounded.value
        value, found = min(known, self.limit_s), tuple[Found, ...]()
        planes = self._planes(self.names, self.goal)
        allowed = planes.allowed(self._prices)
        for width in self.widths:
            most = value * (1 + SAME)
            answer = self._search(
                self.graph, self._prices, rate, width=width, most_labels=MOST_AT_RATE, is_whole=True,
                most=lambda prices, most=most: most + planes.allowed(prices),  # type: ignore[misc]  # bound here
            )  # fmt: skip
            found = best_first([*found, *self._kept_at(answer.chains(), rate, value)], self.goal)[:MOST_OTHERS]
            value = min(value, _value_of(found, self.goal))
            if math.isinf(answer.dropped) or answer.dropped - allowed >= value * (1 - SAME):
                return Searched(found=found, bound=value if found else None)
            bound = max(bound, min(answer.dropped - allowed, value))
        return Searched(found=found, bound=bound)

    def _kept_at(self, chains: Iterable[PricedChain], rate: float, value: float) -> Iterator[Found]:
        """Plans that do a rate and are no worse than a value."""
        for each in chains:
            options = options_of(each.column, self.cluster, rate)
            for replicas_S in options.replicas_KS:
                plan = kept(self.problem, each.replicated(replicas_S))
                if plan is not None and _value_of([plan], self.goal) <= value * (1 + SAME):
                    yield plan

    def _one(self) -> Searched:
        """One chain, where not all chains were found."""
        assert self._bounded is not None
        found = self._alone(self._for_mixtures(self.graph, self._prices, self._bounded.value))
        if self.goal == "cost":
            return self._cheapest(found)
        return self._fastest(found, self._bounded.value)

    def _cheapest(self, found: tuple[Found, ...]) -> Searched:
        """The cheapest chain of the rate that is asked for."""
        assert self._bounded is not None
        rate, bound = float(self.problem.asked_per_s or 0.0), self._bounded.value
        planes = self._planes(self.names, "cost")

        def dear(prices: Prices) -> Prices:
            """A replica that is used costs at least its price in dollars."""
            work_C = np.maximum(prices.work_C + prices.hop_C, rate * self.cluster.usd_C)
            return prices._replace(work_C=work_C, hop_C=0 * work_C)

        prices = dear(self._prices)
        allowed = planes.allowed(prices)
        for width in self.widths:
            value = min(_value_of(found, "cost"), float(self.cluster.count_C @ self.cluster.usd_C))
            answer = self._search(
                self.graph, prices, rate, width=width, most_labels=MOST_AT_RATE, is_whole=True,
                most=lambda prices, value=value: value + planes.allowed(dear(prices)),  # type: ignore[misc]  # bound here
            )  # fmt: skip
            found = self._alone(answer.chains(), found)
            value = _value_of(found, "cost")
            if math.isinf(answer.dropped) or answer.dropped - allowed >= value:
                return Searched(found=found, bound=value if found else None)
            bound = max(bound, min(answer.dropped - allowed, value))
        return Searched(found=found, bound=bound)

    def _fastest(self, found: tuple[Found, ...], high: float, most_labels: int = MOST_IN_ALL) -> Searched:
        """The fastest chain: rates are tried from above, in intervals (required, high].

        Stages must do the required rate while batches fill as fast as at `high`. Where not even that has a chain, no
        plan has a rate in the interval.
        """
        planes = self._planes(self.names, "rate")
        proven, width, place, num_labels = high, WIDTH, 0, 0
        for _ in range(CLIMBS):
            low = _value_of(found, "rate")
            if high <= low * (1 + NARROW) or width < NARROW or num_labels > most_labels:
                break
            required = max(high * (1 - width), low * (1 + NARROW))
            answer = self._search(
                self.graph, self._prices, required, high,
                width=self.widths[place], most_labels=MOST_AT_RATE, is_whole=True,
                most=lambda prices, rate=required: planes.allowed_at(prices, rate),  # type: ignore[misc]  # bound here
            )  # fmt: skip
            found, is_complete = self._alone(answer.chains(), found), math.isinf(answer.dropped)
            num_labels += answer.num_labels
            if _value_of(found, "rate") > low:
                width = max(high - _value_of(found, "rate"), 0.0) / high / 2
            elif len(answer.ends_L):  # their batches do not fill as fast as hoped
                width /= 4
            elif not is_complete and place + 1 < len(self.widths):
                place += 1
            else:
                proven = required if is_complete and proven == high else proven
                high, width = required, min(2 * width, WIDEST)
        value = _value_of(found, "rate")
        return Searched(found=found, bound=value if found and proven <= value * (1 + 4 * NARROW) else proven)

    def _for_mixtures(self, graph: Graph, prices: Prices, rate: float) -> list[PricedChain]:
        """Chains near the least price, for the master problem."""
        fill_rate = self.problem.asked_per_s or rate
        least = float(self._ways(graph, prices, fill_rate).closed_P[0])
        best: list[PricedChain] = []
        if math.isinf(least):
            return best
        for share in SHARES:

            def most(_: Prices, price: float = least * (1 + share)) -> float:
                return price

            answer = self._search(graph, prices, fill_rate, width=ALIKE, most_labels=MOST_LABELS, most=most)
            best = answer.chains() or best
            if answer.num_labels > MOST_LABELS:
                break
        return best

    def _mixed_of_all(self, every: list[PricedChain]) -> Searched:
        """The best mixture, where every chain is known."""
        alone = self._alone(every)
        # Chains may be worth having twice: more replicas fill their own batches more slowly.
        slower = [each for each in every if any(stage.wait for stage in each.column.stages)]
        mixture = self._mixed([*every, *slower * (self._most_chains - 1)], self._most_chains)
        found = best_first([*alone, *([] if mixture is None else [mixture.found])], self.goal)
        if not found:
            return Searched()
        bound = _value_of(found, self.goal) if mixture is None else mixture.bound
        return self._with_bound(found, bound)

    def _with_bound(self, found: tuple[Found, ...], bound: float) -> Searched:
        """What is found with its bound, or proven by it."""
        value = _value_of(found, self.goal)
        better = value >= bound if self.goal == "rate" else value <= bound
        is_proven = bool(found) and (better or abs(value - bound) <= SOLVED * abs(bound))
        return Searched(found=found, bound=value if is_proven else bound)

    def _several(self) -> Searched:
        """Several chains, where not all chains were found."""
        assert self._bounded is not None
        bound, used = self._bounded.value, list[PricedChain]()
        chains = self._for_mixtures(self.graph, self._prices, bound)
        chains += self._of_parts()
        found = self._alone(chosen(chains))
        for turn in range(ROUNDS):
            before = _value_of(found, self.goal)
            mixture = self._mixed([*chains, *used], self._most_chains)
            if mixture is not None:
                found, used = best_first([mixture.found, *found], self.goal), [*used, *mixture.used]
            is_proven = self._with_bound(found, bound).bound != bound
            if not found or is_proven or (turn and _value_of(found, self.goal) == before):
                break
            rest = self._on_the_rest(found[0])
            found = self._alone(rest, found)
            used += rest
        alone = self._cheapest(found) if self.goal == "cost" else self._fastest(found, bound, FEW_IN_ALL)
        return self._with_bound(alone.found or found, bound)

    def _mixed(self, chains: Sequence[PricedChain], most_chains: int) -> Mixed | None:
        """What the master problem makes of chains, if that keeps every promise."""
        several = chains if len(chains) <= most_chains * MOST_COLUMNS else chosen(chains)
        return mixed(self.problem, several, self.cluster, most_chains)

    def _of_parts(self) -> list[PricedChain]:
        """Chains on each accelerator type, on each pair, and on all of them.

        On several types, chains are sought that do more than the best chains on each of them do together.
        """
        found: list[PricedChain] = []
        alone: dict[str, float] = {}
        for names in self._parts():
            is_whole = names == self.names
            part = self.graph if is_whole else self._part(names)
            bounded = self._bounded if is_whole else self._highest_rate(names)
            if bounded is None:
                continue
            prices = self._prices_on(names, bounded.prices)
            low = sum(alone.get(name, 0.0) for name in names)
            chains = [] if is_whole else self._for_mixtures(part, prices, bounded.value)
            chains += self._at_rates(part, prices, self.cluster.count_C, bounded.value, low)
            if len(names) == 1 and self.goal == "rate":
                alone[names[0]] = _value_of(self._alone(chains), self.goal)
            found += chains
        return found

    def _prices_on(self, names: tuple[str, ...], prices: Prices) -> Prices:
        """Prices of some types as those of all."""
        if len(prices.work_C) == len(self.names):
            return prices
        places = [self.names.index(name) for name in names]
        work_C, hop_C = np.zeros((2, len(self.names)))
        work_C[places], hop_C[places] = prices.work_C, prices.hop_C
        return prices._replace(work_C=work_C, hop_C=hop_C)

    def _parts(self) -> list[tuple[str, ...]]:
        """Sets of types that chains are sought on."""
        if not self.space.several_stages:
            return [(name,) for name in self.names]
        sizes = (1, 2, len(self.names)) if len(self.names) <= MOST_IN_PAIRS else (1, len(self.names))
        return list(dict.fromkeys(part for size in sizes for part in combinations(self.names, size)))

    def _highest_rate(self, names: tuple[str, ...]) -> Bounded | None:
        """On some types alone."""
        planes = self._planes(names, "rate")
        if planes.least_latency_s() > self.limit_s * (1 + TOLERANCE):
            return None
        # The prices of all types, of which some are left, are a start.
        places = (
            [self.names.index(name) for name in names] if len(planes.names) == len(names) else range(len(self.names))
        )
        there_C = np.array([float(name in names) for name in planes.names])
        start = self._prices._replace(
            work_C=self._prices.work_C[places] * there_C + 1e-9, hop_C=self._prices.hop_C[places] * there_C
        )
        bounded = planes.highest_rate(start=start)
        return bounded if 0 < bounded.value < math.inf else None

    def _at_rates(
        self,
        graph: Graph,
        prices: Prices,
        count_C: FloatArray,
        high: float,
        low: float = 0.0,
        asked: float | None = None,
    ) -> list[PricedChain]:
        """Chains of whole replicas: at the rate that is asked for, or near the highest above `low` that has any."""
        asked = self.problem.asked_per_s if asked is None else asked
        if asked is not None:
            usd = Prices(self.cluster.usd_C * asked, 0 * self.cluster.usd_C)
            answer = self._search(
                graph, usd, asked, width=ALIKE_AT_RATE, most_labels=4 * MOST_LABELS, is_whole=True, count_C=count_C
            )
            return answer.chains()
        found: list[PricedChain] = []
        width = WIDTH
        if low:
            graph = self._affordable(graph, prices, low, self._most_at(prices, low, count_C) * (1 + TOLERANCE))
        for _ in range(SEARCHES):
            if high <= low * (1 + FURTHER):
                break
            middle = max(high * (1 - width), (low + high) / 2)
            answer = self._search(
                graph, prices, middle, width=ALIKE_AT_RATE, most_labels=4 * MOST_LABELS, is_whole=True, count_C=count_C,
                most=lambda prices, rate=middle: self._most_at(prices, rate, count_C),  # type: ignore[misc]  # bound here
            )  # fmt: skip
            found += answer.chains()
            if len(answer.ends_L):
                low = middle
            else:
                high, width = middle, 2 * width
        return found

    def _most_at(self, prices: Prices, rate: float, count_C: FloatArray) -> float:
        """What a chain may cost that does a rate on some devices."""
        devices = float(prices.units.price_C @ count_C) / rate
        return devices + (prices.latency * self.limit_s if prices.latency else 0.0)

    def _on_the_rest(self, best: Found) -> list[PricedChain]:
        """Chains in the place of each one of the best plan, on what the others leave."""
        assert self._bounded is not None
        found: list[PricedChain] = []
        chains = chains_of(best.chain, self.problem.num_blocks)
        for chain, share in zip(chains, best.figures.shares, strict=True):
            left_C = self.cluster.count_C.copy()
            for stage in (stage for other in chains if other is not chain for stage in other):
                left_C[self.names.index(stage.device)] -= stage.replicas
            own_rate = share * best.figures.served_per_s
            if self.problem.asked_per_s is not None:
                found += self._at_rates(self.graph, self._prices, left_C, own_rate, asked=own_rate)
                continue
            highest = min(own_rate + self._bounded.value - best.figures.rate_per_s, self._bounded.value)
            found += self._at_rates(self.graph, self._prices, left_C, highest, own_rate)
        return found


def chosen(chains: Sequence[PricedChain]) -> list[PricedChain]:
    """Of every sequence of types the cheapest chains in turns, so that all sequences are tried."""
    groups: dict[tuple[int, ...], list[PricedChain]] = {}
    for each in dict.fromkeys(chains):
        groups.setdefault(tuple(stage.device for stage in each.column.stages), []).append(each)
    ranked = [
        (turn, each.price, place, each)
        for place, group in enumerate(groups.values())
        for turn, each in enumerate(sorted(group, key=lambda each: each.price))
    ]
    return [each for *_, each in sorted(ranked, key=lambda each: each[:3])[:MOST_COLUMNS]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixed:
    """What the master problem made of chains."""

    found: Found
    bound: float
    """No mixture of these chains is better."""
    used: tuple[PricedChain, ...] = ()


def mixed(problem: PlanProblem, chains: Sequence[PricedChain], cluster: Cluster, most_chains: int) -> Mixed | None:
    """The best mixture of chains that HiGHS finds in time, if it keeps every promise."""
    if not chains:
        return None
    demand = Demand(limit_s=problem.slo.limit_s, rate_per_s=problem.asked_per_s, most_chains=most_chains)
    mixture = solve_master([each.column for each in chains], [demand], cluster, seconds=SECONDS)
    if mixture is None or not mixture.replicas:
        return None
    stages = tuple(
        stage
        for q, replicas in mixture.replicas.items()
        for stage in chains[q].replicated(_needed(problem, chains[q].column, replicas))
    )
    shares = tuple(mixture.rates[q] for q in mixture.replicas) if problem.asked_per_s is not None else ()
    found = kept(problem, stages, tuple(share / sum(shares) for share in shares))
    used = tuple(chains[q] for q in mixture.replicas)
    return None if found is None else Mixed(found=found, bound=mixture.bound, used=used)


def _needed(problem: PlanProblem, column: Column, replicas: Sequence[int]) -> list[int]:
    """The replicas without those that do not raise the rate, where that is sought."""
    if problem.asked_per_s is not None:
        return list(replicas)
    rate = highest_rate(column, replicas)
    return [max(1, math.ceil(rate * each.seconds * (1 - TOLERANCE))) for each in column.stages]


def num_splits(problem: PlanProblem, space: Space) -> int:
    """At most so many, over all devices and batch sizes."""
    num_sizes = sum(len(problem.latency[name].batches) for name in device_names(problem))
    if not space.several_stages and not space.splits_per_stage:
        return num_sizes
    pairs = problem.num_blocks * (problem.num_blocks + 1) // 2
    if space.ramps in ("choose", "split-ends"):
        # A split leads from (first, entry) to (end, last): both ranks are of ramps before their boundary.
        after_Q = np.array([0, *(ramp + 1 for ramp in problem.ramps)])
        num_ranks_K = np.searchsorted(after_Q, np.arange(problem.num_blocks + 1), side="right")
        pairs = 0
        for first in range(problem.num_blocks):
            here, later_K = int(num_ranks_K[first]), num_ranks_K[first + 1 :]
            pairs += int((here * later_K).sum()) - len(later_K) * here * (here - 1) // 2
    return pairs * num_sizes


def _why_none(problem: PlanProblem, space: Space) -> NoPlan:
    """Which promise cannot be kept, and what would do."""
    if isinstance(problem.objective, MinimizeLatency):
        relaxed: tuple[Relaxed, ...] = (("ramps", _without_ramp_budget), ("budget", without_budget))
        return why_none(
            problem,
            space.strategy,
            possible=lambda other: _any_plan(other, space, "worst"),
            nearest_slo_s=lambda found: found.figures.latency_s / (1 - problem.slo.slack),
            highest_rate_per_s=lambda other: _highest_rate_per_s(other, space),
            relaxed=relaxed,
        )
    return why_none(
        problem,
        space.strategy,
        possible=lambda other: _any_plan(other, space),
        nearest_slo_s=lambda patient: _nearest_slo_s(problem, space, patient),
        highest_rate_per_s=lambda other: rate_of(_any_plan(replace(other, objective=MaximizeRate()), space)),
    )


def _any_plan(problem: PlanProblem, space: Space, goal: Goal | None = None) -> Found | None:
    found = _best_of(problem, space, goal).found
    return found[0] if found else None


def _without_ramp_budget(problem: PlanProblem) -> PlanProblem:
    assert isinstance(problem.objective, MinimizeLatency)
    return replace(problem, objective=replace(problem.objective, ramp_budget=None))


def _nearest_slo_s(problem: PlanProblem, space: Space, patient: Found) -> float:
    """The least SLO latency for which a plan is found, and at most a thousandth above; `patient` is one at any."""

    def needed_s(latency_s: float, found: Found) -> float:
        return min(latency_s, found.figures.latency_s / (1 - problem.slo.slack))

    below, above = problem.slo.latency_s, needed_s(ANY_LATENCY_S, patient)
    while above > below * (1 + SLO_RESOLUTION):
        middle = (below * above) ** 0.5
        found = _any_plan(replace(problem, slo=replace(problem.slo, latency_s=middle)), space)
        below, above = (middle, above) if found is None else (below, needed_s(middle, found))
    return above


def _highest_rate_per_s(problem: PlanProblem, space: Space) -> float | None:
    """The highest rate that has a plan; where the ramp budget lowers it, one that has.

    It may be some per cent below the highest. A plan whose inputs stay does the most without ramps, and then as much as
    if they stopped.
    """
    without = replace(space, ramps="none")
    by_rate = replace(problem, objective=MaximizeRate())
    fastest = _any_plan(by_rate, space if "stop" in space.after_answer else without)
    budget = problem.ramp_budget
    if fastest is None or budget is None or fastest.figures.ramp_overhead <= budget * (1 + TOLERANCE):
        return rate_of(fastest)
    high = fastest.figures.rate_per_s
    low = rate_of(_any_plan(by_rate, without) if space.ramps in ("choose", "split-ends") else None)
    if low is None and _any_plan(problem.with_rate(high * LEAST_RATE), space) is None:
        return None  # not even at leisure do ramps keep their budget
    while low is None or high > low * (1 + RATE_RESOLUTION):
        tried = (low * high) ** 0.5 if low is not None else high / 2
        if _any_plan(problem.with_rate(tried), space) is not None:
            low = tried
        else:
            high = tried
        if low is None and high < fastest.figures.rate_per_s * LEAST_RATE:
            return None
    return low
