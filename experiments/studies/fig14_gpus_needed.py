"""E3, figure 14: the V100 that 6,000 inputs/s take.

Planned, then simulated: Poisson arrivals, 99 % of inputs within 100 ms. Where the plan for the rate does not hold it,
the planner is asked for more; where it does, for less. Accelerators by number; ratios by cost, which on one type is
the same.
"""

from __future__ import annotations

from experiments.problems import RATE_PER_S
from experiments.recorded_exits import BERT12_SST2
from experiments.studies.fixed_rate import FixedRate, e3_cases, fixed_rate, result_of
from experiments.studies.sides import equal_cluster, sst2
from experiments.studies.study import Effort, StudyResult, declare


def compare(found: FixedRate) -> StudyResult:
    """Accelerators by side and batch limit."""
    numbers = {side: tuple(None if each is None else each.number for each in row) for side, row in found.needs.items()}
    return result_of(found, f"V100 that hold {found.rate_per_s:,.0f} inputs/s", "V100", numbers)


def run(effort: Effort) -> StudyResult:
    """On E3's V100; quick effort has one batch limit and no other cases."""
    cluster, inputs = equal_cluster(), sst2()
    cases = e3_cases(cluster, equal_cluster(1.0), inputs) if effort == "full" else {}
    return compare(fixed_rate(cluster, inputs, cases, effort, rate_per_s=RATE_PER_S))


STUDY = declare(__name__, run, needs=(BERT12_SST2,))
