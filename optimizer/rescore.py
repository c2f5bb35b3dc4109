"""Plans scored again on joint exit records.

The planner takes survival as nested: an input that passes the last active ramp would pass every earlier one. Records
know better: an input that ramp 2 would have let out may pass ramp 5. With few ramps active, more inputs stay than the
nested view says, so the rate falls; which of several good plans is best can change. And where early answers are
sought, and batches are recorded, what a plan's batches take is theirs one by one, not that of their mean: the mean of
a time is the time of the mean only where times grow evenly with the batch. On accelerators they come in steps (PAME,
figure 13(c)), and a batch that has shrunk to 9 takes what 16 take; and the inputs that wait longest are in the batches
that shrink least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from earlyexit.errors import PlanError
from earlyexit.network.boundary import Split
from earlyexit.network.chain import used_networks
from optimizer.decision import Planned, gap_between
from optimizer.evaluate import Evaluation, Steps, StepSeconds, evaluate, merit, objective_value, violations
from optimizer.plan import Stage
from optimizer.problem import MinimizeLatency, PlanProblem, Reach
from profiles.records import ExitRecords, IntArray, RecordedBatches, batch_counts
from profiles.table import FloatArray, LatencyTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescored:
    """One plan by both views."""

    stages: tuple[Stage, ...]
    nested: Evaluation
    joint: Evaluation
    broken: tuple[str, ...]
    """Promises that it breaks by the records; none for a plan that keeps them all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescoring:
    """All candidates by both views, in the planner's order: the first is its own choice."""

    candidates: tuple[Rescored, ...]
    chosen_index: int | None
    """The best by the records that keeps every promise; None where none does."""

    @property
    def chosen(self) -> Rescored | None:
        return None if self.chosen_index is None else self.candidates[self.chosen_index]


def joint_reach(records: ExitRecords, thresholds: Mapping[int, float], *, by_tokens: bool = False) -> Reach:
    """From the active ramps to the share of recorded inputs that reach every block, with these thresholds.

    `by_tokens`: of their tokens, where the records know them.
    """

    def reach(active: Sequence[int]) -> Sequence[float]:
        missing = sorted(set(active) - set(thresholds))
        if missing:
            raise PlanError(f"active ramps {missing} have no threshold; there are thresholds for {sorted(thresholds)}")
        outcome = records.outcome({ramp: thresholds[ramp] for ramp in active})
        if by_tokens and records.tokens_N is not None:
            return outcome.survival_by(records.tokens_N)
        return outcome.survival

    return reach


def by_networks(problem: PlanProblem, together: Reach, alone: Reach) -> Reach:
    """`together` where inputs come by every network of a chain, that is where each has an active ramp, else `alone`."""
    before_last = set(range(len(problem.networks) - 1))

    def reach(active: Sequence[int]) -> Sequence[float]:
        came_by = set(used_networks(problem.networks, set(active)))
        return together(active) if before_last <= came_by else alone(active)

    return reach


def rescore(problem: PlanProblem, planned: Planned, reach: Reach) -> Rescoring:
    """Score a plan and its candidates by `reach`, and find the best that still keeps every promise."""
    stages = dict.fromkeys((planned.stages, *planned.candidates))
    candidates = tuple(_rescored(problem, each, reach) for each in stages)
    kept = [index for index, each in enumerate(candidates) if not each.broken]
    chosen_index = max(kept, key=lambda index: merit(problem, candidates[index].joint), default=None)
    return Rescoring(candidates=candidates, chosen_index=chosen_index)


def apply_rescoring(problem: PlanProblem, planned: Planned, rescoring: Rescoring) -> Planned:
    """The plan that the records prefer, with its nested figures and its gap; the planner's own where none is left."""
    chosen = rescoring.chosen
    if chosen is None or chosen.stages == planned.stages:
        return planned
    gap = gap_between(objective_value(problem, chosen.nested), planned.bound)
    return replace(planned, stages=chosen.stages, figures=chosen.nested, gap=gap)


def _rescored(problem: PlanProblem, stages: tuple[Stage, ...], reach: Reach) -> Rescored:
    if problem.batches is not None and isinstance(problem.objective, MinimizeLatency):
        joint = evaluate_on(problem, stages, problem.batches)
    else:
        joint = evaluate(problem, stages, reach)
    return Rescored(
        stages=stages,
        nested=evaluate(problem, stages),
        joint=joint,
        broken=tuple(violations(problem, stages, joint)),
    )


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
