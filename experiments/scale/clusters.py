"""Clusters of a thousand and ten thousand accelerators, simulated: one ingress, many, and many in cells."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import numpy as np

from experiments.problems import PROBLEMS, stretched
from experiments.studies.sides import E3_SLOWER, plan_of
from optimizer.decision import Planned
from optimizer.planner import solve
from optimizer.problem import PlanProblem, Supply
from optimizer.problem_file import read_problem
from simulator.inputs import nested
from simulator.outcome import Figures
from simulator.scenario import Scenario
from simulator.simulate import simulate
from simulator.sustained import poisson_arrivals

LOAD = 0.85
"""Of the plan's rate."""
SLOS = 20
"""Length of a simulation in SLOs, of which the first 5 are left out."""
INGRESS_PER_S = 3000.0
"""Requests that one ingress takes: half of what HAProxy and a replica with nothing to do did (docs/design.md)."""
MOST_INPUTS = 3_000_000
NUM_ROWS = 20_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """So many accelerators behind so many ingresses, in so many cells that know nothing of each other."""

    accelerators: int
    ingresses: int
    cells: int

    def __post_init__(self) -> None:
        assert self.accelerators % self.cells == 0, "cells are equal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A size, its plan, and what was simulated of one of its cells: the others are the same."""

    size: Size
    plan_s: float
    """Planning one cell."""
    gap: float
    """How far the plan may be from the best one, as a share of the bound."""
    rate_per_s: float
    """What is offered to all cells together."""
    planned_per_s: float
    stages: tuple[int, ...]
    """Replicas of one cell's stages."""
    figures: Figures
    wall_s: float


def problem_of(accelerators: int) -> PlanProblem:
    """BERT-large on so many V100 of E3's speed."""
    problem = stretched(read_problem(PROBLEMS / "bert_large_16_v100.yaml").problem, E3_SLOWER)
    return replace(problem, devices={"V100": Supply(count=accelerators, usd_per_hour=2.93)})


def planned_for(problem: PlanProblem) -> Planned:
    """The `e3` plan."""
    planned = solve(problem, "e3")
    assert isinstance(planned, Planned), planned
    return planned


def simulated(size: Size, *, seed: int = 0) -> Row:
    """Plan a cell and simulate it at LOAD."""
    problem = problem_of(size.accelerators // size.cells)
    start_s = time.perf_counter()
    planned = planned_for(problem)
    planned_s = time.perf_counter()
    figures = _simulate(problem, planned, max(1, size.ingresses // size.cells), seed)
    return Row(
        size=size,
        plan_s=planned_s - start_s,
        gap=planned.gap,
        rate_per_s=LOAD * planned.figures.rate_per_s * size.cells,
        planned_per_s=planned.figures.rate_per_s * size.cells,
        stages=tuple(stage.replicas for stage in planned.stages),
        figures=figures,
        wall_s=time.perf_counter() - planned_s,
    )


def _simulate(problem: PlanProblem, planned: Planned, num_ingresses: int, seed: int) -> Figures:
    rate_per_s, slo_s = LOAD * planned.figures.rate_per_s, problem.slo.latency_s
    duration_s = min(SLOS * slo_s, MOST_INPUTS / rate_per_s)
    rng = np.random.default_rng(seed)
    scenario = Scenario(
        problem=problem,
        plan=plan_of(planned.stages, rate_per_s=planned.figures.rate_per_s, latency_s=planned.figures.latency_s),
        decisions=nested(problem.survival_N, problem.ramps, rng, num_rows=NUM_ROWS),
        rows_N=rng.permutation(NUM_ROWS),
        arrivals_s=poisson_arrivals(rate_per_s, duration_s, seed),
        duration_s=duration_s,
        warm_up_s=duration_s / 4,
        slo_s=slo_s,
        admission=False,
        num_ingresses=num_ingresses,
    )
    return simulate(scenario).figures()


def ingresses_for(rate_per_s: float, *, cells: int) -> int:
    """Ingresses for a rate of single inputs, the same number in every cell."""
    return cells * math.ceil(rate_per_s / cells / INGRESS_PER_S)
