"""A model of two blocks that take 1 ms each for any batch; half of the inputs leave after the first."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from experiments.studies.sides import Workload, workload
from optimizer.problem import Link, MaximizeRate, PlanProblem, Slo, Supply
from profiles.table import LatencyTable
from simulator.decisions import nested

SURVIVAL_N = (1.0, 0.5)


def problem(
    *, batches: tuple[int, ...] = (1, 2), count: int = 3, slower: Mapping[str, tuple[float, float]] | None = None
) -> PlanProblem:
    """On V100 at 2 USD/h; `slower`: further types, so many times slower, and their USD/h."""
    types = {"V100": (1.0, 2.0), **(slower or {})}
    width = len(batches)
    return PlanProblem(
        num_blocks=2,
        ramps=(0,),
        survival_N=SURVIVAL_N,
        latency={
            name: LatencyTable(
                batches=batches,
                block_s_NB=np.full((2, width), 0.001 * times),
                ramp_s_EB=np.zeros((1, width)),
            )
            for name, (times, _) in types.items()
        },
        devices={name: Supply(count=count, usd_per_hour=usd) for name, (_, usd) in types.items()},
        link=Link(bandwidth_bytes_per_s=1e9),
        bytes_per_sample_N=(0.0, 0.0),
        slo=Slo(latency_s=0.1, slack=0.2),
        objective=MaximizeRate(),
    )


def inputs() -> Workload:
    """A thousand, half of which leave, in random order."""
    rng = np.random.default_rng(0)
    decisions = nested(SURVIVAL_N, (0,), rng, num_rows=1000)
    return workload("made up", decisions, rng.permutation(1000), problem())
