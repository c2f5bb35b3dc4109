from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.studies.by_batch import Point
from experiments.studies.side_by_side import Row, document, out_of_order, series_of, simulated, times
from experiments.studies.sides import decide
from optimizer.decision import NoPlan
from simulator.goodput import Capacity
from tests.experiments.studies.small_cases import four_blocks, inputs_at


def row_of(**rates: float) -> Row:
    """Contenders that do so much, whatever their plan."""
    return {name: Point(decision=no_plan(), capacity=sustained(rate)) for name, rate in rates.items()}


def no_plan() -> NoPlan:
    return NoPlan(strategy="e3", binding="latency")


def sustained(rate_per_s: float) -> Capacity:
    return Capacity(rate_per_s=rate_per_s, figures=None, trials=())


def test_equal_plans_are_simulated_once() -> None:
    problem = four_blocks()
    decision = decide(problem, ("stock",))["stock"]
    row = simulated(problem, {"one": decision, "other": decision}, inputs_at(0.4), "quick")
    assert row["one"].capacity is row["other"].capacity


def test_who_has_no_plan_has_no_goodput() -> None:
    hasty = replace(four_blocks(), slo=replace(four_blocks().slo, latency_s=0.01))
    row = simulated(hasty, decide(hasty, ("stock",)), inputs_at(0.4), "quick")
    assert row["stock"].rate_per_s is None
    assert document({"SLO 10 ms": row}) == {"SLO 10 ms": {"stock": None}}


def test_a_ratio_needs_both() -> None:
    row = {**row_of(e3=300.0, stock=200.0), "best": Point(decision=no_plan(), capacity=None)}
    assert times(row, "e3", "stock") == 1.5
    assert times(row, "best", "stock") is None
    assert times(row, "serial", "stock") is None


def test_a_series_has_a_gap_where_a_row_lacks_its_contender() -> None:
    assert series_of({"batch 1": row_of(e3=1.0), "batch 8": row_of(e3=2.0, best=3.0)}) == {
        "e3": (1.0, 2.0),
        "best": (None, 3.0),
    }


@pytest.mark.parametrize(
    ("e3", "told"),
    [(95.0, ("At batch 1, e3 does 5.0% less than early-exit.",)), (99.5, ()), (120.0, ())],
    ids=["behind", "behind by less than a rate is known", "ahead"],
)
def test_a_contender_behind_the_one_before_it_is_told(e3: float, told: tuple[str, ...]) -> None:
    assert out_of_order({"batch 1": row_of(**{"early-exit": 100.0, "e3": e3})}, ("early-exit", "e3")) == told
