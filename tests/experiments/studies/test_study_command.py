from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from earlyexit.errors import PlanError
from experiments.studies.command import number
from experiments.studies.kit import Effort, StudyResult, command
from experiments.studies.record import Failed, Skipped, read_record
from tests.experiments.studies import fig98_breaks
from tests.experiments.studies.fig99_works import STUDY


def test_it_prints_the_claim_the_comparison_and_where_the_files_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ticks = iter([0.0, 3.0])
    command(STUDY, ["--out", str(tmp_path)], clock_s=lambda: next(ticks))
    printed = capsys.readouterr().out
    assert "E3's claim: e3 is up to 1.30 x stock" in printed
    assert "computed; exits none; none; seed 0; about 0.1 min" in printed
    assert "took 3.0 s" in printed
    assert f"written: {tmp_path / 'fig99_works.json'}" in printed
    assert [line.split() for line in printed.splitlines() if "batch 8" in line] == [
        ["e3", "/", "stock,", "batch", "8", "1.5", "1.3"]
    ]


def test_it_writes_json_and_pictures(tmp_path: Path) -> None:
    command(STUDY, ["--out", str(tmp_path)])
    assert read_record(tmp_path / "fig99_works.json").about == STUDY.about
    assert (tmp_path / "figures" / "fig99_works.svg").exists()


def test_quick_is_the_same_code_on_less(tmp_path: Path) -> None:
    command(STUDY, ["--quick", "--out", str(tmp_path)])
    record = read_record(tmp_path / "fig99_works.json")
    assert record.effort == "quick"
    assert record.pictures["fig99_works.svg"].labels == ("1",)


def test_without_its_data_it_says_so_and_ends_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command(replace(STUDY, needs=("absent.csv",)), ["--out", str(tmp_path)])
    assert "skipped: absent.csv not in OFFRAMP_DATA" in capsys.readouterr().out
    assert isinstance(read_record(tmp_path / "fig99_works.json").outcome, Skipped)


def test_what_a_study_raises_is_written_and_passes_through(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no plan meets the SLO"):
        command(fig98_breaks.STUDY, ["--out", str(tmp_path)])
    outcome = read_record(tmp_path / "fig98_breaks.json").outcome
    assert outcome == Failed(reason="PlanError: no plan meets the SLO")


def test_ctrl_c_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(effort: Effort) -> StudyResult:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        command(replace(STUDY, run=interrupted), ["--out", str(tmp_path)])
    assert ended.value.code == 130
    assert "interrupted: nothing is written" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "-"), (1.4444, "1.44"), (0.012345, "0.0123"), (123.4, "123"), (8923.6, "8,924"), (0.0, "0")],
)
def test_figures_have_the_digits_that_a_reader_wants(value: float | None, text: str) -> None:
    assert number(value) == text


def test_brackets_in_a_claim_are_printed_as_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command(replace(STUDY, claim="up to 1.3 x [69]"), ["--out", str(tmp_path)])
    assert "up to 1.3 x [69]" in capsys.readouterr().out
