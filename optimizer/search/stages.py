"""Plans of one chain on a graph: their relaxation, in which replicas may be fractional, and the limits of a search."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from optimizer.cost.evaluate import evaluate
from optimizer.plans.plan import Stage
from optimizer.problems.problem import PlanProblem
from optimizer.search.decision import FeasiblePlan, if_feasible
from optimizer.search.label_search import CLOSED, ChainLimits, completion_bounds, limits_of_prices
from optimizer.search.moves import Graph, MoveArrays
from optimizer.search.relaxation import ITERATIONS, CuttingPlanes
from optimizer.search.space import Space
from optimizer.search.step import IntArray
from optimizer.search.walks import NO_WALK, Prices, Walk

ROUNDING = 1e-9


def stage_planes(graph: Graph, space: Space, *, iterations: int = ITERATIONS) -> CuttingPlanes:
    """Returns the cutting-plane method for the plans of a graph with fractions of replicas."""

    def cheapest(prices: Prices, fill_rate: float) -> tuple[float, Walk]:
        limits = limits_of_prices(prices.work_C + prices.hop_C, prices.latency, fill_rate, space)
        _, least_PS, first_PS = completion_bounds(graph.moves, limits, limits.price_C, limits.price_latency)
        if math.isinf(least_PS[0, CLOSED]):
            return math.inf, NO_WALK
        return float(least_PS[0, CLOSED]), _cheapest_walk(graph.moves, first_PS)

    problem, names = graph.problem, graph.device_names
    return CuttingPlanes(problem=problem, names=names, space=space, oracle=cheapest, iterations=iterations)


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
    planes: CuttingPlanes, prices: Prices, space: Space, rate_per_s: float, usd_per_hour: float, *,
    wait_share: float = 1.0, limit_s: float | None = None,
) -> ChainLimits:  # fmt: skip
    """Returns the limits of plans that serve a rate within a cost, priced by the duals of the planes.

    `wait_share` is that of `ChainLimits`. `limit_s` defaults to the problem's limit.
    """
    problem, usd_C = planes.problem, planes.usd_C
    affordable_C = [usd_per_hour * (1 + ROUNDING) // usd if usd else math.inf for usd in usd_C]
    count_C = np.minimum(planes.count_C, affordable_C)
    limit_s = problem.slo.limit_s if limit_s is None else limit_s
    used_C, latency, budget = prices.work_C + prices.hop_C, prices.latency, usd_per_hour
    if problem.required_per_s is not None:
        used_C = np.maximum(used_C / rate_per_s, usd_C)
        idle_C = used_C - usd_C
    else:
        latency, budget = latency * rate_per_s, prices.usd * usd_per_hour
        idle_C = np.maximum(used_C - prices.usd * usd_C, 0.0)
    return limits_of_prices(used_C * rate_per_s, latency, rate_per_s, space)._replace(
        max_price=float(budget + idle_C @ count_C + latency * limit_s) * (1 + ROUNDING),
        limit_s=float(limit_s),
        wait_share=float(wait_share),
        is_whole=True,
        count_C=count_C,
        idle_C=idle_C,
        usd_C=usd_C,
        budget=float(usd_per_hour),
    )


def plan_at_rate(problem: PlanProblem, stages: Sequence[Stage], rate_per_s: float) -> FeasiblePlan | None:
    """Returns the feasible plan with the replicas that a rate needs, or None."""
    figures = evaluate(problem, stages).stages
    limits = [
        min(each.rate_per_s, each.hop_rate_per_s) / stage.replicas for stage, each in zip(stages, figures, strict=True)
    ]
    counts = [max(1, math.ceil(rate_per_s / each * (1 - ROUNDING))) for each in limits]
    return if_feasible(problem, tuple(replace(stage, replicas=n) for stage, n in zip(stages, counts, strict=True)))
