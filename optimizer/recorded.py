"""Plans scored on recorded batches: every batch takes what so many inputs take, where the cost model has a mean batch.

The mean of a time is the time of the mean only where times grow evenly with the batch. On accelerators they come in
steps (PAME, figure 13(c)), and a batch that has shrunk to 9 takes what 16 take; and the inputs that wait longest
are in the batches that shrink least.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from earlyexit.network.boundary import Split
from optimizer.evaluate import Evaluation, Steps, StepSeconds, evaluate
from optimizer.plan import Stage
from optimizer.problem import PlanProblem, Reach
from profiles.records import IntArray, RecordedBatches, batch_counts
from profiles.table import FloatArray, LatencyTable


def evaluate_on(problem: PlanProblem, stages: Sequence[Stage], batches: RecordedBatches) -> Evaluation:
    """Score a plan as `evaluate` does, its batches cut from the recorded inputs that come to each split, in order.

    A split that fewer inputs come to than its batch holds keeps the mean batch's seconds. Raises PlanError as
    `evaluate` does, DataError for ramps that were not recorded.
    """
    ramps = [ramp for stage in stages for split in stage.splits for ramp in split.ramps]
    return evaluate(problem, stages, reach_of(batches), _steps(problem, batches.exits_N(ramps)))


def reach_of(batches: RecordedBatches) -> Reach:
    """From the active ramps to the share of recorded inputs that reach every block."""

    def reach(active: Sequence[int]) -> Sequence[float]:
        exits_N = batches.exits_N(active)
        return [float((exits_N >= block).mean()) for block in range(batches.num_blocks)]

    return reach


def _steps(problem: PlanProblem, exits_N: IntArray) -> Steps:
    def steps(stage: Stage, split: Split) -> list[StepSeconds] | None:
        coming_N = exits_N if split.stays else exits_N[exits_N >= split.first]
        if len(coming_N) < split.batch:
            return None
        share = len(coming_N) / len(exits_N)
        return [_step(problem, stage, split, block, coming_N, share) for block in range(split.first, split.end)]

    return steps


def _step(
    problem: PlanProblem, stage: Stage, split: Split, block: int, coming_N: IntArray, share: float
) -> StepSeconds:
    """One block of all of a split's batches. Inputs that stay are computed and need no answer."""
    table = problem.latency[stage.device]
    waiting_K = batch_counts(coming_N >= block, split.batch)
    computed_K = np.full(len(waiting_K), split.batch) if split.stays else waiting_K
    block_s_K = _seconds(table, table.block_s_NB[block], computed_K)
    ramp_s_K = np.zeros(len(waiting_K))
    if block in split.ramps:
        ramp_s_K = _seconds(table, table.ramp_s_EB[problem.ramps.index(block)], computed_K)
    return StepSeconds(
        block_s=float(block_s_K.mean()),
        ramp_s=float(ramp_s_K.mean()),
        unanswered_s=share * float((waiting_K / split.batch * (block_s_K + ramp_s_K)).mean()),
    )


def _seconds(table: LatencyTable, seconds_B: FloatArray, sizes_K: IntArray) -> FloatArray:
    """Of batches of these sizes; an empty one takes none."""
    return np.where(sizes_K > 0, np.interp(sizes_K, table.batches, seconds_B), 0.0)
