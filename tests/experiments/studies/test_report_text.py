from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from experiments.report.text import report_text
from experiments.studies.kit import Comparison, Ratios, StudyResult
from experiments.studies.record import Done, Failed, Machine, Record, Skipped
from tests.experiments.studies.fig99_works import STUDY, run

MACHINE = Machine(
    created_at=datetime(2025, 1, 2, tzinfo=UTC),
    machine="abacus, 2 cores",
    python="3.11.9",
    versions={"numpy": "2.4", "offramp": "0.1"},
    commit="0123456789",
)
DONE = Record(about=STUDY.about, effort="full", outcome=Done(result=run("full"), took_s=90.0), provenance=MACHINE)

REPORT_OF_ONE = """\
- Machine: abacus, 2 cores
- Versions: Python 3.11.9, numpy 2.4, offramp 0.1
- Date: 2025-01-02
- Minutes: 1.5 over all studies
- Computed: from records, published times and the cost model; nothing is served or simulated

## All figures

| figure | E3's claim | E3's paper: e3 over stock / early-exit | ours: e3 over stock / early-exit \
| ours: best over stock / early-exit | how | exits | `python -m experiments.studies.`… |
|---|---|---|---|---|---|---|---|
| [99](#fig99_works) | e3 is up to 1.30 x stock | 1.30 / - | 1.50 / - | - | computed | none | `fig99_works` |

<a id="fig99_works"></a>

## Figure 99: a study of nothing

**E3** (section 9.9): e3 is up to 1.30 x stock.

**Here**: computed. Exits: none. Hardware: none. Seed 0.

![A model on two batches](figures/fig99_works.svg)

|  | E3's paper | ours |
|---|--:|--:|
| e3 / stock, batch 8 | 1.3 | 1.5 |

- Nothing ran.

**Why ours differs**: The paper has no such figure.

Command (took 1.5 min): `python -m experiments.studies.fig99_works`
"""


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("| [")]


def test_the_report_is_its_results_and_nothing_else() -> None:
    text = report_text([DONE])
    assert text[text.index("- Machine") :] == REPORT_OF_ONE
    assert text == report_text([DONE])


def test_the_commit_stays_out_of_it() -> None:
    assert "0123456" not in report_text([DONE])


def test_a_study_that_failed_is_a_row_that_says_so() -> None:
    text = report_text([replace(DONE, outcome=Failed(reason="PlanError: no plan"))])
    assert rows(text) == [
        "| [99](#fig99_works) | e3 is up to 1.30 x stock | 1.30 / - | **failed**: PlanError: no plan | - | - | - "
        "| `fig99_works` |"
    ]
    assert "**Failed**: PlanError: no plan" in text
    assert "figures/" not in text


def test_a_skipped_study_says_why() -> None:
    text = report_text([replace(DONE, outcome=Skipped(reason="a.csv not in OFFRAMP_DATA"))])
    assert "| **skipped**: a.csv not in OFFRAMP_DATA | - | computed | none |" in text


def test_a_study_without_ratios_shows_its_first_comparison() -> None:
    result = StudyResult(comparisons=(Comparison(name="planning (s)", ours=0.031, paper=0.87),))
    record = replace(DONE, about=replace(DONE.about, paper=Ratios()), outcome=Done(result=result, took_s=1.0))
    assert "| planning (s): 0.87 | 0.031 | - |" in rows(report_text([record]))[0]


def test_a_quick_report_warns_and_repeats_the_quick_commands() -> None:
    text = report_text([replace(DONE, effort="quick")])
    assert "not for quoting" in text
    assert "`python -m experiments.report --quick`" in text
    assert "`python -m experiments.studies.fig99_works --quick`" in text


def test_a_line_in_a_cell_does_not_break_the_table() -> None:
    text = report_text([replace(DONE, outcome=Failed(reason="a | b\nc"))])
    assert "**failed**: a \\| b c |" in rows(text)[0]


def test_results_of_several_days_and_machines_say_so() -> None:
    other = replace(MACHINE, created_at=datetime(2025, 1, 4, tzinfo=UTC), machine="slide rule")
    text = report_text([DONE, replace(DONE, provenance=other)])
    assert "- Machine: abacus, 2 cores; slide rule" in text
    assert "- Date: 2025-01-02 to 2025-01-04" in text
    assert "- Minutes: 3.0 over all studies" in text


def test_no_study_is_a_report_too() -> None:
    assert "No study ran." in report_text([])
