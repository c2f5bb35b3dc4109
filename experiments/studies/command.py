"""The command line that every study has."""

from __future__ import annotations

import sys
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from experiments.data import RUNS
from experiments.studies.drawing import draw
from experiments.studies.record import Done, Failed, Record, perform, record_of, write_record
from experiments.studies.study import Comparison, Effort, Study
from offramp.cli.plan_picture import load_pyplot

FOLDERS: dict[Effort, Path] = {"full": RUNS / "report", "quick": RUNS / "report-quick"}
"""Where results go, and where the report looks for them."""
FIGURES = "figures"
"""The pictures, below a folder of results and beside a report."""
HEAVY_BYTES = 60_000
"""A picture above this has more points than a reader can see."""


def command(
    study: Study, arguments: Sequence[str] | None = None, *, clock_s: Callable[[], float] = time.perf_counter
) -> None:
    """Run a study from the command line: print what it claims and gives, and write JSON and SVG.

    Ends with a sentence where its data is absent (exit status 0: nothing is wrong) and on Ctrl-C (130). What the study
    raises passes through, and stands in the JSON too.
    """
    parser = ArgumentParser(prog=study.command, description=f"E3, figure {study.figure}: {study.claim}")
    parser.add_argument("--quick", action="store_true", help=f"fewer points: about {study.quick_s:.0f} s")
    parser.add_argument("--out", type=Path, help=f"folder of the results (default {FOLDERS['full']}, or ...-quick)")
    options = parser.parse_args(arguments)
    effort: Effort = "quick" if options.quick else "full"
    console = Console(highlight=False, markup=False, emoji=False)
    _introduce(study, effort, console)
    folder = options.out or FOLDERS[effort]
    try:
        load_pyplot()  # refuses before the work rather than after it
        record = perform(study, effort, clock_s)
    except KeyboardInterrupt:
        console.print("interrupted: nothing is written")
        sys.exit(130)
    except Exception as error:
        failed = Failed(reason=f"{type(error).__name__}: {error}")
        write_record(record_of(study.about, effort, failed), result_path(folder, study.name))
        raise
    _conclude(record, save(record, folder), console)


def save(record: Record, folder: Path) -> list[Path]:
    """Write a result, first its figures and then its pictures."""
    path = result_path(folder, record.about.name)
    write_record(record, path)
    return [path, *draw_all(record, folder / FIGURES)]


def draw_all(record: Record, folder: Path) -> list[Path]:
    """Draw a result's pictures; raises InputError without matplotlib."""
    paths = []
    for name, picture in record.pictures.items():
        draw(picture, folder / name)
        paths.append(folder / name)
    return paths


def result_path(folder: Path, name: str) -> Path:
    """The result of a study in a folder of results."""
    return folder / f"{name}.json"


def _introduce(study: Study, effort: Effort, console: Console) -> None:
    takes = f"{study.minutes:g} min" if effort == "full" else f"{study.quick_s:g} s, quick: not for quoting"
    console.print(f"E3 figure {study.figure} (section {study.section}): {study.title}", style="bold")
    console.print(f"E3's claim: {study.claim}")
    console.print(f"{study.how}; exits {study.exits}; {study.hardware}; seed {study.seed}; about {takes}")


def _conclude(record: Record, written: Sequence[Path], console: Console) -> None:
    if isinstance(record.outcome, Done):
        console.print(_table(record.outcome.result.comparisons))
        for note in record.outcome.result.notes:
            console.print(f"- {note}")
        console.print(f"took {record.outcome.took_s:.1f} s")
    else:
        console.print(f"{record.outcome.state}: {record.outcome.reason}")
    for path in written:
        console.print(f"written: {path}", soft_wrap=True)
        if path.stat().st_size > HEAVY_BYTES and path.suffix == ".svg":
            console.print(f"{path.name} has {path.stat().st_size:,} bytes: fewer points would show the same")


def _table(comparisons: Sequence[Comparison]) -> Table:
    table = Table("", box=None)
    table.add_column("ours", justify="right")
    table.add_column("E3's paper", justify="right")
    for each in comparisons:
        table.add_row(each.name, number(each.ours), number(each.paper))
    return table


def number(value: float | None) -> str:
    """A figure as a reader wants it: three digits, and whole above a thousand."""
    if value is None:
        return "-"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
