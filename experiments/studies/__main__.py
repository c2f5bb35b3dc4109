"""Runs one study: prints its claim and result, and writes JSON and SVG.

    OFFRAMP_DATA=... python -m experiments.studies fig07_homogeneous [--quick] [--out FOLDER]

Without a name, it lists all studies. `python -m experiments.report` runs all of them.
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from experiments import studies
from experiments.data import RUNS
from experiments.kit import print_table
from experiments.studies.picture import draw
from experiments.studies.study import About, Effort, Outcome, Record, Study, perform, record_of, write_record
from offramp.commands.plan import load_pyplot

FOLDERS: dict[Effort, Path] = {"full": RUNS / "report", "quick": RUNS / "report-quick"}
"""Output folders, from which the report reads."""
FIGURES = "figures"
"""Folder of the pictures, in a folder of results."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options and runs the study; a dotted name is a module of another package."""
    parser = ArgumentParser(prog="python -m experiments.studies", description=__doc__)
    parser.add_argument("name", nargs="?", help="a study, such as fig07_homogeneous")
    parser.add_argument("--quick", action="store_true", help="run fewer points; the figures must not be quoted")
    parser.add_argument("--out", type=Path, help=f"folder of the results (default {FOLDERS['full']}, or ...-quick)")
    options = parser.parse_args(arguments)
    if options.name is None or not ("." in options.name or options.name in studies.FIGURES):
        parser.error(f"a study: {', '.join(studies.FIGURES)}")
    effort: Effort = "quick" if options.quick else "full"
    run_study(studies.load(options.name), effort, options.out or FOLDERS[effort])


def run_logged(arguments: Sequence[str], log: Path, environment: Mapping[str, str]) -> None:
    """Runs this command in the current process, with the caller's environment, and writes its output to the log."""
    os.environ.update(environment)
    with log.open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    main(arguments)


def run_study(study: Study, effort: Effort, folder: Path) -> None:
    """Runs a study, and prints and writes its outcome.

    Exits with a message if its data is missing (status 0: nothing is wrong), and on Ctrl-C (130). Exceptions of the
    study pass through, and are also written to the JSON.
    """
    console = Console(highlight=False, markup=False, emoji=False)
    _introduce(study.about, effort, console)
    try:
        load_pyplot()  # fails before the work rather than after it
        record = perform(study, effort)
    except KeyboardInterrupt:
        console.print("interrupted: nothing is written")
        sys.exit(130)
    except Exception as error:
        failed = Outcome(state="failed", reason=f"{type(error).__name__}: {error}")
        write_record(record_of(study.about, effort, failed), folder)
        raise
    _conclude(record, [write_record(record, folder), *draw_all(record, folder)], console)


def draw_all(record: Record, folder: Path) -> list[Path]:
    """Draws a result's pictures; raises InputError without matplotlib."""
    paths = [folder / FIGURES / name for name in record.pictures]
    for picture, path in zip(record.pictures.values(), paths, strict=True):
        draw(picture, path)
    return paths


def _introduce(about: About, effort: Effort, console: Console) -> None:
    takes = f"{about.minutes:g} min" if effort == "full" else f"{about.quick_s:g} s, quick: not for quoting"
    console.print(f"{about.system}, {about.heading.lower()} (section {about.section}): {about.title}", style="bold")
    console.print(f"{about.system}'s claim: {about.claim}")
    console.print(f"{about.how}; exits {about.exits}; {about.hardware}; seed {about.seed}; about {takes}")


def _conclude(record: Record, written: Sequence[Path], console: Console) -> None:
    result = record.outcome.result
    if result is None:
        console.print(f"{record.outcome.state}: {record.outcome.reason}")
    else:
        columns = ("", "ours", f"{record.about.system}'s paper")
        print_table("", columns, [(each.name, each.ours, each.paper) for each in result.comparisons])
        for table in result.tables:
            print_table(table.title, table.columns, table.rows)
        console.print(f"took {record.outcome.took_s:.1f} s")
    for path in written:
        console.print(f"written: {path}", soft_wrap=True)


if __name__ == "__main__":
    main()
