"""A model of four blocks on two accelerators, and recorded inputs, small enough to reckon with."""

from __future__ import annotations

import numpy as np

from experiments.studies.sides import Workload, workload
from optimizer.problem import Link, MaximizeRate, PlanProblem, Slo, Supply
from profiles.records import ExitRecords
from profiles.table import LatencyTable
from simulator.decisions import recorded


def four_blocks() -> PlanProblem:
    """10 ms a block for one input and 40 ms for eight, ramps a tenth of that; hops take 1 ms."""
    block_s_B = np.array([0.010, 0.040])
    return PlanProblem(
        num_blocks=4,
        ramps=(0, 1, 2),
        survival_N=(1.0, 1.0, 1.0, 1.0),
        latency={
            "V100": LatencyTable(
                batches=(1, 8), block_s_NB=np.tile(block_s_B, (4, 1)), ramp_s_EB=np.tile(block_s_B / 10, (3, 1))
            )
        },
        devices={"V100": Supply(count=2)},
        link=Link(bandwidth_bytes_per_s=1e9, delay_s=0.001),
        bytes_per_sample_N=(0.0, 0.0, 0.0, 0.0),
        slo=Slo(latency_s=5.0, slack=0.2),
        objective=MaximizeRate(),
    )


def four_inputs() -> ExitRecords:
    """At entropy 0.4 they leave after blocks 1, 2, 3 and 4; the first is wrong then, and the second right."""
    return ExitRecords.of_answers(
        np.column_stack([np.array([[0, 1, 1], [0, 1, 1], [0, 1, 0], [0, 0, 0]]), np.array([1, 0, 0, 0])]),
        score="entropy",
        num_blocks=4,
        ramps=(0, 1, 2),
        sample_ids=("a", "b", "c", "d"),
        scores_NR=np.array([[0.4, 0.1, 0.1], [0.6, 0.3, 0.1], [0.6, 0.6, 0.2], [0.6, 0.6, 0.6]], dtype=np.float32),
        truth_N=np.array([1, 1, 0, 0]),
    )


def inputs_at(entropy: float) -> Workload:
    """The four inputs in turn, who leave at that entropy."""
    records = four_inputs()
    decisions = recorded(records, dict.fromkeys(records.ramps, entropy))
    return workload(f"four inputs, entropy {entropy:g}", decisions, np.arange(4), four_blocks())
