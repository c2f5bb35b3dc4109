"""ResNet-50 on E3's 16 V100, and who leaves it where: as recorded of CIFAR's ResNet-32, at equal depths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from experiments.apparate.cases import VISION_RAMP
from experiments.problems import PROBLEMS
from experiments.studies.sides import NUM_ROWS, SEED, Workload, workload
from optimizer.problem import PlanProblem
from optimizer.problem_file import read_problem
from profiles.records import ExitRecords
from profiles.table import LatencyTable
from simulator.decisions import recorded

MOST_LOST = 0.02
"""Of answers that differ from the full model's: E3's exits lose less (section 5)."""
STEP = 0.01
"""Between the thresholds that are tried."""


def vision_cluster(ramps: Sequence[int]) -> PlanProblem:
    """E3's 16 V100 for a ResNet-50 with these ramps, each at the price of BranchyNet's (Apparate, table 2)."""
    problem = read_problem(PROBLEMS / "resnet50_16_v100.yaml").problem
    latency = {device: _with_ramps(table, len(ramps)) for device, table in problem.latency.items()}
    return replace(problem, ramps=tuple(ramps), latency=latency)


def _with_ramps(table: LatencyTable, number: int) -> LatencyTable:
    ramp_s_B = VISION_RAMP * table.block_s_NB.sum(0)
    return replace(table, ramp_s_EB=np.tile(ramp_s_B, (number, 1)))


def place_in(num_blocks: int, ramp: int, of_blocks: int) -> int:
    """The ramp of a model of `num_blocks` blocks that stands nearest to where one of another model does."""
    return round((ramp + 1) / of_blocks * num_blocks) - 1


def places_of(records: ExitRecords, num_blocks: int) -> tuple[int, ...]:
    """Where the recorded ramps stand in such a model."""
    return tuple(place_in(num_blocks, ramp, records.num_blocks) for ramp in records.ramps)


def one_threshold(records: ExitRecords, most_lost: float = MOST_LOST) -> float:
    """The lowest confidence, the same for all ramps, that loses at most so much on these inputs."""
    tried: list[float] = np.arange(0.5, 1 + STEP / 2, STEP).round(2).tolist()
    return next(at for at in tried if records.outcome(dict.fromkeys(records.ramps, at)).losses_N.mean() <= most_lost)


def cifar(records: ExitRecords, problem: PlanProblem, words: str) -> Workload:
    """Inputs that leave where the recorded ones do."""
    threshold = one_threshold(records)
    sure = recorded(records, dict.fromkeys(records.ramps, threshold))
    decisions = replace(sure, ramps=places_of(records, problem.num_blocks))
    rows_N = np.random.default_rng(SEED).integers(len(records), size=NUM_ROWS)
    return workload(f"recorded: {words}, confidence {threshold:g}", decisions, rows_N, problem)
