"""Compiles every kernel of the planner, so that no first plan waits for it: `python -m optimizer.kernels`."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from optimizer.decision import Decision
from optimizer.planner import solve
from optimizer.problem import Link, MaximizeRate, MinimizeCost, MinimizeLatency, PlanProblem, Slo, Supply
from optimizer.scale.solve import bound_at_scale, solve_by_beam
from optimizer.space import SPACES
from profiles.table import LatencyTable


def small_problem() -> PlanProblem:
    """Six blocks on two types of devices; the beam search finds nothing in much smaller ones."""
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


RATES_AND_COSTS = [replace(small_problem(), objective=each) for each in (MaximizeRate(), MinimizeCost(rate_per_s=4000))]


def exactly() -> list[Decision]:
    """Plans of one chain, found exactly, then of several; the search for one takes longest."""
    return [solve(replace(asked, most_chains=chains)) for chains in (1, 2) for asked in RATES_AND_COSTS]


def at_scale() -> list[Decision]:
    """Bounds, a plan for the least mean answer time, then beams, which find the kernels that `exactly` has compiled."""
    for asked in RATES_AND_COSTS:
        bound_at_scale(asked, SPACES["best"])
    quickest = solve(replace(small_problem(), objective=MinimizeLatency(rate_per_s=1000, ramp_budget=0.1)))
    return [quickest, *(solve_by_beam(asked, SPACES["best"]) for asked in RATES_AND_COSTS)]


PARTS: tuple[Callable[[], list[Decision]], ...] = (exactly, at_scale)
"""Each plans a small problem in ways that have kernels of their own; they take about as long."""


def main() -> None:
    """Every part in a process of its own, on as many cores; what is compiled already is only read."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(len(PARTS)) as pool:
        for done in [pool.apply_async(part) for part in PARTS]:
            done.get()


if __name__ == "__main__":
    main()
