from __future__ import annotations

from experiments.studies.fig20_planner_overhead import compare, measure
from experiments.studies.kit import Bars
from tests.experiments.studies.two_blocks import problem

LABEL = "BERT-base, 16 V100"


def test_both_spaces_are_timed() -> None:
    rows = measure({LABEL: problem()}, 1)
    assert rows[LABEL].keys() == {"best", "e3"}
    assert all(row["seconds"] > 0 and row["gap"] == 0 for row in rows[LABEL].values())


def test_the_papers_seconds_stand_beside_ours() -> None:
    rows = {LABEL: {"best": {"seconds": 0.5, "gap": 0.0}, "e3": {"seconds": 0.25, "gap": 0.0}}}
    result = compare(rows)
    assert [(each.ours, each.paper) for each in result.comparisons] == [(0.25, 0.87), (0.5, 0.87)]
    (picture,) = result.pictures
    assert isinstance(picture, Bars)
    assert picture.paper == {"e3": (0.87,)}
    assert result.notes == ("Of these plans, 1 of 1 of `best` are proven best.",)
