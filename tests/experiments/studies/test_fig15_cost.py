from __future__ import annotations

import pytest

from experiments.studies.fig15_cost import compare
from experiments.studies.fixed_rate import fixed_rate, least_in_fractions
from experiments.studies.kit import Bars, StudyResult
from tests.experiments.studies.two_blocks import inputs, problem

CHEAP = {"K80": (2.0, 0.5)}
"""Half as fast for a quarter of the price."""


@pytest.fixture(scope="module")
def result() -> StudyResult:
    """A K80 takes 4 ms an input for 0.5 USD/h: 600/s take 2.4 of them, so 3 of 1.5 USD/h; or 2 V100 of 4 USD/h."""
    cluster = problem(batches=(1,), slower=CHEAP)
    return compare(fixed_rate(cluster, inputs(), {}, "quick", rate_per_s=600.0), cluster, inputs())


def test_the_cheaper_type_is_bought_where_it_suffices(result: StudyResult) -> None:
    (picture,) = result.pictures
    assert isinstance(picture, Bars)
    assert picture.series["stock"] == (1.5,)
    assert picture.series["e3"] == (1.0,)
    assert result.notes[0].startswith("Batch 8: stock 3 K80, early-exit 2 K80, e3 2 K80")


def test_the_largest_and_the_least_of_all_ratios_stand_beside_the_papers(result: StudyResult) -> None:
    first, second = result.comparisons[:2]
    assert (first.ours, first.paper) == (1.5, 1.78)
    assert (second.ours, second.paper) == (1.0, 1.35)


def test_fractions_of_the_cheapest_type_are_the_least_that_a_mix_can_cost() -> None:
    device, usd_per_hour = least_in_fractions(problem(batches=(1,), slower=CHEAP), 600.0)
    assert device == "K80"
    assert usd_per_hour == pytest.approx(600 * 0.004 * 0.5)
