"""Divisions of a cluster among models: against brute force if it is small, and against the bound if it is large."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from experiments.planning.fleet import CLUSTERS, fleet_of
from optimizer.problems.fleet import Fleet, FleetModel
from optimizer.problems.problem import MaximizeRate, MinimizeCost, PlanProblem, Supply
from optimizer.search.fleet.columns import divided_by_columns
from optimizer.search.fleet.prices import priced
from optimizer.search.fleet.solve import solve_fleet
from optimizer.search.space import SPACES
from profiles.lengths import Lengths
from tests.optimizer.plain_problem import random_problem
from tests.optimizer.test_chains import best_of_all

SMALL = [each for each in map(random_problem, range(120)) if len(each.latency) == 2 and each.num_blocks <= 3]


def on(problem: PlanProblem, *counts: int, rate_per_s: float | None = None) -> PlanProblem:
    """Returns the problem of the highest rate, or of the least cost, on these numbers of T4 and V100."""
    prices = {"T4": 0.35, "V100": 0.9}
    devices = {name: Supply(count=count, usd_per_hour=prices[name]) for name, count in zip(prices, counts, strict=True)}
    objective = MaximizeRate() if rate_per_s is None else MinimizeCost(rate_per_s=rate_per_s)
    return replace(problem, devices=devices, objective=objective, budget_usd_per_hour=None)


@pytest.mark.parametrize("place", range(4))
def test_no_division_of_a_few_devices_between_two_models_is_better(place: int) -> None:
    one, other = SMALL[2 * place : 2 * place + 2]
    models = {"one": FleetModel(on(one, 2, 2), 1.0), "other": FleetModel(on(other, 2, 2), 2.0)}
    fleet = Fleet(models=models, most_chains=2)
    parts = ((0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (2, 0), (2, 1))
    best = max(
        min(best_of_all(on(one, t4, v100), 2) or 0.0, (best_of_all(on(other, 2 - t4, 2 - v100), 2) or 0.0) / 2)
        for t4, v100 in parts
    )
    division = solve_fleet(fleet, time_limit_s=60.0, now_s=lambda: 0.0)
    assert best * (1 - 0.005) <= division.merit(fleet) <= best * (1 + 1e-6)
    assert best * (1 - 1e-6) <= division.bound <= max(division.merit(fleet) * (1 + 0.005), 1e-9)
    quick = divided_by_columns(fleet, priced(fleet), SPACES["best"])
    assert 0.97 * best <= quick.merit(fleet) <= best * (1 + 1e-6)
    assert quick.bound >= best * (1 - 1e-6)
    for rate in (best / 2, best * 0.9) if best else ():
        usd = min(
            (best_of_all(on(one, t4, v100, rate_per_s=rate), 2) or math.inf)
            + (best_of_all(on(other, 2 - t4, 2 - v100, rate_per_s=2 * rate), 2) or math.inf)
            for t4, v100 in parts
        )
        asked = on(one, 2, 2, rate_per_s=rate), on(other, 2, 2, rate_per_s=2 * rate)
        fleet = replace(fleet, models=dict(zip(models, map(FleetModel, asked, (rate, 2 * rate)), strict=True)))
        cheapest = solve_fleet(fleet, time_limit_s=60.0, now_s=lambda: 0.0)
        assert -cheapest.merit(fleet) == pytest.approx(usd)
        assert cheapest.bound <= usd * (1 + 1e-6)
        quick = divided_by_columns(fleet, priced(fleet), SPACES["best"])
        assert -quick.merit(fleet) == pytest.approx(usd)


@pytest.mark.parametrize("seed", [0, 1])
def test_the_share_of_models_on_ten_thousand_accelerators_is_near_its_bound(seed: int) -> None:
    fleet = fleet_of(CLUSTERS[1], seed, 3)
    division = solve_fleet(fleet, time_limit_s=60.0, now_s=lambda: 0.0)
    assert division.bound / 1.02 <= division.merit(fleet) <= division.bound


def test_inputs_with_lengths_are_planned_in_tokens() -> None:
    problem = next(each for each in SMALL if best_of_all(on(each, 2, 2), 1))
    latency = {name: replace(table, length=1) for name, table in problem.latency.items()}
    plain = on(replace(problem, latency=latency), 2, 2)
    shares = []
    for each in (plain, replace(plain, lengths=Lengths(mean=1.0))):
        fleet = Fleet(models={"m": FleetModel(each, 1.0), "n": FleetModel(each, 1.0)})
        shares.append(solve_fleet(fleet, time_limit_s=60.0, now_s=lambda: 0.0).merit(fleet))
    assert shares[1] == pytest.approx(shares[0], rel=0.01)
    assert shares[0] > 0


@pytest.mark.parametrize("count", [2, 1000])
def test_models_are_served_even_if_time_is_over_before_the_planner_is_compiled(count: int) -> None:
    problem = on(next(each for each in SMALL if best_of_all(on(each, 2, 2), 1)), count, count)
    fleet = Fleet(models={"m": FleetModel(problem, 1.0), "n": FleetModel(problem, 1.0)})
    clock = itertools.count()
    division = solve_fleet(fleet, time_limit_s=0.5, now_s=lambda: float(next(clock)))
    assert 0 < division.merit(fleet) <= division.bound


def test_models_are_planned_one_after_the_other_if_no_division_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = on(next(each for each in SMALL if best_of_all(on(each, 2, 2), 1)), 40, 40, rate_per_s=1.0)
    fleet = Fleet(models={"m": FleetModel(problem, 1.0), "n": FleetModel(problem, 1.0)})
    monkeypatch.setattr("optimizer.search.fleet.columns.exact_columns", lambda *_: [])
    monkeypatch.setattr("optimizer.search.fleet.columns._rounded", lambda _: ((), ()))
    division = solve_fleet(fleet, time_limit_s=60.0, now_s=lambda: 0.0)
    assert division.bound <= -division.merit(fleet) < math.inf
