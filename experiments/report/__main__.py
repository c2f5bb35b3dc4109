"""Runs every study, and writes one REPORT.md with the results.

    python -m experiments.report [NAME ...] [--quick] [--jobs N] [--out FOLDER]

Results, pictures and the report go to runs/report/, with --quick to runs/report-quick/. Full results are also kept in
experiments/results/. experiments/REPORT.md is made from all of these, without pictures.
"""

from __future__ import annotations

import os
import signal
import sys
from argparse import ArgumentParser
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from pydantic import TypeAdapter
from rich.console import Console

from earlyexit.errors import DataError
from experiments import studies
from experiments.report.text import report_text
from experiments.studies.__main__ import FIGURES, FOLDERS, run_logged
from experiments.studies.picture import draw
from experiments.studies.study import About, Effort, Outcome, Record, read_record, record_of, record_path, write_record
from offramp.commands.plan import load_pyplot

KEPT, COMMITTED = Path("experiments", "results"), Path("experiments", "REPORT.md")
PRELOADED = ("experiments.studies.packing", "experiments.studies.sides", "matplotlib.pyplot", "scipy.stats")
"""Modules that are slow to import and that several studies need. They are imported once, before studies are forked."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs, writes and prints the path of the report; exits with 1 if a study failed, and with 130 after Ctrl-C."""
    parser = ArgumentParser(prog="python -m experiments.report", description="Run every study and write REPORT.md.")
    parser.add_argument("names", nargs="*", default=studies.FIGURES, help="run only these studies", metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="fewer points, into runs/report-quick")
    parser.add_argument("--jobs", type=int, default=1, help="parallel studies; above 1, measured times get worse")
    parser.add_argument("--out", type=Path, help="output folder")
    options = parser.parse_args(arguments)
    effort: Effort = "quick" if options.quick else "full"
    folder = options.out or FOLDERS[effort]
    load_pyplot()  # fails before the work rather than after it
    console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
    runner = Runner(folder=folder, effort=effort, console=console)
    try:
        records = runner.run_all(options.names, max(1, options.jobs))
    except KeyboardInterrupt:
        console.print(f"interrupted: what is finished is in {folder}")
        sys.exit(130)
    console.print(f"written: {write_report(records, folder)}")
    if not options.quick and options.out is None:
        for record in records:
            if record.outcome.state == "done":
                write_record(record, KEPT)
        COMMITTED.write_text(report_text(kept_records(), pictures=False), encoding="utf-8")
        console.print(f"written: {COMMITTED}")
    failed = [record.about.name for record in records if record.outcome.state == "failed"]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


def kept_records() -> list[Record]:
    """Returns the studies' last full results."""
    return [read_record(KEPT, name) for name in studies.FIGURES if record_path(KEPT, name).is_file()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """Runs each study in a forked process, and reads the JSON that it writes."""

    folder: Path
    effort: Effort
    console: Console

    def run_all(self, names: Sequence[str], jobs: int) -> list[Record]:
        """Returns every study's result, in the order of the names; at most `jobs` run at a time.

        Prints a line per finished study. On Ctrl-C the running studies end by themselves, and no other study begins.
        """
        waiting, running, records = deque(names), dict[int, tuple[str, BaseProcess]](), dict[str, Record]()
        while waiting or running:  # in one thread, because one of two waiting threads could miss the exit status
            while waiting and len(running) < jobs:
                process = self._start(name := waiting.popleft())
                running[process.sentinel] = name, process
            for sentinel in wait(list(running)):
                assert isinstance(sentinel, int)
                name, process = running.pop(sentinel)
                process.join()
                record = records[name] = self._read_result(name, process.exitcode or 0)
                outcome = record.outcome
                ended = f" in {outcome.took_s:.0f} s" if outcome.state == "done" else f": {outcome.reason}"
                self.console.print(f"{record.about.name:<28} {outcome.state}{ended}")
        return [records[name] for name in names]

    def _start(self, name: str) -> BaseProcess:
        """Starts the study's command."""
        path = record_path(self.folder, name.rpartition(".")[2])
        path.unlink(missing_ok=True)  # so that the result is from this run
        path.parent.mkdir(parents=True, exist_ok=True)
        arguments = [name, *(["--quick"] if self.effort == "quick" else []), "--out", str(self.folder)]
        context = get_context("forkserver")
        context.set_forkserver_preload([*PRELOADED])
        process = context.Process(target=run_logged, args=(arguments, path.with_suffix(".log"), dict(os.environ)))
        process.start()
        return process

    def _read_result(self, name: str, code: int) -> Record:
        """Returns the record that an ended study has written, or a record of its failure."""
        short = name.rpartition(".")[2]
        log = record_path(self.folder, short).with_suffix(".log")
        try:
            record = read_record(self.folder, short)
        except DataError as error:
            failed = Outcome(state="failed", reason=_reason(code, log) if code else str(error))
            return record_of(unknown(short), self.effort, failed)
        if not code:
            return record
        return record_of(record.about, self.effort, Outcome(state="failed", reason=_reason(code, log)))


def _reason(code: int, log: Path) -> str:
    if code < 0:
        return f"ended by {signal.Signals(-code).name} ({log})"
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"{lines[-1].strip() if lines else 'it printed nothing'} (exit status {code}; {log})"


def unknown(name: str) -> About:
    """Returns placeholders for a study that failed before it described itself."""
    texts = dict.fromkeys(("claim", "exits", "hardware", "differs"), "not known: the study broke before it could say")
    facts = {"name": name, "section": "?", "title": "?", "how": "computed", "minutes": 0, "quick_s": 0}
    return TypeAdapter(About).validate_python(facts | texts)


def write_report(records: Sequence[Record], folder: Path) -> Path:
    """Writes REPORT.md and the missing pictures; removes pictures that the report does not show."""
    shown = {folder / FIGURES / name: picture for record in records for name, picture in record.pictures.items()}
    drawn = set((folder / FIGURES).glob("*.svg"))
    for path in shown.keys() - drawn:
        draw(shown[path], path)
    for path in drawn - shown.keys():
        path.unlink()
    report = folder / "REPORT.md"
    report.write_text(report_text(records), encoding="utf-8")
    return report


if __name__ == "__main__":
    main()
