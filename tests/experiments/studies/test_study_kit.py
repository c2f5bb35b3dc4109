from __future__ import annotations

from dataclasses import replace

import pytest

from earlyexit.errors import InputError
from experiments.studies.kit import Bars, Box, Boxes, Comparison, Lines, Ratios, largest_ratios, ratio
from tests.experiments.studies.fig99_works import STUDY


def test_a_claim_must_fit_into_a_table() -> None:
    with pytest.raises(InputError, match="fig99_works: a claim has at most 120 characters, not 121"):
        replace(STUDY, claim="x" * 121)


def test_a_study_without_its_code_says_the_same() -> None:
    assert STUDY.about.name == STUDY.name
    assert STUDY.about.command == "python -m experiments.studies.fig99_works"
    assert not hasattr(STUDY.about, "run")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_figure_is_finite_or_none(value: float) -> None:
    with pytest.raises(InputError, match="must be finite, or None"):
        Comparison(name="rate", ours=value)


def test_largest_ratios_are_taken_point_by_point_where_both_have_a_value() -> None:
    series = {"stock": (10.0, 20.0, None), "early-exit": (20.0, 20.0, 20.0), "e3": (15.0, 25.0, 50.0)}
    assert largest_ratios(series, "e3") == Ratios(over_stock=1.5, over_early_exit=2.5)


def test_a_lower_cost_is_better_where_that_is_said() -> None:
    series = {"stock": (10.0, 20.0), "e3": (8.0, 10.0)}
    assert largest_ratios(series, "e3", lower_is_better=True) == Ratios(over_stock=2.0)


def test_there_is_no_ratio_where_no_point_has_both() -> None:
    assert largest_ratios({"stock": (None,), "e3": (5.0,)}, "e3") == Ratios()


@pytest.mark.parametrize(("one", "other"), [(None, 1.0), (1.0, None), (1.0, 0.0)])
def test_there_is_no_ratio_to_nothing(one: float | None, other: float | None) -> None:
    assert ratio(one, other) is None


def test_a_series_has_a_value_for_every_label() -> None:
    with pytest.raises(InputError, match="e3 has 1 values for 2 places"):
        Bars(title="rates", x_label="batch", y_label="inputs/s", labels=("1", "2"), series={"e3": (1.0,)})


def test_the_papers_series_is_one_of_ours() -> None:
    with pytest.raises(InputError, match="the paper's series best"):
        Bars(
            title="rates", x_label="batch", y_label="1/s", labels=("1",), series={"e3": (1.0,)}, paper={"best": (1.0,)}
        )


def test_the_papers_values_are_one_per_place_too() -> None:
    with pytest.raises(InputError, match="needs 1 finite values or None"):
        Lines(title="rates", x_label="t", y_label="1/s", x=(0.0,), series={"e3": (1.0,)}, paper={"e3": (1.0, 2.0)})


def test_nan_is_drawn_nowhere() -> None:
    with pytest.raises(InputError, match="finite values or None"):
        Bars(title="rates", x_label="batch", y_label="1/s", labels=("1",), series={"e3": (float("nan"),)})


def test_x_rises() -> None:
    with pytest.raises(InputError, match="x must rise"):
        Lines(title="rates", x_label="s", y_label="1/s", x=(1.0, 1.0), series={"e3": (1.0, 2.0)})


def test_a_picture_shows_something() -> None:
    with pytest.raises(InputError, match="nothing to show"):
        Boxes(title="latency", x_label="cluster", y_label="ms", labels=(), series={})


def test_a_box_rises_from_minimum_to_maximum() -> None:
    with pytest.raises(InputError, match="rise from minimum to maximum"):
        Box(minimum=1, quartile=2, median=1.5, third_quartile=3, maximum=4)
