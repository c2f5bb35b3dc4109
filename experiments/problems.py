"""E3's clusters and models as problem files, and the settings of its figures (SOSP'24)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from optimizer.problems.problem import PlanProblem
from optimizer.search.space import Space

PROBLEMS = Path(__file__).parents[1] / "examples" / "problems"
SLOS_S = (0.025, 0.05, 0.1, 0.2, 0.5, 1.0)
ENTROPY = 0.4
RATE_PER_S = 6000.0
"""The fixed rate of figures 14 and 15."""
PLENTY = 64
"""Devices per type for problems that minimize their number; more devices only lengthen the search."""
RAMPS_AT_SPLIT_ENDS = Space(strategy="e3", ramps="split-ends", splits_per_stage=False, one_batch=True)
"""E3 section 5.8.6: ramps inside a split are off, except the last one."""
RAMPS_CHOSEN = Space(strategy="e3", ramps="choose", splits_per_stage=False, one_batch=True)


def stretched(problem: PlanProblem, times: float) -> PlanProblem:
    """Returns the problem with accelerators that are slower by this factor."""
    return replace(problem, latency={device: table.times(times) for device, table in problem.latency.items()})
