"""Numbers that are far from anything measured: refused, or planned for without a warning, never a hang."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from optimizer.decision import Planned
from optimizer.planner import solve
from optimizer.problem import LEAST_BLOCK_S, MOST_BLOCK_S, MinimizeCost, MinimizeLatency, Slo
from optimizer.problem_shape import LEAST_RATE
from optimizer.soonest.bound import Allowance, best_row
from optimizer.soonest.tables import tables_of
from optimizer.space import SPACES
from tests.optimizer.test_problem_file import GOOD, OBJECTIVE, TABLE, read, refused

BLOCK = "- [0.001, 0.0015]"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        (BLOCK, "- [1e-320, 0.0015]", "6: latency of V100: a block takes 1e-09 to 1e+09 seconds, not 1e-320"),
        (BLOCK, "- [0.001, 1e300]", "8: latency.V100.block_s.0.1: Input should be less than or equal to"),
        ("usd_per_hour: 2.93", "usd_per_hour: 1e300", "13: devices.V100.usd_per_hour: Input should be less than"),
        ("1.25e9", "1e-300", "14: link.bandwidth_bytes_per_s: Input should be greater than or equal to 0.001"),
        ("delay_s: 1.0e-4", "delay_s: 1e300", "14: link.delay_s: Input should be less than or equal to"),
        ("[10, 20, 30]", "1e300", "15: bytes_per_sample: Input should be less than or equal to"),
        (
            "latency_s: 0.1",
            "latency_s: 1e-300",
            "16: slo.latency_s: Input should be greater than or equal to 0.0000",
        ),
        (
            OBJECTIVE,
            "{minimize: cost, rate_per_s: 1e-300}",
            "17: objective.rate_per_s: Input should be greater than or equal to 0.000000001, not 1e-300",
        ),
        (OBJECTIVE, "{minimize: latency, rate_per_s: 1e300}", "17: objective.rate_per_s: Input should be less than"),
    ],
)
def test_what_no_machine_does_is_refused_at_its_line(tmp_path: Path, before: str, after: str, said: str) -> None:
    assert before in GOOD
    assert refused(tmp_path, GOOD.replace(before, after, 1)).startswith(said)


@pytest.mark.parametrize("sought", [MinimizeCost, MinimizeLatency])
@pytest.mark.parametrize(("seconds", "rate_per_s"), [(LEAST_BLOCK_S, 1e6), (MOST_BLOCK_S, LEAST_RATE)])
def test_the_most_extreme_seconds_that_are_allowed_are_planned_for(
    tmp_path: Path, seconds: float, rate_per_s: float, sought: type[MinimizeCost | MinimizeLatency]
) -> None:
    table = replace(TABLE, block_s_NB=np.full((3, 2), seconds))
    problem = replace(read(tmp_path, GOOD), latency={"V100": table}, slo=Slo(latency_s=1e15))
    assert isinstance(solve(problem, "best"), Planned)
    assert isinstance(solve(replace(problem, objective=sought(rate_per_s=rate_per_s)), "best"), Planned)


def test_a_bound_is_given_where_numbers_are_too_far_apart_for_the_linear_program(tmp_path: Path) -> None:
    problem = replace(read(tmp_path, GOOD), objective=MinimizeLatency(rate_per_s=50.0), slo=Slo(latency_s=1e-300))
    tables = tables_of(problem, SPACES["best"], "stop")
    least = best_row(tables, Allowance.of(problem)).least
    assert least >= best_row(tables, replace(Allowance.of(problem), latency_s=np.inf)).least
