"""Compiles all kernels of the planner, so that the first plan is not delayed: `python -m optimizer.search.kernels`."""

from __future__ import annotations

from dataclasses import replace
from multiprocessing import get_context

import numpy as np

from optimizer.problems.problem import Link, MaximizeRate, MinimizeCost, MinimizeLatency, PlanProblem, Slo, Supply
from optimizer.search.planner import solve
from optimizer.search.space import SPACES
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


RATE, COST = small_problem(), replace(small_problem(), objective=MinimizeCost(rate_per_s=4000))
QUICKEST = replace(small_problem(), objective=MinimizeLatency(queues=False, rate_per_s=1000, ramp_budget=0.1))
ALL_AT_SCALE = replace(SPACES["best"], max_labels=0)
AT_SCALE = [(each, ALL_AT_SCALE) for each in (RATE, COST)]
AT_SCALE += [(replace(each, most_chains=2), SPACES["best"]) for each in (RATE, COST)]
EXACT = [(each, SPACES["best"]) for each in (RATE, COST, QUICKEST)]
"""Arguments of `solve` that use all kernels. The two lists use different ones and take about equally long."""


def main() -> None:
    """Plans the two lists in a process each. Kernels that are in the cache are only loaded."""
    with get_context("spawn").Pool(2) as pool:
        pool.starmap(solve, [*AT_SCALE, *EXACT], chunksize=len(AT_SCALE))


if __name__ == "__main__":
    main()
