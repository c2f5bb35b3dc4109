from __future__ import annotations

from pathlib import Path

import pytest

from experiments.studies.picture import Bars, Box, Boxes, Lines, Picture, draw
from experiments.studies.study import Ratios, largest_ratios

RATES = "goodput (inputs/s)"
BARS = Bars("Rates", "batch", RATES, ("1", "8"), {"stock": (100.0, None), "e3": (90.0, 600.0)}, {"e3": (None, 550.0)})
LINES = Lines(
    "Rates by SLO",
    "SLO (ms)",
    RATES,
    (25.0, 100.0, 1000.0),
    {"e3": (1.0, None, 3.0), "half wrong": (1.0, 1.5, 2.0)},
    {"e3": (None, None, 2.5)},
    log_x=True,
    log_y=True,
)
BOX = Box(1, 2, 3, 4, 5)
BOXES = Boxes("Latency", "cluster", "latency (ms)", ("equal", "mixed"), {"stock": (BOX, BOX), "e3": (BOX, None)}, 6.0)


@pytest.mark.parametrize("picture", [BARS, LINES, BOXES], ids=["bars", "lines", "boxes"])
def test_a_picture_is_text_on_white_and_the_same_bytes_each_time(picture: Picture, tmp_path: Path) -> None:
    draw(picture, tmp_path / "new" / "one.svg")
    draw(picture, tmp_path / "two.svg")
    drawn = (tmp_path / "new" / "one.svg").read_text(encoding="utf-8")
    assert drawn == (tmp_path / "two.svg").read_text(encoding="utf-8")
    for words in (picture.title, picture.x_label, picture.y_label, *picture.series):
        assert f">{words}</text>" in drawn
    assert "fill: #ffffff" in drawn
    assert len(drawn) < 60_000
    assert ("the paper" in drawn) == (picture is not BOXES), "drawn where it says something"
    assert (">none</text>" in drawn) == (picture is BARS), "a missing bar says so"


def test_largest_ratios_are_taken_point_by_point_where_both_have_a_value() -> None:
    series = {"stock": (10.0, 20.0, None), "early-exit": (20.0, 20.0, 20.0), "e3": (15.0, 25.0, 50.0)}
    assert largest_ratios(series, "e3") == Ratios(over_stock=1.5, over_early_exit=2.5)
    costs = {"stock": (10.0, 20.0), "e3": (8.0, 10.0)}
    assert largest_ratios(costs, "e3", lower_is_better=True) == Ratios(over_stock=2.0)
    for without in ({"stock": (None,), "e3": (5.0,)}, {"stock": (5.0,)}):
        assert largest_ratios(without, "e3") == Ratios()
