"""Plans of one chain on a graph: their relaxation, in which replicas may be fractional, and the limits of a search."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from optimizer.cost.evaluate import evaluate
from optimizer.plans.plan import Stage
from optimizer.problems.problem import PlanProblem
from optimizer.search.compiled import compiled
from optimizer.search.decision import FeasiblePlan, if_feasible
from optimizer.search.label_search import CLOSED, Bounds, ChainLimits, completion_bounds, limits_of_prices
from optimizer.search.moves import Graph, MoveArrays
from optimizer.search.relaxation import CuttingPlanes
from optimizer.search.space import Space
from optimizer.search.step import FloatArray
from optimizer.search.walks import Oracle, Prices, Walk, no_walk

ROUNDING = 1e-9


@compiled
def _cheapest_walk(moves: MoveArrays, limits: ChainLimits, bounds: Bounds) -> Walk:
    """Returns the resource use of the cheapest path. Its devices' work includes hops."""
    price_MFE, closed_P, open_PC = bounds
    work_C, latency_s, fill, node, device = np.zeros(limits.price_C.size), 0.0, 0.0, 0, CLOSED
    while node < closed_P.size - 1:
        least, best, best_ends, is_first = np.inf, 0, 0, int(device == CLOSED)
        for move in range(moves.first_move_P[node], moves.first_move_P[node + 1]):
            if not is_first and moves.device_M[move] != device:
                continue
            for ends in range(2):
                after = closed_P[moves.to_M[move]] if ends else open_PC[moves.to_M[move], moves.device_M[move]]
                price = price_MFE[move, is_first, ends] + after
                if price < least:
                    least, best, best_ends = price, move, ends
        device, node = moves.device_M[best], moves.to_M[best]
        work, waits_alone = moves.work_M[best], not is_first and not moves.pooled_M[best]
        latency_s += moves.seconds_M[best] * (2 if waits_alone else 1) + moves.cross_M[best]
        fill += 0.0 if waits_alone else moves.wait_M[best]
        if best_ends:
            latency_s += moves.hop_M[best]
            work = max(work, moves.hop_work_M[best]) if is_first else work
        work_C[device] += work
        device = CLOSED if best_ends else device
    return Walk(work_C, np.zeros(work_C.size), latency_s, fill)


def stage_oracle(graph: Graph, space: Space) -> Oracle:
    """Returns a pricing oracle: it finds the cheapest plan of a graph with fractions of replicas, at given prices."""

    def cheapest(prices: Prices, fill_rate: float) -> tuple[float, Walk]:
        limits = limits_of_prices(prices.work_C + prices.hop_C, prices.latency, fill_rate, space)
        bounds = completion_bounds(graph.moves, limits, limits.price_C, limits.price_latency)
        least = float(bounds.closed_P[0])
        if math.isinf(least):
            return math.inf, no_walk(len(limits.price_C))
        return least, _cheapest_walk(graph.moves, limits, bounds)

    return cheapest


def limits_of_plans(
    planes: CuttingPlanes, prices: Prices, space: Space, rate_per_s: float, usd_per_hour: float, *,
    wait_share: float = 1.0, limit_s: float | None = None, factors: Sequence[float] = (),
) -> ChainLimits:  # fmt: skip
    """Returns the limits of plans that serve a rate within a cost, priced by the duals of the planes.

    `wait_share` is that of `ChainLimits`. `limit_s` defaults to the problem's limit. The price of each device and of
    latency, multiplied by each of the `factors`, gives the other prices by which labels are pruned.
    """
    problem, usd_C = planes.problem, planes.usd_C
    affordable_C = [usd_per_hour * (1 + ROUNDING) // usd if usd else math.inf for usd in usd_C]
    count_C = np.minimum(planes.count_C, affordable_C)
    limit_s = problem.slo.limit_s if limit_s is None else limit_s

    def priced(work_C: FloatArray, latency: float) -> tuple[FloatArray, FloatArray, float, float]:
        """Returns the prices of used and of idle devices and of latency, and the price of all that a plan may use."""
        if problem.required_per_s is not None:
            used_C, budget = np.maximum(work_C / rate_per_s, usd_C), usd_per_hour
            idle_C = used_C - usd_C
        else:
            used_C, latency, budget = work_C, latency * rate_per_s, prices.usd * usd_per_hour
            idle_C = np.maximum(work_C - prices.usd * usd_C, 0.0)
        most = budget + idle_C @ count_C + latency * limit_s
        return used_C, idle_C, float(latency), float(most) * (1 + ROUNDING)

    work_C = prices.work_C + prices.hop_C
    used_C, idle_C, latency, max_price = priced(work_C, prices.latency)
    scales = 1 + np.kron(np.array(factors)[:, None] - 1, np.eye(len(count_C) + 1))
    others = [priced(work_C * scale[:-1], prices.latency * scale[-1]) for scale in scales]
    return limits_of_prices(used_C * rate_per_s, latency, rate_per_s, space)._replace(
        max_price=max_price,
        limit_s=float(limit_s),
        wait_share=float(wait_share),
        is_whole=True,
        count_C=count_C,
        idle_C=idle_C,
        usd_C=usd_C,
        budget=float(usd_per_hour),
        other_price_VC=np.array([each[0] * rate_per_s for each in others]).reshape(-1, len(count_C)),
        other_latency_V=np.array([each[2] for each in others]),
        other_max_V=np.array([each[3] for each in others]),
    )


def plan_at_rate(problem: PlanProblem, stages: Sequence[Stage], rate_per_s: float) -> FeasiblePlan | None:
    """Returns the feasible plan with the replicas that a rate needs, or None.

    If the rate is maximized, it has more replicas if the remaining devices allow it.
    """
    needed = [
        stage.replicas / min(each.rate_per_s, each.hop_rate_per_s)
        for stage, each in zip(stages, evaluate(problem, stages).stages, strict=True)
    ]

    def with_replicas_for(rate_per_s: float) -> tuple[Stage, ...]:
        counts = [max(1, math.ceil(rate_per_s * each * (1 - ROUNDING))) for each in needed]
        return tuple(replace(stage, replicas=count) for stage, count in zip(stages, counts, strict=True))

    low, high = rate_per_s, 2 * rate_per_s
    if problem.required_per_s is None:
        for _ in range(40):  # bisects for the highest rate that the devices and the budget allow
            middle = (low + high) / 2
            low, high = (middle, high) if _fits(problem, with_replicas_for(middle)) else (low, middle)
        faster = if_feasible(problem, with_replicas_for(low))
        if faster is not None:
            return faster
    return if_feasible(problem, with_replicas_for(rate_per_s))


def _fits(problem: PlanProblem, chain: Sequence[Stage]) -> bool:
    usd = sum(stage.replicas * problem.devices[stage.device].usd_per_hour for stage in chain)
    return usd <= problem.max_usd_per_hour and all(
        sum(stage.replicas for stage in chain if stage.device == name) <= supply.count
        for name, supply in problem.devices.items()
    )
