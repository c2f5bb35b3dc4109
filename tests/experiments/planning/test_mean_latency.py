from __future__ import annotations

import pytest

from experiments.planning.mean_latency import PROBLEM, SIDES, answered, row, with_batches
from optimizer.problem_file import read_problem


def test_a_mode_of_all_plans_is_no_later_than_its_part() -> None:
    problem = with_batches(read_problem(PROBLEM).problem, [1, 4])
    assert problem.latency["V100"].batches == (1, 4)
    figures = row(30_000, answered(problem, 30_000, 0.02))
    mean_s = figures["mean_s"]
    assert list(mean_s) == list(SIDES)
    assert mean_s["stop"] <= mean_s["stock"]
    assert mean_s["stay"] <= mean_s["apparate"] < mean_s["stock"]
    assert figures["saved"]["stop"] == pytest.approx(1 - mean_s["stop"] / mean_s["stock"])
    assert figures["gap"] == 0
