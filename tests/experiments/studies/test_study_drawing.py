from __future__ import annotations

from pathlib import Path

import pytest

from experiments.studies.drawing import COLORS, OTHER_COLORS, colors, draw
from experiments.studies.kit import Bars, Box, Boxes, Lines, Picture

BARS = Bars(
    title="Rates",
    x_label="batch",
    y_label="goodput (inputs/s)",
    labels=("1", "8"),
    series={"stock": (100.0, None), "e3": (90.0, 600.0)},
    paper={"e3": (None, 550.0)},
)
LINES = Lines(
    title="Rates by SLO",
    x_label="SLO (ms)",
    y_label="goodput (inputs/s)",
    x=(25.0, 100.0, 1000.0),
    series={"e3": (1.0, None, 3.0), "half wrong": (1.0, 1.5, 2.0)},
    paper={"e3": (None, None, 2.5)},
    log_x=True,
    log_y=True,
)
BOX = Box(minimum=1, quartile=2, median=3, third_quartile=4, maximum=5)
BOXES = Boxes(
    title="Latency",
    x_label="cluster",
    y_label="latency (ms)",
    labels=("equal", "mixed"),
    series={"stock": (BOX, BOX), "e3": (BOX, None)},
    limit=6.0,
)
each_picture = pytest.mark.parametrize("picture", [BARS, LINES, BOXES], ids=["bars", "lines", "boxes"])


@each_picture
def test_the_same_picture_gives_the_same_bytes(picture: Picture, tmp_path: Path) -> None:
    draw(picture, tmp_path / "one.svg")
    draw(picture, tmp_path / "two.svg")
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()


@each_picture
def test_its_words_are_text_on_white(picture: Picture, tmp_path: Path) -> None:
    draw(picture, tmp_path / "new" / "one.svg")
    drawn = (tmp_path / "new" / "one.svg").read_text(encoding="utf-8")
    for words in (picture.title, picture.x_label, picture.y_label, *picture.series):
        assert f">{words}</text>" in drawn
    assert "fill: #ffffff" in drawn
    assert len(drawn) < 60_000


def test_what_the_paper_says_is_drawn_where_it_says_something(tmp_path: Path) -> None:
    for name, picture in (("bars", BARS), ("lines", LINES), ("boxes", BOXES)):
        draw(picture, tmp_path / f"{name}.svg")
    found = {path.stem for path in tmp_path.glob("*.svg") if "E3's paper" in path.read_text(encoding="utf-8")}
    assert found == {"bars", "lines"}


def test_a_missing_bar_says_so(tmp_path: Path) -> None:
    draw(BARS, tmp_path / "bars.svg")
    assert ">none</text>" in (tmp_path / "bars.svg").read_text(encoding="utf-8")


def test_a_strategy_has_the_same_colour_in_every_picture() -> None:
    assert {colors(names)["e3"] for names in (["e3"], ["other", "e3"], ["e3", "best", "other"])} == {COLORS["e3"]}


def test_other_series_take_other_colours() -> None:
    chosen = colors(["e3", "20 % wrong", "50 % wrong"])
    assert [chosen["20 % wrong"], chosen["50 % wrong"]] == list(OTHER_COLORS[:2])
    assert not set(COLORS.values()) & set(OTHER_COLORS)
