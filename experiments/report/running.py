"""Studies as processes of their own, some at a time."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from earlyexit.errors import DataError
from experiments.studies.command import result_path
from experiments.studies.record import Done, Failed, Record, read_record, record_of
from experiments.studies.study import About, Effort

PATIENCE_S = 30.0
"""What a study gets to end its own processes (a live service has some) before it is killed."""
NOT_SAID = "not known: the study broke before it could say"


Run = Callable[[str], Awaitable[Record]]
"""Gives a study's result by its name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Processes:
    """Runs a study's own command, and reads the JSON that it leaves."""

    folder: Path
    effort: Effort
    package: str = "experiments.studies"

    async def run(self, name: str) -> Record:
        """The study's result; a study that breaks gives one that says so. Cancelled, it ends the process first."""
        path = result_path(self.folder, name)
        path.unlink(missing_ok=True)  # what is read below is from this run
        log = path.with_suffix(".log")
        code = await _run(self.command(name), log)
        reason = _reason(code, log)
        try:
            record = read_record(path)
        except DataError as error:
            return record_of(unknown(name), self.effort, Failed(reason=reason if code else str(error)))
        return record_of(record.about, self.effort, Failed(reason=reason)) if code else record

    def command(self, name: str) -> list[str]:
        """What starts the study."""
        quick = ["--quick"] if self.effort == "quick" else []
        return [sys.executable, "-m", f"{self.package}.{name}", *quick, "--out", str(self.folder)]


def unknown(name: str) -> About:
    """Of a study that broke before it could say what it is."""
    figure = re.match(r"fig0*([0-9]+[a-z]?)_", name)
    return About(
        name=name,
        figure=figure[1] if figure else name,
        section="?",
        title="?",
        claim=NOT_SAID,
        how="computed",
        exits=NOT_SAID,
        hardware=NOT_SAID,
        minutes=0,
        quick_s=0,
        seed=0,
        differs=NOT_SAID,
    )


async def run_all(
    names: Sequence[str],
    run: Run,
    *,
    jobs: int,
    started: Callable[[str], None],
    finished: Callable[[Record], None],
) -> list[Record]:
    """Every study's result, in the order of the names; at most so many run at a time."""
    free = asyncio.Semaphore(jobs)

    async def one(name: str) -> Record:
        async with free:
            started(name)
            record = await run(name)
            finished(record)
            return record

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(name)) for name in names]
    return [task.result() for task in tasks]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """Takes results that are there and may stay; others run, after a line that says why."""

    folder: Path
    effort: Effort
    commit: str | None
    otherwise: Run
    say: Callable[[str], None]

    async def run(self, name: str) -> Record:
        """The study's result, earlier or new."""
        found = earlier(result_path(self.folder, name), self.effort, self.commit)
        self.say(f"{name}: kept" if isinstance(found, Record) else f"{name} runs: {found}")
        return found if isinstance(found, Record) else await self.otherwise(name)


def earlier(path: Path, effort: Effort, commit: str | None) -> Record | str:
    """A result that is already there and may stay, or why it may not."""
    if not path.exists():
        return "no result yet"
    try:
        record = read_record(path)
    except DataError as error:
        return str(error)
    if record.effort != effort:
        return f"the result there is from a {record.effort} run"
    if not isinstance(record.outcome, Done):
        return f"{record.outcome.state} last time"
    if commit is None or record.provenance.commit != commit:
        return f"stale: made at commit {_short(record.provenance.commit)}, this is {_short(commit)}"
    return record


async def _run(command: Sequence[str], log: Path) -> int:
    """The exit status; what the process prints goes to the log."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # so that Ctrl-C reaches it once, from `_end`, and not while it is ending
        )
        try:
            return await process.wait()
        except asyncio.CancelledError:
            await _end(process)
            raise


async def _end(process: asyncio.subprocess.Process) -> None:
    """It and its children, as Ctrl-C would, then for good."""
    if process.returncode is not None:
        return
    os.killpg(process.pid, signal.SIGINT)
    try:
        await asyncio.wait_for(process.wait(), PATIENCE_S)
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _reason(code: int, log: Path) -> str:
    if code < 0:
        return f"ended by {signal.Signals(-code).name} ({log})"
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return f"{lines[-1].strip() if lines else 'it printed nothing'} (exit status {code}; {log})"


def _short(commit: str | None) -> str:
    return "unknown" if commit is None else commit[:8]
