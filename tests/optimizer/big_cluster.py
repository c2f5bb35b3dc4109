"""A cluster of 10,000 accelerators, and a model of many blocks to plan on it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from optimizer.problem import Link, MaximizeRate, Objective, PlanProblem, Slo, Supply
from profiles.catalogue import published_profile
from profiles.table import LatencyTable

BIG_CLUSTER = {
    "V100": Supply(count=1500, usd_per_hour=2.93),
    "T4": Supply(count=3500, usd_per_hour=0.53),
    "A100": Supply(count=1000, usd_per_hour=3.67),
    "A30": Supply(count=1500, usd_per_hour=1.2),
    "L4": Supply(count=1500, usd_per_hour=0.8),
    "L40S": Supply(count=1000, usd_per_hour=1.86),
}
"""The prices per hour are made up, near those of clouds."""
FAST_LINK = Link(bandwidth_bytes_per_s=12.5e9, delay_s=5e-5)
SLOW_LINK = Link(bandwidth_bytes_per_s=1.25e9, delay_s=1e-4)
"""E3's. Hops over it cost so much that no bound on them is tight."""
LENGTH = 128


def bert_large_problem(
    num_blocks: int, devices: Mapping[str, Supply], link: Link, objective: Objective | None = None
) -> PlanProblem:
    """Blocks as fast as BERT-large's; from all to a quarter of the inputs are left, most leave early."""
    latency = {}
    for device in devices:
        table = published_profile("bert-large", device).tables[LENGTH]
        latency[device] = LatencyTable(
            batches=table.batches,
            block_s_NB=np.tile(table.block_s_NB[0], (num_blocks, 1)),
            ramp_s_EB=np.tile(table.ramp_s_EB[0], (num_blocks - 1, 1)),
        )
    return PlanProblem(
        num_blocks=num_blocks,
        ramps=tuple(range(num_blocks - 1)),
        survival_N=tuple(1 - 0.75 * (block / (num_blocks - 1)) ** 0.6 for block in range(num_blocks)),
        latency=latency,
        devices=devices,
        link=link,
        bytes_per_sample_N=(LENGTH * 1024 * 2.0,) * num_blocks,  # float16
        slo=Slo(latency_s=0.1, slack=0.2),
        objective=objective or MaximizeRate(),
    )
