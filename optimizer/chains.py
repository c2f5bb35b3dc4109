"""Plans of several chains side by side: chains from the label search, devices from the master problem.

The dual prices of the relaxation (`optimizer.scale.bound`) steer the label search; the master problem chooses among the
chains that it finds, and once more among those near the chosen ones. Where the search left none out and the program was
solved to its end, the plan is proven best over all chains; else its gap is that to the relaxation's bound.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np

from earlyexit.errors import PlanError
from earlyexit.network.split import Split
from optimizer.columns import (
    CLOSED,
    DEVICE,
    FILL,
    LATENCY,
    MOST_STAGES,
    MOVE,
    PARENT,
    STAGES,
    Labels,
    Reach,
    least_prices,
    search,
)
from optimizer.decision import Decision, Found, Planned, gap_between, kept, rate_of, why_none
from optimizer.evaluate import TOLERANCE, merit, sought
from optimizer.master import Cluster, Column, Demand, StageWork, highest_rate, solve_master
from optimizer.moves import RULES, Graph, build_graph, ends_of
from optimizer.plan import Stage, chains_of
from optimizer.problem import ANY_LATENCY_S, MaximizeRate, MinimizeCost, PlanProblem, device_names
from optimizer.scale.bound import Bounded, CuttingPlanes
from optimizer.scale.graph import nodes_around, window_of
from optimizer.scale.tables import tables_of
from optimizer.scale.walks import Allowed, Walks
from optimizer.space import Space

SHARES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0, math.inf)
"""How much above the least price chains may be, as long as all labels find room."""
MOST_LABELS = 20_000
MOST_COLUMNS = 200
"""Of one master problem."""
SLOWER = (1.0, 0.5, 0.25, 0.1)
"""Shares of the rate at which chains are sought whose batches still fill in time."""
NEAR = 2
"""Blocks between the bounds of a chosen chain's stages and of those that are tried in its place."""
MOST_SPLITS = 200_000
"""Of a graph that is searched whole; else only the ramps of the relaxation's plan begin splits."""
RANKS_NEAR = 2
SECONDS = 2.0
"""Of one master problem."""
SLO_RESOLUTION = 1e-3
SOLVED = 2e-4
"""Of values that are one: HiGHS is asked for half of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A chain with one replica per stage, and what the master problem sees of it."""

    stages: tuple[Stage, ...]
    column: Column
    price: float


def candidates_of(graph: Graph, reach: Reach) -> tuple[bool, list[Candidate]]:
    """Chains of one graph by their price, and whether none was left out."""
    least = float(least_prices(graph.moves, reach, len(graph.device_names))[0][0])
    if math.isinf(least):
        return True, []
    best: list[Candidate] = []
    for share in SHARES:
        bounded = reach._replace(most_price=least * (1 + share) if math.isfinite(share) else math.inf)
        finished, labels, ends_L = search(graph.moves, bounded, MOST_LABELS)
        if not finished:
            return False, best
        best = [_candidate(graph, reach, labels, int(label)) for label in ends_L]
    return True, best


def _candidate(graph: Graph, reach: Reach, labels: Labels, label: int) -> Candidate:
    """Read a label back to its beginning."""
    whole_LI, real_LF = labels
    count = int(whole_LI[label, STAGES])
    works, waits = real_LF[label, 5 : 5 + count], real_LF[label, 5 + MOST_STAGES : 5 + MOST_STAGES + count]
    latency_s, fill = float(real_LF[label, LATENCY]), float(real_LF[label, FILL])
    stages: list[Stage] = []
    splits: list[Split] = []
    while whole_LI[label, PARENT] >= 0:
        parent, move = int(whole_LI[label, PARENT]), int(whole_LI[label, MOVE])
        if whole_LI[label, DEVICE] == CLOSED and splits:
            stages.append(_stage(graph, device, splits))
            splits = []
        device = int(graph.moves.device_M[move])
        splits.append(graph.split_of(_node_of(graph, move), move))
        label = parent
    stages.append(_stage(graph, device, splits))
    devices = [graph.device_names.index(stage.device) for stage in reversed(stages)]
    of_stages = tuple(
        StageWork(device=device, seconds=float(work), wait=float(wait))
        for device, work, wait in zip(devices, works, waits, strict=True)
    )
    price = sum(float(reach.price_C[each.device]) * each.seconds for each in of_stages)
    price += reach.price_latency * (latency_s + fill / reach.most_rate)
    column = Column(stages=of_stages, latency_s=latency_s, fill=fill)
    return Candidate(stages=tuple(reversed(stages)), column=column, price=price)


def _stage(graph: Graph, device: int, splits: Sequence[Split]) -> Stage:
    return Stage(device=graph.device_names[device], replicas=1, splits=tuple(reversed(splits)))


