"""Tests of running studies, keeping their results, and writing the report."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from experiments import studies
from experiments.report.__main__ import COMMITTED, Runner, kept_records, unknown, write_report
from experiments.report.text import report_text
from experiments.studies.__main__ import run_study
from experiments.studies.picture import Bars, Box, Boxes, Lines, Picture, draw
from experiments.studies.study import (
    Outcome,
    Ratios,
    Record,
    Study,
    StudyResult,
    largest_ratios,
    read_record,
    write_record,
)
from tests.experiments.studies.fake_study import ABOUT, NAME, STUDY, run

MACHINE = {
    "created_at": "2025-01-02T00:00:00+00:00",
    "machine": "abacus, 2 cores",
    "python": "3.11.9",
    "versions": {"numpy": "2.4", "offramp": "0.1"},
    "commit": "0123456789",
}
DONE = Record(
    about=ABOUT, effort="full", outcome=Outcome(state="done", result=run("full"), took_s=90.0), provenance=MACHINE
)
SKIPPED = replace(DONE, outcome=Outcome(state="skipped", reason="a.csv not in OFFRAMP_DATA"))
FAILED = replace(DONE, outcome=Outcome(state="failed", reason="PlanError: no | plan\nat all"))
BOX = Box(1, 2, 3, 4, 5)
LINES = Lines("t", "x", "y", (1.0, 2.0), {"e3": (None, 2.0)})
BOXES = Boxes("t", "x", "y", ("a",), {"e3": (BOX,)}, 9.0)
PICTURES = StudyResult(comparisons=(), pictures=(LINES, BOXES))
WITH_PICTURES = replace(DONE, outcome=Outcome(state="done", result=PICTURES, took_s=1.0))


def runner(folder: Path, printed: io.StringIO | None = None) -> Runner:
    console = Console(file=printed or io.StringIO(), width=1000)
    return Runner(folder=folder, effort="quick", console=console)


@pytest.mark.parametrize("name", studies.FIGURES)
def test_a_study_of_the_folder_has_a_description(name: str) -> None:
    about = studies.load(name).about
    assert about.name == name
    assert re.fullmatch(r"(apparate_|pame_|tcb_)?(fig|table)0?([1-9][0-9]?)_.*|tabi_(table2|v100|candidates)", name)
    assert about.command == f"python -m experiments.studies {name}"
    assert about.differs
    assert about.quick_s < 60 * about.minutes


def test_a_study_prints_claim_comparison_and_tables_and_writes_json_and_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_study(STUDY, "full", tmp_path)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "E3's claim: e3 is up to 1.30 x stock [69]" in lines
    assert "computed; exits none; none; seed 0; about 0.1 min" in lines
    assert "e3 / stock, batch 8 1.5 1.3" in lines
    assert "what ran 0" in lines
    assert f"written: {tmp_path / 'fake_study.json'}" in lines
    assert read_record(tmp_path, "fake_study").about == ABOUT
    assert (tmp_path / "figures" / "fake_study.svg").exists()


def test_a_study_without_its_data_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OFFRAMP_DATA", str(tmp_path))
    (tmp_path / "there.csv").touch()
    run_study(Study(replace(ABOUT, needs=("there.csv", "absent.csv")), run), "full", tmp_path)
    outcome = read_record(tmp_path, "fake_study").outcome
    assert (outcome.state, outcome.reason) == ("skipped", "absent.csv not in OFFRAMP_DATA")


@pytest.mark.parametrize(
    "record",
    [DONE, WITH_PICTURES, SKIPPED, FAILED],
    ids=["done, with bars", "lines and boxes", "skipped", "failed"],
)
def test_a_written_record_is_read_back_equal(record: Record, tmp_path: Path) -> None:
    write_record(record, tmp_path)
    assert read_record(tmp_path, "fake_study") == record


def test_studies_run_as_processes_and_keep_their_order(tmp_path: Path) -> None:
    printed = io.StringIO()
    works, absent = runner(tmp_path, printed).run_all([NAME, f"{NAME}_absent"], 2)
    assert (works.about, works.effort, works.outcome.state) == (ABOUT, "quick", "done")
    assert absent.about == unknown("fake_study_absent")
    assert f"No module named '{NAME}_absent'" in absent.outcome.reason
    assert sorted(line.split(":")[0].split(" in ")[0].split() for line in printed.getvalue().splitlines()) == [
        ["fake_study", "done"],
        ["fake_study_absent", "failed"],
    ]


@pytest.mark.parametrize(
    ("what", "reason"),
    [("breaks", "PlanError: no plan meets the SLO (exit status 1; {log})"), ("dies", "ended by SIGKILL ({log})")],
)
def test_a_broken_study_has_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, reason: str) -> None:
    monkeypatch.setenv("OFFRAMP_FAKE", what)
    write_record(DONE, tmp_path)
    [outcome] = (each.outcome for each in runner(tmp_path).run_all([NAME], 1))
    assert outcome.state == "failed"
    assert outcome.reason.endswith(reason.format(log=tmp_path / "fake_study.log"))


def test_the_report_has_the_results_or_the_failure_of_every_study() -> None:
    text = report_text([DONE])
    for words in (
        "- Versions: Python 3.11.9, numpy 2.4, offramp 0.1\n- Commit: 01234567\n- Date: 2025-01-02\n- Minutes: 1.5",
        "| e3 is up to 1.30 x stock [69] | 1.30 / - | 1.50 / - | - | computed | none | `fake_study` |",
        "**E3** (section 9.9): e3 is up to 1.30 x stock [69].",
        "![A model on two batches](figures/fake_study.svg)\n\n|  | E3's paper | ours |",
        "| e3 / stock, batch 8 | 1.3 | 1.5 |",
        "| what ran | 0 |",
        "**Why ours differs**: The paper has no such figure.",
        "Command (took 1.5 min): `python -m experiments.studies fake_study`",
    ):
        assert words in text
    assert "figures/" not in report_text([DONE], pictures=False)
    assert "No study ran." in report_text([])
    failed, skipped = report_text([FAILED]), report_text([SKIPPED])
    assert "| 1.30 / - | **failed**: PlanError: no \\| plan at all | - | - | - | `fake_study` |" in failed
    assert "**Failed**: PlanError: no | plan\nat all" in failed
    assert "figures/" not in failed
    assert "| **skipped**: a.csv not in OFFRAMP_DATA | - | computed | none |" in skipped


def test_a_quick_report_warns_repeats_the_quick_commands_and_removes_old_pictures(tmp_path: Path) -> None:
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "fig01_gone.svg").touch()
    text = write_report([replace(DONE, effort="quick")], tmp_path).read_text(encoding="utf-8")
    assert [path.name for path in (tmp_path / "figures").iterdir()] == ["fake_study.svg"]
    assert "Do not quote" in text
    assert "`python -m experiments.report --quick`" in text
    assert "`python -m experiments.studies fake_study --quick`" in text


RATES = "goodput (inputs/s)"
BARS = Bars("Rates", "batch", RATES, ("1", "8"), {"stock": (100.0, None), "e3": (90.0, 600.0)}, {"e3": (None, 550.0)})
DRAWN_LINES = Lines(
    "Rates by SLO",
    "SLO (ms)",
    RATES,
    (25.0, 100.0, 1000.0),
    {"e3": (1.0, None, 3.0), "half wrong": (1.0, 1.5, 2.0)},
    {"e3": (None, None, 2.5)},
    log_x=True,
    log_y=True,
)
DRAWN = Boxes("Latency", "cluster", "latency (ms)", ("equal", "mixed"), {"stock": (BOX, BOX), "e3": (BOX, None)}, 6.0)


@pytest.mark.parametrize("picture", [BARS, DRAWN_LINES, DRAWN], ids=["bars", "lines", "boxes"])
def test_a_picture_is_text_on_white_and_the_same_bytes_each_time(picture: Picture, tmp_path: Path) -> None:
    draw(picture, tmp_path / "new" / "one.svg")
    draw(picture, tmp_path / "two.svg")
    drawn = (tmp_path / "new" / "one.svg").read_text(encoding="utf-8")
    assert drawn == (tmp_path / "two.svg").read_text(encoding="utf-8")
    for words in (picture.title, picture.x_label, picture.y_label, *picture.series):
        assert f">{words}</text>" in drawn
    assert "fill: #ffffff" in drawn
    assert len(drawn) < 60_000
    assert ("the paper" in drawn) == (picture is not DRAWN), "drawn where it says something"
    assert (">none</text>" in drawn) == (picture is BARS), "a missing bar says so"


def test_largest_ratios_are_taken_point_by_point_where_both_have_a_value() -> None:
    series = {"stock": (10.0, 20.0, None), "early-exit": (20.0, 20.0, 20.0), "e3": (15.0, 25.0, 50.0)}
    assert largest_ratios(series, "e3") == Ratios(over_stock=1.5, over_early_exit=2.5)
    costs = {"stock": (10.0, 20.0), "e3": (8.0, 10.0)}
    assert largest_ratios(costs, "e3", lower_is_better=True) == Ratios(over_stock=2.0)
    for without in ({"stock": (None,), "e3": (5.0,)}, {"stock": (5.0,)}):
        assert largest_ratios(without, "e3") == Ratios()


def test_the_committed_report_is_made_of_the_kept_results() -> None:
    assert [each.about.name for each in kept_records()] == [*studies.FIGURES], "of every study"
    assert COMMITTED.read_text(encoding="utf-8") == report_text(kept_records(), pictures=False)
