"""Scores plans again on joint exit records.

The planner models survival as nested: an input that passes a ramp passes all earlier ramps. Records are more exact: an
input that would leave at ramp 2 may pass ramp 5. If few ramps are active, more inputs stay than in the nested model,
and another of several good plans may be the best one. If the mean answer time is minimized and batches are recorded,
plans are also scored batch by batch rather than on the mean batch. The two differ because times are not linear in the
batch size: on accelerators they grow in steps (PAME, figure 13(c)), and a batch of 9 may take as long as one of 16.
Moreover, the inputs that wait longest are in the batches that shrink least.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from earlyexit.errors import PlanError
from earlyexit.network.boundary import Split
from optimizer.decision import Planned, gap_between
from optimizer.evaluate import Evaluation, Steps, StepSeconds, evaluate, merit, objective_value, violations
from optimizer.plan import Stage, used_networks
from optimizer.problem import MinimizeLatency, PlanProblem, Reach
from profiles.records import ExitRecords, IntArray, RecordedBatches, batch_counts
from profiles.table import FloatArray, LatencyTable


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescored:
    """A plan's figures with nested survival and with joint records."""

    stages: tuple[Stage, ...]
    nested: Evaluation
    joint: Evaluation
    broken: tuple[str, ...]
    """Constraints that the plan violates according to the records."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rescoring:
    """All rescored candidates, in the planner's order. The first one is the planner's choice."""

    candidates: tuple[Rescored, ...]
    chosen_index: int | None
    """The best feasible candidate according to the records; None if no candidate is feasible."""

    @property
    def chosen(self) -> Rescored | None:
        return None if self.chosen_index is None else self.candidates[self.chosen_index]


def joint_reach(records: ExitRecords, thresholds: Mapping[int, float], *, by_tokens: bool = False) -> Reach:
    """Returns the survival of recorded inputs under these thresholds, as a function of the active ramps.

    `by_tokens` weights inputs by their tokens, if the records hold them.
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


def by_networks(problem: PlanProblem, with_all: Reach, without_some: Reach) -> Reach:
    """Returns `with_all` for plans that use every network, that is if each has an active ramp, else `without_some`."""
    before_last = set(range(len(problem.networks) - 1))

    def reach(active: Sequence[int]) -> Sequence[float]:
        used = set(used_networks(problem.networks, set(active)))
        return with_all(active) if before_last <= used else without_some(active)

    return reach


def rescore(problem: PlanProblem, planned: Planned, reach: Reach) -> Rescoring:
    """Scores a plan and its candidates with `reach`, and selects the best one that is still feasible."""
    plans = dict.fromkeys((planned.stages, *planned.candidates))
    candidates = tuple(_rescored(problem, stages, reach) for stages in plans)
    feasible = [index for index, each in enumerate(candidates) if not each.broken]
    chosen_index = max(feasible, key=lambda index: merit(problem, candidates[index].joint), default=None)
    return Rescoring(candidates=candidates, chosen_index=chosen_index)


def apply_rescoring(problem: PlanProblem, planned: Planned, rescoring: Rescoring) -> Planned:
    """Returns the plan that the records prefer, with its nested figures, or the planner's if none is feasible."""
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
    """Scores a plan like `evaluate`, on batches of the recorded inputs that reach each split, in order.

    A split that fewer inputs than a batch reach is scored on its mean batch. Raises PlanError as `evaluate` does, and
    DataError for ramps that were not recorded.
    """
    ramps = [ramp for stage in stages for split in stage.splits for ramp in split.ramps]
    return evaluate(problem, stages, reach_of(batches), _steps(problem, batches.exits_N(ramps)))


def reach_of(batches: RecordedBatches) -> Reach:
    """Returns the survival of recorded batches, as a function of the active ramps."""

    def reach(active: Sequence[int]) -> Sequence[float]:
        exits_N = batches.exits_N(active)
        return [float((exits_N >= block).mean()) for block in range(batches.num_blocks)]

    return reach


def _steps(problem: PlanProblem, exits_N: IntArray) -> Steps:
    def steps(stage: Stage, split: Split) -> list[StepSeconds] | None:
        entering_N = exits_N if split.stays else exits_N[exits_N >= split.first]
        if len(entering_N) < split.batch:
            return None
        share = len(entering_N) / len(exits_N)
        return [_step(problem, stage, split, block, entering_N, share) for block in range(split.first, split.end)]

    return steps


def _step(
    problem: PlanProblem, stage: Stage, split: Split, block: int, entering_N: IntArray, share: float
) -> StepSeconds:
    """Returns the mean times of one block over a split's batches. Answered inputs that stay are computed as well."""
    table = problem.latency[stage.device]
    unanswered_K = batch_counts(entering_N >= block, split.batch)
    computed_K = np.full(len(unanswered_K), split.batch) if split.stays else unanswered_K
    block_s_K = _seconds(table, table.block_s_NB[block], computed_K)
    ramp_s_K = np.zeros(len(unanswered_K))
    if block in split.ramps:
        ramp_s_K = _seconds(table, table.ramp_s_EB[problem.ramps.index(block)], computed_K)
    return StepSeconds(
        block_s=float(block_s_K.mean()),
        ramp_s=float(ramp_s_K.mean()),
        unanswered_s=share * float((unanswered_K / split.batch * (block_s_K + ramp_s_K)).mean()),
    )


def _seconds(table: LatencyTable, seconds_B: FloatArray, sizes_K: IntArray) -> FloatArray:
    """Returns the seconds of batches of these sizes; 0 for an empty batch."""
    return np.where(sizes_K > 0, np.interp(sizes_K, table.batches, seconds_B), 0.0)
