"""E3, figure 14: the V100 that 6,000 inputs/s take.

    OFFRAMP_DATA=... python -m experiments.studies.fig14_gpus_needed [--quick]

Planned, then simulated: Poisson arrivals, 99 % of inputs within 100 ms. Where the plan for the rate does not hold it,
the planner is asked for more; where it does, for less.
"""

from __future__ import annotations

from collections.abc import Mapping

from experiments.e3_plans import ENTROPY, RATE_PER_S
from experiments.studies.fixed_rate import SEED, Case, FixedRate, bought, comparisons, corrections, e3_cases, fixed_rate
from experiments.studies.flat import WHY_FLAT
from experiments.studies.kit import Bars, Effort, Study, StudyResult, command
from experiments.studies.sides import E3_SLOWER, Workload, equal_cluster, sst2
from optimizer.problem import PlanProblem


def compare(
    cluster: PlanProblem,
    inputs: Workload,
    cases: Mapping[str, Case],
    effort: Effort,
    *,
    rate_per_s: float = RATE_PER_S,
) -> StudyResult:
    """On as many of the cluster's accelerators as it takes."""
    found = fixed_rate(cluster, inputs, cases, effort, rate_per_s=rate_per_s)
    return StudyResult(
        comparisons=comparisons(found),
        pictures=(_bars(found),),
        e3=found.ratios("e3"),
        best=found.ratios("best"),
        figures=found.document(),
        notes=(*bought(found), *corrections(found)),
    )


def _bars(found: FixedRate) -> Bars:
    return Bars(
        title=f"V100 that hold {found.rate_per_s:,.0f} inputs/s",
        x_label="largest batch",
        y_label="V100",
        labels=tuple(map(str, found.batches)),
        series={
            side: tuple(None if each is None else each.number for each in row) for side, row in found.needs.items()
        },
    )


def run(effort: Effort) -> StudyResult:
    """On E3's V100; quick effort has one batch limit and no other cases."""
    cluster, inputs = equal_cluster(), sst2(seed=SEED)
    cases = e3_cases(cluster, equal_cluster(1.0), inputs) if effort == "full" else {}
    return compare(cluster, inputs, cases, effort)


STUDY = Study(
    name="fig14_gpus_needed",
    figure="14",
    section="5.3",
    title="V100 for 6,000 inputs/s",
    claim="e3 needs the fewest V100 for 6,000 inputs/s at every batch size",
    detail="early-exit needs more of them than stock where batches are large.",
    how="simulated",
    exits=f"recorded: BERT-base on SST-2 dev, entropy {ENTROPY:g}",
    hardware=f"V100 (TensorRT's published times for BERT-base, x {E3_SLOWER:g}), simulated on one core",
    minutes=2,
    quick_s=8,
    seed=SEED,
    differs="TODO " + WHY_FLAT,
    run=run,
)

if __name__ == "__main__":
    command(STUDY)
