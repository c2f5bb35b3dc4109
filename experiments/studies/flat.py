"""The same accelerators, were they no faster with fewer inputs: how much of a difference to the paper that explains.

E3 says that its V100 are not full at a batch of 8 (section 5.1.1). By TensorRT's published times they nearly are, so a
batch that shrinks costs E3 more than it costs here. Flat times are the other extreme.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from experiments.studies.by_batch import Choose, by_batch
from experiments.studies.kit import Comparison, Effort, largest_ratios
from experiments.studies.sides import Workload, decide
from optimizer.problem import PlanProblem
from optimizer.what_if import with_batch_limit
from profiles.table import LatencyTable

WHY_FLAT = (
    "Flat times are those of accelerators that take as long for one input as for eight: the extreme of what E3 says of "
    "its own V100, which a batch of 8 does not fill (section 5.1.1). By the published times a V100 with TensorRT is "
    "nearly full there, so that batches which shrink lose less."
)
"""For what a study says of its differences."""


def flat(problem: PlanProblem, batch: int) -> PlanProblem:
    """Every batch up to this size takes what this size takes."""
    limited = with_batch_limit(problem, batch)
    latency = {device: _flat(table) for device, table in limited.latency.items()}
    return replace(limited, latency=latency)


def _flat(table: LatencyTable) -> LatencyTable:
    width = len(table.batches)
    return LatencyTable(
        batches=table.batches,
        block_s_NB=np.tile(table.block_s_NB[:, -1:], width),
        ramp_s_EB=np.tile(table.ramp_s_EB[:, -1:], width),
    )


def with_flat_times(
    problem: PlanProblem, inputs: Workload, batch: int, effort: Effort, choose: Choose = decide
) -> tuple[Comparison, ...]:
    """What e3 gains at one batch size with flat times; nothing with quick effort."""
    if effort == "quick":
        return ()
    found = by_batch(flat(problem, batch), inputs, (batch,), effort, choose)
    e3 = largest_ratios(found.rates, "e3")
    return (
        Comparison(name=f"flat times, batch {batch}: e3 / early-exit", ours=e3.over_early_exit),
        Comparison(name=f"flat times, batch {batch}: e3 / stock", ours=e3.over_stock),
    )
