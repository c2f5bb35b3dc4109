"""Devices divided among models, against all divisions and all chains."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from experiments.planning.divisions import Fleet, divided, share_of
from optimizer.problem import MaximizeRate, PlanProblem, Supply
from tests.optimizer.random_problems import random_problem
from tests.optimizer.test_side_by_side import best_of_all


@pytest.mark.parametrize("place", range(4))
def test_no_division_of_a_few_devices_between_two_models_is_better(place: int) -> None:
    def on(problem: PlanProblem, counts: tuple[int, ...]) -> PlanProblem:
        devices = {name: Supply(count=count) for name, count in zip(("T4", "V100"), counts, strict=True) if count}
        return replace(problem, devices=devices, objective=MaximizeRate(), budget_usd_per_hour=None)

    small = [each for each in map(random_problem, range(120)) if len(each.latency) == 2 and each.num_blocks <= 3]
    one, other = small[2 * place : 2 * place + 2]
    fleet = Fleet([on(one, (2, 2)), on(other, (2, 2))], np.array([1.0, 2.0]))
    best = max(
        min(best_of_all(on(one, (t4, v100)), 2) or 0.0, (best_of_all(on(other, (2 - t4, 2 - v100)), 2) or 0.0) / 2)
        for t4, v100 in ((0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1))
    )
    bound, chains_M = divided(fleet, 2, seconds=60.0, gap=0.0)
    assert [share_of(fleet, chains_M), bound] == pytest.approx([best, best], rel=1e-6)
