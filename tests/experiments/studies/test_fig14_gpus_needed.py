from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.studies.fig14_gpus_needed import compare
from experiments.studies.fixed_rate import FixedRate, fixed_rate
from experiments.studies.kit import Bars, Ratios
from tests.experiments.studies.two_blocks import inputs, problem


@pytest.fixture(scope="module")
def found() -> FixedRate:
    """1,200/s, one input at a time: 2 ms an input for stock, 1.5 ms for the others, as half leave after the first."""
    return fixed_rate(problem(batches=(1,)), inputs(), {}, "quick", rate_per_s=1200.0)


def test_sides_are_told_by_the_accelerators_that_hold_the_rate(found: FixedRate) -> None:
    result = compare(found)
    (picture,) = result.pictures
    assert isinstance(picture, Bars)
    assert picture.series == {"stock": (3,), "early-exit": (2,), "e3": (2,), "best": (2,)}
    assert result.e3 == Ratios(over_stock=1.5, over_early_exit=1.0)
    assert result.notes[0] == "Batch 8: stock 3 V100, early-exit 2 V100, e3 2 V100, best 2 V100."


def test_other_cases_stand_beside_the_largest_batch(found: FixedRate) -> None:
    needs = {**found.needs, "stock": found.needs["e3"], "early-exit": (None,)}
    result = compare(replace(found, cases={"made up": needs}))
    assert {each.name: each.ours for each in result.comparisons} == {
        "stock / e3, batch 8": 1.5,
        "early-exit / e3, batch 8": 1.0,
        "stock / e3, batch 8, made up": 1.0,
        "early-exit / e3, batch 8, made up": None,
    }
    assert "Batch 8, made up: stock 2 V100, early-exit none, e3 2 V100, best 2 V100." in result.notes


def test_where_the_cost_model_asks_for_more_than_it_takes_that_is_told(found: FixedRate) -> None:
    result = compare(found)
    assert "For early-exit the cost model asks for 3 V100 at batch 8 (2 V100 hold the rate too)." in result.notes
