"""Plan problems of cascades on published latencies: networks one after the other, any of which a plan may leave out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np

from optimizer.problem import Link, MaximizeRate, PlanProblem, Slo, Supply
from optimizer.what_if import with_batch_limit
from profiles.catalogue import published_profile
from profiles.table import LatencyTable

DEVICE, LENGTH = "V100", 128
CROSSING_BYTES = 2.0 * LENGTH
"""Importance per token in half precision; sample ids and the like are little beside it."""
TEN_GBIT = 1.25e9


def layers_of(model: str, num_layers: int) -> LatencyTable:
    """So many layers of a published model, each with its share of the whole, on a V100; no ramps inside."""
    table = published_profile(model, DEVICE).at(LENGTH)
    return LatencyTable(
        batches=table.batches,
        block_s_NB=table.block_s_NB[:num_layers],
        ramp_s_EB=np.zeros((0, len(table.batches))),
        length=LENGTH,
    )


def chain_problem(
    tables: Sequence[LatencyTable],
    survival_of: Mapping[tuple[int, ...], tuple[float, ...]],
    *,
    most: int,
    count: int = 1,
    slo_s: float = 1.0,
    crossing_tokens: tuple[float, ...] = (),
) -> PlanProblem:
    """The most that `count` V100 do with these networks at batches up to `most`; ramps at the ends of networks alone.

    Of their blocks' seconds the ends are part: in a table of a whole model its head is.
    """
    ends = tuple(accumulate(len(table.block_s_NB) for table in tables))
    ramps = tuple(end - 1 for end in ends[:-1])
    batches = tables[0].batches
    assert all(table.batches == batches for table in tables), "a chain's tables have the same batch sizes"
    bytes_N = [0.0] * ends[-1]
    for ramp in ramps:
        bytes_N[ramp] = CROSSING_BYTES
    problem = PlanProblem(
        num_blocks=ends[-1],
        ramps=ramps,
        survival_N=survival_of[tuple(range(len(tables)))],
        latency={
            DEVICE: LatencyTable(
                batches=batches,
                block_s_NB=np.concatenate([table.block_s_NB for table in tables]),
                ramp_s_EB=np.zeros((len(ramps), len(batches))),
                length=LENGTH,
            )
        },
        devices={DEVICE: Supply(count=count)},
        link=Link(bandwidth_bytes_per_s=TEN_GBIT, delay_s=1e-4),
        bytes_per_sample_N=tuple(bytes_N),
        slo=Slo(latency_s=slo_s),
        objective=MaximizeRate(),
        networks=ends if len(ends) > 1 else (),
        survival_of=survival_of,
        crossing_s=1e-3,
        crossing_tokens=crossing_tokens,
    )
    return with_batch_limit(problem, most)
