"""Tests that every study runs with quick effort and gives the figures in `quick_figures.json`.

The file lacks studies that measure times or train ramps, because their figures depend on the processor. `python -m
tests.experiments.studies.test_every_study FOLDER` rewrites the file from a folder of quick results, as written by `make
report-quick`. A commit that changes a figure explains why.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from experiments import studies
from experiments.studies.study import StudyResult, perform, read_record

HELD = Path(__file__).with_name("quick_figures.json")
NOT_HELD = ("fig08_vision", "fig20_planner_overhead", "pame_fig16_load_changes", "tcb_fig16_overhead")
MOST_S = 1.0
"""Studies that take longer run with `-m slow`; `make report-quick` runs all of them."""


def figures_of(result: StudyResult) -> dict[str, float | None]:
    """Returns the comparisons with the paper, without figures that depend on this machine."""
    measured = ("processor time", "this CPU")
    return {each.name: each.ours for each in result.comparisons if not any(words in each.name for words in measured)}


def cases() -> list[Any]:
    found = []
    for name in studies.FIGURES:
        marks = [pytest.mark.slow] if studies.load(name).about.quick_s > MOST_S else []
        found.append(pytest.param(name, marks=marks))
    return found


@pytest.mark.parametrize("name", cases())
def test_a_study_gives_its_recorded_figures(name: str) -> None:
    outcome = perform(studies.load(name), "quick").outcome
    if outcome.state == "skipped":
        pytest.skip(outcome.reason)
    assert outcome.result is not None
    assert outcome.result.pictures or outcome.result.tables
    figures = figures_of(outcome.result)
    if name in NOT_HELD:
        assert all(value is not None for value in figures.values())
    else:
        held = json.loads(HELD.read_text(encoding="utf-8"))[name]
        # Models that were trained on this machine add figures.
        found = {figure: figures.get(figure) for figure in held}
        assert found == {figure: pytest.approx(value, rel=1e-6) for figure, value in held.items()}


if __name__ == "__main__":
    names = [name for name in studies.FIGURES if name not in NOT_HELD]
    results = {name: read_record(Path(sys.argv[1]), name).outcome.result for name in names}
    found = {name: figures_of(result) for name, result in results.items() if result is not None}
    HELD.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
