"""Numbers that are far from anything measured: refused, or planned for without a warning, never a hang."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from optimizer.problem import LEAST_BLOCK_S, MOST_BLOCK_S, MinimizeCost, MinimizeLatency, Slo
from optimizer.problem_shape import LEAST_RATE
from optimizer.soonest.bound import Allowance, best_row
from optimizer.space import SPACES
from optimizer.tables import tables_of
from tests.optimizer.answers import planned
from tests.optimizer.test_problem_file import GOOD, TABLE, read


@pytest.mark.parametrize("sought", [MinimizeCost, MinimizeLatency])
@pytest.mark.parametrize(("seconds", "rate_per_s"), [(LEAST_BLOCK_S, 1e6), (MOST_BLOCK_S, LEAST_RATE)])
def test_the_most_extreme_seconds_that_are_allowed_are_planned_for(
    tmp_path: Path, seconds: float, rate_per_s: float, sought: type[MinimizeCost | MinimizeLatency]
) -> None:
    table = replace(TABLE, block_s_NB=np.full((3, 2), seconds))
    problem = replace(read(tmp_path, GOOD), latency={"V100": table}, slo=Slo(latency_s=1e15))
    planned(problem)
    assert planned(replace(problem, objective=sought(rate_per_s=rate_per_s))).stages


def test_a_bound_is_given_where_numbers_are_too_far_apart_for_the_linear_program(tmp_path: Path) -> None:
    problem = replace(read(tmp_path, GOOD), objective=MinimizeLatency(rate_per_s=50.0), slo=Slo(latency_s=1e-300))
    tables = tables_of(problem, SPACES["best"], "stop")
    least = best_row(tables, Allowance.of(problem)).least
    assert least >= best_row(tables, replace(Allowance.of(problem), latency_s=np.inf)).least
