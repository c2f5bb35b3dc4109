"""Models small enough to reckon with, and their inputs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from experiments.studies.sides import Workload, workload
from experiments.studies.study import StudyResult
from optimizer.problem import Link, MaximizeRate, PlanProblem, Slo, Supply
from profiles.records import ExitRecords
from profiles.table import LatencyTable
from simulator.inputs import nested, recorded


def table(batches: tuple[int, ...], block_s_B: Sequence[float], num_blocks: int, ramp: float = 0.0) -> LatencyTable:
    """Equal blocks; ramps take that share of one."""
    return LatencyTable(
        batches=batches,
        block_s_NB=np.tile(block_s_B, (num_blocks, 1)),
        ramp_s_EB=np.tile(ramp * np.asarray(block_s_B), (num_blocks - 1, 1)),
    )


def problem_of(
    latency: dict[str, LatencyTable],
    devices: dict[str, Supply],
    survival_N: tuple[float, ...],
    *,
    slo_s: float,
    hop_s: float = 0.0,
) -> PlanProblem:
    """Ramps after all blocks but the last; inputs have no size."""
    return PlanProblem(
        num_blocks=len(survival_N),
        ramps=tuple(range(len(survival_N) - 1)),
        survival_N=survival_N,
        latency=latency,
        devices=devices,
        link=Link(bandwidth_bytes_per_s=1e9, delay_s=hop_s),
        bytes_per_sample_N=(0.0,) * len(survival_N),
        slo=Slo(latency_s=slo_s, slack=0.2),
        objective=MaximizeRate(),
    )


def four_blocks() -> PlanProblem:
    """10 ms a block for one input and 40 ms for eight, ramps a tenth of that; hops take 1 ms. On two V100."""
    latency = {"V100": table((1, 8), (0.010, 0.040), 4, 0.1)}
    return problem_of(latency, {"V100": Supply(count=2)}, (1.0, 1.0, 1.0, 1.0), slo_s=5.0, hop_s=0.001)


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


def two_blocks(
    *, batches: tuple[int, ...] = (1, 2), count: int = 3, slower: Mapping[str, tuple[float, float]] | None = None
) -> PlanProblem:
    """1 ms a block for any batch; half of the inputs leave after the first, at a ramp that takes nothing.

    On V100 at 2 USD/h; `slower`: further types, so many times slower, and their USD/h.
    """
    types = {"V100": (1.0, 2.0), **(slower or {})}
    latency = {name: table(batches, (0.001 * times,) * len(batches), 2) for name, (times, _) in types.items()}
    devices = {name: Supply(count=count, usd_per_hour=usd) for name, (_, usd) in types.items()}
    return problem_of(latency, devices, (1.0, 0.5), slo_s=0.1)


def half_leave() -> Workload:
    """A thousand inputs, half of which leave after the first of two blocks, in random order."""
    rng = np.random.default_rng(0)
    return workload("made up", nested((1.0, 0.5), (0,), rng, num_rows=1000), rng.permutation(1000), two_blocks())


def ours(result: StudyResult) -> dict[str, float | None]:
    """What a study compares, by name."""
    return {each.name: each.ours for each in result.comparisons}


def told(result: StudyResult) -> dict[str, str | float | None]:
    """Tables of single figures, by name."""
    return {str(row[0]): row[1] for each in result.tables if each.columns == ("", "") for row in each.rows}
