"""A distilled BERT of 6 blocks: E3's 16 V100 for it, and two workloads of exits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from experiments.recorded_exits import bert12_sst2
from experiments.studies.distilbert_exits import NUM_BLOCKS, RAMPS, ImdbRun
from experiments.studies.sides import NUM_ROWS, SEED, Workload, equal_cluster, workload
from optimizer.problem import PlanProblem
from profiles.records import ExitRecords
from profiles.table import LatencyTable
from simulator.decisions import ByRamp, nested, recorded


def distilled_cluster() -> PlanProblem:
    """The 16 V100 of BERT-base, whose first 6 blocks are the distilled model's: half the times.

    Published V100 figures of a BERT with 6 such layers are for 384 tokens only (NVIDIA/DeepLearningExamples,
    PyTorch/LanguageModeling/BERT/triton/dist6l: 1.6, 7.0 and 13.1 ms at batch 1, 8 and 16, from an older TensorRT).
    """
    return cut(equal_cluster(), NUM_BLOCKS)


def cut(problem: PlanProblem, num_blocks: int) -> PlanProblem:
    """The same for a model of its first blocks."""
    ramps = tuple(ramp for ramp in problem.ramps if ramp < num_blocks - 1)
    latency = {
        device: LatencyTable(
            batches=table.batches,
            block_s_NB=table.block_s_NB[:num_blocks],
            ramp_s_EB=table.ramp_s_EB[: len(ramps)],
        )
        for device, table in problem.latency.items()
    }
    return replace(
        problem,
        num_blocks=num_blocks,
        ramps=ramps,
        survival_N=problem.survival_N[:num_blocks],
        latency=latency,
        bytes_per_sample_N=problem.bytes_per_sample_N[:num_blocks],
    )


def imdb(run: ImdbRun) -> Workload:
    """Inputs that leave where those of Apparate's run did; who is sure at a ramp stays sure."""
    rng = np.random.default_rng(SEED)
    decisions = nested(run.survival_N, RAMPS, rng, num_rows=NUM_ROWS)
    words = f"DistilBERT on IMDB as Apparate recorded it: {1 - run.survival_N[-1]:.0%} leave early"
    return workload(words, decisions, rng.permutation(NUM_ROWS), distilled_cluster())


def every_second_ramp(entropy: float) -> Workload:
    """A stand-in for DistilBERT on SST-2: what BERT-base's ramp after block 2k recorded, after block k."""
    records = bert12_sst2("entropy")
    rng = np.random.default_rng(SEED)
    rows_N = rng.integers(len(records), size=NUM_ROWS)
    words = f"every second ramp of BERT-base recorded on SST-2 dev, entropy {entropy:g}"
    return workload(words, half_of(records, entropy), rows_N, distilled_cluster())


def half_of(records: ExitRecords, entropy: float) -> ByRamp:
    """Decisions of the ramps after every second block, as those of a model of half the blocks."""
    odd = records.ramps[1::2]
    whole = recorded(records, dict.fromkeys(records.ramps, entropy))
    columns = [records.ramps.index(ramp) for ramp in odd]
    return ByRamp(ramps=tuple(ramp // 2 for ramp in odd), sure_NR=whole.sure_NR[:, columns])
