"""Whether a plan is one of a problem's: its blocks, devices, batches and ramps."""

from __future__ import annotations

from collections.abc import Sequence

from earlyexit.errors import PlanError
from earlyexit.network.boundary import Split
from optimizer.networks import part_of
from optimizer.plan import Stage
from optimizer.problem import PlanProblem


def check_fits(problem: PlanProblem, stages: Sequence[Stage]) -> None:
    """Raise PlanError where a plan's stages name what the problem lacks, or do not make one model."""
    splits = [split for stage in stages for split in stage.splits]
    if len({split.after_answer for split in splits}) > 1:
        raise PlanError("the splits of a plan all stop after an answer, or all stay")
    part_of(problem, stages)
    for stage in stages:
        if stage.device not in problem.devices:
            raise PlanError(f"unknown device {stage.device!r}; the problem's devices are {sorted(problem.devices)}")
        for split in stage.splits:
            _check_batch(problem, stage.device, split)
            unknown = sorted(set(split.ramps) - set(problem.ramps))
            if unknown:
                raise PlanError(f"the model has no ramps {unknown}; its ramps are {list(problem.ramps)}")


def _check_batch(problem: PlanProblem, device: str, split: Split) -> None:
    """Where inputs have lengths, a batch may lie between measured ones: `optimizer.tokens` sees to it."""
    if problem.lengths is not None:
        return
    if split.tokens is not None:
        raise PlanError(f"the plan has batches of {split.tokens} tokens; the problem says nothing of lengths")
    measured = problem.latency[device].batches
    if split.batch not in measured:
        raise PlanError(f"batch {split.batch} is not measured on {device}; measured are {list(measured)}")
