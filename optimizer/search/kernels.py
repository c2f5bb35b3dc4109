"""Compiles all kernels of the planner, so that the first plan is not delayed: `python -m optimizer.search.kernels`."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from optimizer.problems.problem import Link, MaximizeRate, MinimizeCost, MinimizeLatency, PlanProblem, Slo, Supply
from optimizer.search.beam import search_at_scale
from optimizer.search.decision import Decision
from optimizer.search.planner import solve
from profiles.table import LatencyTable


def small_problem() -> PlanProblem:
    """Returns a problem of six blocks on two device types. The beam search finds no plan for much smaller problems."""
    seconds = np.array([[0.001, 0.0012, 0.0015, 0.002]]).repeat(6, axis=0)
    table = LatencyTable(batches=(1, 2, 4, 8), block_s_NB=seconds, ramp_s_EB=seconds[:5] / 20)
    slower = LatencyTable(batches=table.batches, block_s_NB=seconds * 1.7, ramp_s_EB=seconds[:5] / 12)
    return PlanProblem(
        num_blocks=6,
        ramps=(0, 1, 2, 3, 4),
        survival_N=(1.0, 0.8, 0.6, 0.5, 0.4, 0.35),
        latency={"A": table, "B": slower},
        devices={"A": Supply(count=5, usd_per_hour=3.0), "B": Supply(count=7, usd_per_hour=1.0)},
        link=Link(bandwidth_bytes_per_s=1.25e9, delay_s=1e-4),
        bytes_per_sample_N=(196608.0,) * 6,
        slo=Slo(latency_s=0.03, slack=0.2),
        objective=MaximizeRate(),
    )


PROBLEMS = [replace(small_problem(), objective=each) for each in (MaximizeRate(), MinimizeCost(rate_per_s=4000))]


def plan_exactly() -> list[Decision]:
    """Runs the exact planner for one chain, and the planner of the least mean answer time."""
    quickest = replace(small_problem(), objective=MinimizeLatency(rate_per_s=1000, ramp_budget=0.1))
    return [solve(problem) for problem in (*PROBLEMS, quickest)]


def plan_at_scale() -> list[Decision]:
    """Runs column generation and the beam search, which share the relaxation and the label search."""
    chains = [solve(replace(problem, most_chains=2)) for problem in PROBLEMS]
    return [*chains, *(solve(problem, searches=(search_at_scale,)) for problem in PROBLEMS)]


PARTS: tuple[Callable[[], list[Decision]], ...] = (plan_exactly, plan_at_scale)
"""Functions that use different kernels and take about equally long."""


def main() -> None:
    """Runs each part in a process of its own. Kernels that are in the cache are only loaded."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(len(PARTS)) as pool:
        for result in [pool.apply_async(part) for part in PARTS]:
            result.get()


if __name__ == "__main__":
    main()
