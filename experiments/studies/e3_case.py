"""Exits, times and ramps as E3 may have had them, by what its paper tells: made up, to see why we differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from experiments.studies.sides import NUM_ROWS, SEED, Choose, Workload, by_batch, decide, ratios_of, workload
from experiments.studies.study import Comparison, Effort
from optimizer.problem import PlanProblem
from optimizer.what_if import with_batch_limit
from profiles.table import LatencyTable
from simulator.inputs import nested

LARGEST_BATCH: Final = 8
"""E3's models "do not saturate the GPU at a batch size of 8", and the next one breaks its SLO (section 5.1.1)."""
RAMPS_OFF_GAIN: Final = 1.16
"""What E3 gains where the ramps inside its splits are off (section 5.8.6)."""
NUM_SPLITS: Final = 2
"""E3's own example (section 3.2), and those of its splits of which the paper tells the number (section 5.1.3)."""


def even_exits(problem: PlanProblem) -> Workload:
    """As many inputs leave after every block: half are out after the block in the middle (E3 figures 1 and 3)."""
    blocks = problem.num_blocks
    survival_N = tuple(1 - block / blocks for block in range(blocks))
    return made_up(f"made up: a {blocks}th of the inputs leaves after every block", survival_N, problem)


def exits_at_once(problem: PlanProblem) -> Workload:
    """Half leave after the block in the middle, none elsewhere: the other extreme of what E3's figure 3 allows."""
    middle = problem.num_blocks // 2
    survival_N = tuple(1.0 if block < middle else 0.5 for block in range(problem.num_blocks))
    return made_up(f"made up: half of the inputs leave after block {middle}, none elsewhere", survival_N, problem)


def made_up(words: str, survival_N: tuple[float, ...], problem: PlanProblem) -> Workload:
    """Inputs that leave so, in random order; an input that is sure at a ramp stays sure."""
    rng = np.random.default_rng(SEED)
    decisions = nested(survival_N, problem.ramps, rng, num_rows=NUM_ROWS)
    return workload(words, decisions, rng.permutation(NUM_ROWS), problem)


def flat(problem: PlanProblem, batch: int) -> PlanProblem:
    """The same accelerators, were they no faster with fewer inputs: every batch up to this size takes as long.

    E3 says that a batch of 8 does not fill its V100; by TensorRT's published times it nearly does.
    """
    limited = with_batch_limit(problem, batch)
    latency = {device: _flat(table) for device, table in limited.latency.items()}
    return replace(limited, latency=latency)


def _flat(table: LatencyTable) -> LatencyTable:
    width = len(table.batches)
    block_s_NB, ramp_s_EB = (np.tile(each[:, -1:], width) for each in (table.block_s_NB, table.ramp_s_EB))
    return LatencyTable(batches=table.batches, block_s_NB=block_s_NB, ramp_s_EB=ramp_s_EB)


def with_ramps_of(problem: PlanProblem, share: float) -> PlanProblem:
    """The same model, whose ramps take that share of the block before them."""
    ramps = list(problem.ramps)
    latency = {
        name: replace(table, ramp_s_EB=table.block_s_NB[ramps] * share) for name, table in problem.latency.items()
    }
    return replace(problem, latency=latency)


def like_e3(problem: PlanProblem) -> PlanProblem:
    """Accelerators that `LARGEST_BATCH` inputs do not fill, and ramps as dear as E3's seem to be."""
    return with_ramps_of(flat(problem, LARGEST_BATCH), ramp_share(problem))


def ramp_share(problem: PlanProblem, *, gain: float = RAMPS_OFF_GAIN, num_splits: int = NUM_SPLITS) -> float:
    """What share of a block a ramp takes, if leaving out all but those at the ends of splits gains that much.

    On an accelerator whose time is the same for any batch, so that inputs that leave inside a split save nothing:
    (N + R x) / (N + (splits - 1) x) = gain, for N equal blocks and R ramps.
    """
    return problem.num_blocks * (gain - 1) / (len(problem.ramps) - gain * (num_splits - 1))


def first_ramp(problem: PlanProblem) -> float:
    """What share of the block before it the first ramp takes, by the times of the first accelerator type."""
    table = next(iter(problem.latency.values()))
    return float(table.ramp_s_EB[0, 0] / table.block_s_NB[problem.ramps[0], 0])


def with_flat_times(
    problem: PlanProblem, inputs: Workload, batch: int, effort: Effort, choose: Choose = decide
) -> tuple[Comparison, ...]:
    """What e3 gains at one batch size with flat times; nothing with quick effort."""
    if effort == "quick":
        return ()
    e3 = ratios_of(by_batch(flat(problem, batch), inputs, (batch,), effort, choose), "e3")
    return (
        Comparison(f"flat times, batch {batch}: e3 / early-exit", e3.over_early_exit),
        Comparison(f"flat times, batch {batch}: e3 / stock", e3.over_stock),
    )
