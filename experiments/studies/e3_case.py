"""Exits, times and ramps that fit E3's statements. They are invented, to explain why our figures differ."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from experiments.studies.sides import NUM_ROWS, SEED, Choose, Workload, by_batch, decide, ratios_of, workload
from experiments.studies.study import Comparison, Effort
from optimizer.problems.problem import PlanProblem
from optimizer.problems.what_if import with_batch_limit
from profiles.table import LatencyTable
from simulator.inputs import nested

LARGEST_BATCH: Final = 8
"""E3's models "do not saturate the GPU at a batch size of 8", and the next one breaks its SLO (section 5.1.1)."""
RAMPS_OFF_GAIN: Final = 1.16
"""E3's gain if ramps inside its splits are off (section 5.8.6)."""
NUM_SPLITS: Final = 2
"""Number of splits in E3's example (section 3.2) and in section 5.1.3. Its forecast is tested with three (5.8.2)."""


def even_exits(problem: PlanProblem) -> Workload:
    """Returns a survival with equal exits after every block, half by the middle (E3 figures 1 and 3)."""
    blocks = problem.num_blocks
    survival_N = tuple(1 - block / blocks for block in range(blocks))
    return made_up(f"made up: a {blocks}th of the inputs leaves after every block", survival_N, problem)


def exits_at_once(problem: PlanProblem) -> Workload:
    """Returns a survival in which half leave after the middle block: the other extreme that E3's figure 3 allows."""
    middle = problem.num_blocks // 2
    survival_N = tuple(1.0 if block < middle else 0.5 for block in range(problem.num_blocks))
    return made_up(f"made up: half of the inputs leave after block {middle}, none elsewhere", survival_N, problem)


def made_up(words: str, survival_N: tuple[float, ...], problem: PlanProblem) -> Workload:
    """Returns inputs with this survival, in random order; an input stays sure after its first sure ramp."""
    rng = np.random.default_rng(SEED)
    decisions = nested(survival_N, problem.ramps, rng, num_rows=NUM_ROWS)
    return workload(words, decisions, rng.permutation(NUM_ROWS), problem)


def flat(problem: PlanProblem, batch: int) -> PlanProblem:
    """Returns accelerators that take the same time for every batch up to this size.

    E3 states that a batch of 8 does not fill its V100. By TensorRT's published times it nearly does.
    """
    limited = with_batch_limit(problem, batch)
    latency = {device: _flat(table) for device, table in limited.latency.items()}
    return replace(limited, latency=latency)


def _flat(table: LatencyTable) -> LatencyTable:
    width = len(table.batches)
    block_s_NB, ramp_s_EB = (np.tile(each[:, -1:], width) for each in (table.block_s_NB, table.ramp_s_EB))
    return LatencyTable(batches=table.batches, block_s_NB=block_s_NB, ramp_s_EB=ramp_s_EB)


def with_ramps_of(problem: PlanProblem, share: float) -> PlanProblem:
    """Returns the problem with ramps that take this share of the block before them."""
    ramps = list(problem.ramps)
    latency = {
        name: replace(table, ramp_s_EB=table.block_s_NB[ramps] * share) for name, table in problem.latency.items()
    }
    return replace(problem, latency=latency)


def like_e3(problem: PlanProblem) -> PlanProblem:
    """Returns accelerators that `LARGEST_BATCH` inputs do not fill, with ramps as expensive as E3's seem to be."""
    return with_ramps_of(flat(problem, LARGEST_BATCH), ramp_share(problem))


def ramp_share(problem: PlanProblem, *, gain: float = RAMPS_OFF_GAIN, num_splits: int = NUM_SPLITS) -> float:
    """Returns a ramp's share of a block, if keeping only the ramps at split ends gains this factor.

    On an accelerator whose time does not depend on the batch, inputs that leave inside a split save nothing: (N + R x)
    / (N + (splits - 1) x) = gain, for N equal blocks and R ramps.
    """
    return problem.num_blocks * (gain - 1) / (len(problem.ramps) - gain * (num_splits - 1))


def first_ramp(problem: PlanProblem) -> float:
    """Returns the first ramp's share of the block before it, by the times of the first accelerator type."""
    table = next(iter(problem.latency.values()))
    return float(table.ramp_s_EB[0, 0] / table.block_s_NB[problem.ramps[0], 0])


def with_flat_times(
    problem: PlanProblem, inputs: Workload, batch: int, effort: Effort, choose: Choose = decide
) -> tuple[Comparison, ...]:
    """Returns e3's gain at one batch size with flat times; nothing with quick effort."""
    if effort == "quick":
        return ()
    e3 = ratios_of(by_batch(flat(problem, batch), inputs, (batch,), effort, choose), "e3")
    return (
        Comparison(f"flat times, batch {batch}: e3 / early-exit", e3.over_early_exit),
        Comparison(f"flat times, batch {batch}: e3 / stock", e3.over_stock),
    )