def _node_of(graph: Graph, move: int) -> int:
    """The node that a split leaves."""
    return int(np.searchsorted(graph.moves.first_move_P, move, side="right")) - 1


def chosen(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Of every sequence of types the cheapest chains in turns, so that all sequences are tried."""
    groups: dict[tuple[int, ...], list[Candidate]] = {}
    for each in candidates:
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

    found: Found
    bound: float


def mixed(problem: PlanProblem, candidates: Sequence[Candidate], names: Sequence[str], most_chains: int) -> Mixed | None:
    """The best mixture of candidates that keeps every promise, and what no mixture of them is better than."""
    if not candidates:
        return None
    budget = problem.budget_usd_per_hour
    cluster = Cluster(
        count_C=np.array([float(problem.devices[name].count) for name in names]),
        usd_C=np.array([problem.devices[name].usd_per_hour for name in names]),
        budget=math.inf if budget is None else budget,
    )
    demand = Demand(limit_s=problem.slo.limit_s, rate_per_s=problem.asked_per_s, most_chains=most_chains)
    mixture = solve_master([each.column for each in candidates], [demand], cluster, seconds=SECONDS)
    if mixture is None:
        return None
    stages = tuple(
        replace(stage, replicas=count)
        for q, replicas in mixture.replicas.items()
        for stage, count in zip(candidates[q].stages, _needed(problem, candidates[q].column, replicas), strict=True)
    )
    found = kept(problem, stages)
    return None if found is None else Mixed(found=found, bound=mixture.bound)


def _needed(problem: PlanProblem, column: Column, replicas: Sequence[int]) -> list[int]:
    """The replicas without those that do not raise the rate, where that is sought."""
    if problem.asked_per_s is not None:
        return list(replicas)
    rate = highest_rate(column, replicas)
    return [max(1, math.ceil(rate * each.seconds * (1 - TOLERANCE))) for each in column.stages]


def solve_chains(problem: PlanProblem, space: Space) -> Decision:
    """The best plan that is found, with its gap, or proof that there is none.

    Raises PlanError where no plan was found although there may be one.
    """
    search = ChainSearch(problem=problem, space=space)
    bound = search.bound()
    best, complete = (None, True) if bound is None else search.best()
    if best is None and complete:
        return why_none(
            problem,
            space.strategy,
            possible=lambda other: _any_plan(other, space),
            nearest_slo_s=lambda patient: _nearest_slo_s(problem, space, patient),
            highest_rate_per_s=lambda other: rate_of(_any_plan(replace(other, objective=MaximizeRate()), space)),
        )
    assert bound is not None, "plans were looked for"
    if best is None:
        kind = "cost no less than" if isinstance(problem.objective, MinimizeCost) else "do at most"
        raise PlanError(f"no plan was found, though there may be one: plans {kind} {bound:.6g}")
    value = sought(problem, best.found.figures)
    tighter = min if isinstance(problem.objective, MaximizeRate) else max
    bound = tighter(bound, best.bound) if complete else bound
    is_proven = abs(value - bound) <= SOLVED * abs(bound)
    return Planned(
        strategy=space.strategy,
        stages=best.found.chain,
        figures=best.found.figures,
        bound=value if is_proven else bound,
        gap=0.0 if is_proven else gap_between(value, bound),
        candidates=tuple(dict.fromkeys(each for each in search.others if each.chain != best.found.chain)),
    )


@dataclass(slots=True, kw_only=True)
class ChainSearch:
    """One question: its bound, then its best plan."""

    problem: PlanProblem
    space: Space
    bounded: Bounded | None = None
    others: list[Found] = field(default_factory=list)
    """Other plans that were met, best first."""
    _ramps: tuple[int, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Of accelerator types that the budget pays for."""
        budget = self.problem.budget_usd_per_hour
        limit = math.inf if budget is None else budget * (1 + TOLERANCE)
        return tuple(
            name for name in device_names(self.problem) if self.problem.devices[name].usd_per_hour <= limit
        )

    @property
    def batches(self) -> list[int | None]:
        """One by one where all splits of a chain share a batch size."""
        if not self.space.one_batch:
            return [None]
        return sorted({batch for name in self.names for batch in self.problem.latency[name].batches})

    def bound(self) -> float | None:
        """What no plan is better than; None: proven to have no plan."""
        bounds = [found for batch in self.batches if (found := self._bound_of(batch)) is not None] if self.names else []
        if not bounds:
            return None
        best = (min if self.problem.asked_per_s is not None else max)(bounds, key=lambda each: each[0].value)
        self.bounded, self._ramps = best
        return self.bounded.value

    def _bound_of(self, batch: int | None) -> tuple[Bounded, tuple[int, ...]] | None:
        problem, rate = self.problem, self.problem.asked_per_s
        allowed = Allowed(RULES[self.space.ramps], self.space.splits_per_stage, self.space.several_stages)
        walks = Walks.of(tables_of(problem, self.names, batch), allowed)
        planes = CuttingPlanes(problem=problem, names=self.names, oracle=walks.cheapest)
        if planes.least_latency_s() > problem.slo.limit_s * (1 + TOLERANCE):
            return None
        bound = planes.highest_rate(enough=math.inf if rate is None else rate)
        if bound.value <= 0 or (rate is not None and bound.value < rate * (1 - TOLERANCE)):
            return None
        if rate is not None:
            bound = planes.least_cost(rate, bound.prices)
            if bound.value > self._most_usd * (1 + TOLERANCE):
                return None
        walks.cheapest(bound.prices, rate or bound.value)
        return bound, walks.last_ramps(problem)

    @property
    def _most_usd(self) -> float:
        there = sum(supply.count * supply.usd_per_hour for supply in self.problem.devices.values())
        budget = self.problem.budget_usd_per_hour
        return there if budget is None else min(there, budget)

    def best(self) -> tuple[Mixed | None, bool]:
        """The best plan that was found, and whether no chain was left out."""
        assert self.bounded is not None, "asked for its bound first"
        candidates: list[Candidate] = []
        graphs, complete = self._graphs()
        for graph in graphs:
            finished, found = self._candidates(graph, 1.0)
            candidates += found
            complete = complete and finished
            if not finished:
                candidates += [each for part in _parts(graph) for each in self._candidates(part, 1.0)[1]]
        best = self._mixed(candidates, None)
        if complete:
            return best, True
        for share in SLOWER[1:]:
            candidates += [each for graph in graphs for each in self._candidates(graph, share)[1]]
        best = self._mixed(candidates, best)
        while best is not None and not self._is_proven(best):
            near = [
                each
                for graph in graphs
                for chain in chains_of(best.found.chain, self.problem.num_blocks)
                for each in self._candidates(window_of(graph, chain, NEAR), 1.0)[1]
            ]
            before, best = best, self._mixed([*near, *candidates], best)
            if best is before:
                break
        return best, False

    def _graphs(self) -> tuple[list[Graph], bool]:
        """What chains are paths of: one graph per batch size that all splits share; and whether all splits are there."""
        problem, space = self.problem, self.space
        whole = True
        nodes = None if space.splits_per_stage or space.several_stages else ends_of(problem)
        if nodes is None and num_splits(problem, space) > MOST_SPLITS:
            nodes, whole = nodes_around(problem, self._ramps, RANKS_NEAR), False
        paid = replace(problem, devices={name: problem.devices[name] for name in self.names})
        graph = build_graph(paid, space.ramps, every_batch=space.one_batch, nodes=nodes)
        if space.one_batch:
            return [graph.with_batch(batch) for batch in sorted(set(graph.moves.batch_M.tolist()))], whole
        return [graph], whole

    def _candidates(self, graph: Graph, share: float) -> tuple[bool, list[Candidate]]:
        assert self.bounded is not None, "asked for its bound first"
        prices = self.bounded.prices
        reach = Reach(
            price_C=prices.work_C + prices.hop_C,
            price_latency=float(prices.latency),
            most_price=math.inf,
            limit_s=float(self.problem.slo.limit_s),
            most_rate=float(share * (self.problem.asked_per_s or self.bounded.value)),
            may_split=self.space.splits_per_stage,
            may_hop=self.space.several_stages,
        )
        return candidates_of(graph, reach)

    def _mixed(self, candidates: Sequence[Candidate], best: Mixed | None) -> Mixed | None:
        """The better of the best so far and what the master problem makes of candidates."""
        most_chains = min(self.problem.most_chains, self.space.most_chains)
        found = mixed(self.problem, chosen(candidates), self.names, most_chains)
        if found is None:
            return best
        self.others.append(found.found)
        if best is None or merit(self.problem, found.found.figures) > merit(self.problem, best.found.figures):
            return found
        return best

    def _is_proven(self, best: Mixed) -> bool:
        assert self.bounded is not None, "asked for its bound first"
        value = sought(self.problem, best.found.figures)
        return abs(value - self.bounded.value) <= SOLVED * abs(self.bounded.value)


def _parts(graph: Graph) -> Iterator[Graph]:
    """The splits on each accelerator type, and on each pair of them."""
    devices = range(len(graph.device_names))
    for size in (1, 2):
        if size < len(graph.device_names):
            for part in combinations(devices, size):
                yield graph.only(np.isin(graph.moves.device_M, part))


def num_splits(problem: PlanProblem, space: Space) -> int:
    """At most so many, over all devices and batch sizes."""
    num_sizes = sum(len(problem.latency[name].batches) for name in device_names(problem))
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


def _any_plan(problem: PlanProblem, space: Space) -> Found | None:
    search = ChainSearch(problem=problem, space=space)
    if search.bound() is None:
        return None
    best, _ = search.best()
    return None if best is None else best.found
