"""Run every study and write the report.

    python -m experiments.report [--quick] [--jobs N] [--keep]

In full it writes experiments/REPORT.md and experiments/figures/, with the results themselves in runs/report/; where
data was missing the report goes there too. With --quick everything goes to runs/report-quick/. Minutes: the sum over
the studies, which the report gives.
"""

from __future__ import annotations

import asyncio
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from experiments.report.progress import Watch
from experiments.report.running import Keeping, Processes, Run, run_all
from experiments.report.text import report_text
from experiments.studies import FIGURES as NAMES
from experiments.studies.command import FIGURES, FOLDERS, draw_all
from experiments.studies.record import Failed, Record, Skipped
from experiments.studies.study import Effort
from offramp.cli.plan_picture import load_pyplot
from offramp.jobs.provenance import provenance

FULL_REPORT = Path("experiments")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, write and say where it is; the exit status is 1 where a study failed, 130 after Ctrl-C."""
    parser = ArgumentParser(prog="python -m experiments.report", description="Run every study and write REPORT.md.")
    parser.add_argument("--quick", action="store_true", help="fewer points, and nothing outside runs/report-quick")
    parser.add_argument("--jobs", type=int, default=1, help="studies at a time; measured times suffer above 1")
    parser.add_argument("--keep", action="store_true", help="take results of this effort and commit that are there")
    options = parser.parse_args(arguments)
    effort: Effort = "quick" if options.quick else "full"
    load_pyplot()  # refuses before the work rather than after it
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    with Watch(len(NAMES), console) as watch:
        run: Run = Processes(folder=FOLDERS[effort], effort=effort).run
        if options.keep:
            commit = provenance()["commit"]
            run = Keeping(folder=FOLDERS[effort], effort=effort, commit=commit, otherwise=run, say=watch.say).run
        records = run_studies(NAMES, run, jobs=max(1, options.jobs), watch=watch, folder=FOLDERS[effort])
    is_whole = not options.quick and not any(isinstance(record.outcome, Skipped) for record in records)
    written = write_report(records, FULL_REPORT if is_whole else FOLDERS[effort])
    console.print(f"written: {written}")
    failed = [record.about.name for record in records if isinstance(record.outcome, Failed)]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def run_studies(names: Sequence[str], run: Run, *, jobs: int, watch: Watch, folder: Path) -> list[Record]:
    """Every study's result; ends the program after Ctrl-C, with the finished ones in the folder."""
    try:
        return asyncio.run(run_all(names, run, jobs=jobs, started=watch.started, finished=watch.finished))
    except KeyboardInterrupt:
        watch.say(
            f"interrupted: {watch.done} of {len(names)} studies are finished, their results are in {folder}; "
            "--keep goes on from there. The report is as it was."
        )
        sys.exit(130)


def write_report(records: Sequence[Record], folder: Path) -> Path:
    """REPORT.md and its pictures; pictures of an earlier report that this one does not show are removed."""
    shown = [path for record in records for path in draw_all(record, folder / FIGURES)]
    for path in set((folder / FIGURES).glob("fig*.svg")) - set(shown):
        path.unlink()
    report = folder / "REPORT.md"
    folder.mkdir(parents=True, exist_ok=True)
    report.write_text(report_text(records), encoding="utf-8")
    return report


if __name__ == "__main__":
    main()
