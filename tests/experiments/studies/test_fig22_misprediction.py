from __future__ import annotations

import pytest

from experiments.studies.fig22_misprediction import AT_ONCE, Mistakes, case, compare, mistakes, simulator
from experiments.studies.kit import Lines
from optimizer.decision import Planned
from optimizer.evaluate import evaluate, nested_reach
from optimizer.planner import solve
from tests.experiments.studies.two_blocks import inputs, problem

TRIED = case("batch 2", problem(), 2, inputs(), (0.0, 0.2, 1.0), "e3")


def by_the_cost_model(planned: Planned) -> float:
    return evaluate(TRIED.truth, planned.stages, nested_reach(TRIED.truth)).rate_per_s


def mistake(*goodput_per_s: float, case: str = "batch 8") -> Mistakes:
    return Mistakes(
        case=case,
        strategy="e3",
        direction="sees too few leave",
        errors=(0.0, 0.2, 1.0),
        goodput_per_s=goodput_per_s,
        stock_per_s=500.0,
    )


def test_what_is_lost_is_told_of_the_plan_that_knows_the_truth() -> None:
    assert mistake(1000.0, 900.0, 400.0).lost(0.2) == pytest.approx(10)
    assert mistake(0.0, 0.0, 0.0).lost(0.2) is None


def test_it_is_told_at_which_errors_stock_does_more() -> None:
    assert mistake(1000.0, 900.0, 400.0).below_stock == (1.0,)
    assert mistake(1000.0, 900.0, 500.0).below_stock == ()


def test_who_sees_nobody_leave_divides_three_accelerators_wrongly() -> None:
    # In truth the second block has half of the inputs: 2 + 1 accelerators do 4000/s. Who sees all reach it has one
    # split on three, 2 ms for two inputs as stock: 3000/s.
    few, many = mistakes(TRIED, by_the_cost_model)
    assert [each.direction for each in (few, many)] == ["sees too few leave", "sees too many leave"]
    assert few.goodput_per_s[0] == pytest.approx(4000)
    assert few.stock_per_s == pytest.approx(3000)
    assert few.goodput_per_s[2] == pytest.approx(3000)


def test_plans_are_simulated_on_the_true_exits() -> None:
    # However few stock expects to leave: it does two inputs in 2 ms, on three accelerators.
    planned = solve(TRIED.truth, "stock")
    assert isinstance(planned, Planned)
    simulate = simulator(TRIED.truth, TRIED.inputs, "quick")
    assert simulate(planned) == pytest.approx(3000, rel=0.03)


def test_the_most_and_the_least_that_e3_loses_stand_beside_the_papers_of_recorded_exits_alone() -> None:
    rows = [
        [mistake(1000.0, 900.0, 400.0)],
        [mistake(1000.0, 950.0, 400.0, case="batch 4")],
        [mistake(1000.0, 500.0, 400.0, case=AT_ONCE)],
    ]
    result = compare(rows)
    most, least = result.comparisons[:2]
    assert (most.ours, least.ours) == pytest.approx((10, 5))
    assert (most.paper, least.paper) == (8, 4)
    (picture,) = result.pictures
    assert isinstance(picture, Lines)
    assert list(picture.x) == [0.0, 20.0, 100.0]
    assert picture.series == {"e3 sees too few leave": (1000.0, 900.0, 400.0), "stock": (500.0, 500.0, 500.0)}
    assert [note.split(",")[1] for note in result.notes] == [" batch 8", f" {AT_ONCE}"]
