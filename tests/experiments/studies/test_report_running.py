from __future__ import annotations

import asyncio
import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from experiments.report.__main__ import run_studies, write_report
from experiments.report.progress import Watch
from experiments.report.running import Keeping, Processes, earlier, run_all, unknown
from experiments.studies.command import save
from experiments.studies.record import Done, Failed, Record, Skipped, perform, record_of, write_record
from tests.experiments.studies.fig99_works import STUDY

PACKAGE = "tests.experiments.studies"


def record(name: str = "fig99_works", commit: str | None = "c1") -> Record:
    about = replace(STUDY.about, name=name)
    return with_commit(replace(perform(STUDY, "full", lambda: 0.0), about=about), commit)


def with_commit(record: Record, commit: str | None) -> Record:
    return replace(record, provenance=replace(record.provenance, commit=commit))


class Runner:
    """Studies that end when the test says so; keeps who began and who is running."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.ends: dict[str, asyncio.Event] = {}

    async def run(self, name: str) -> Record:
        self.begun.append(name)
        self.ends[name] = asyncio.Event()
        await self.ends[name].wait()
        return record(name)


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_only_so_many_run_at_a_time_and_results_keep_the_order_of_the_names() -> None:
    runner, finished = Runner(), list[str]()
    running = asyncio.create_task(
        run_all(
            ["a", "b", "c"],
            runner.run,
            jobs=2,
            started=lambda name: None,
            finished=lambda record: finished.append(record.about.name),
        )
    )
    await settle()
    assert runner.begun == ["a", "b"]
    runner.ends["b"].set()
    await settle()
    assert runner.begun == ["a", "b", "c"]
    runner.ends["c"].set()
    runner.ends["a"].set()
    assert [each.about.name for each in await running] == ["a", "b", "c"]
    assert finished[0] == "b"


async def test_studies_run_as_processes_and_a_broken_one_says_so(tmp_path: Path) -> None:
    processes = Processes(folder=tmp_path, effort="quick", package=PACKAGE)
    works, breaks, absent = await asyncio.gather(*map(processes.run, ("fig99_works", "fig98_breaks", "fig96_absent")))
    assert isinstance(works.outcome, Done)
    assert works.effort == "quick"
    assert isinstance(breaks.outcome, Failed)
    assert "PlanError: no plan meets the SLO (exit status 1; " in breaks.outcome.reason
    assert breaks.about.figure == "98"
    assert isinstance(absent.outcome, Failed)
    assert "No module named tests.experiments.studies.fig96_absent" in absent.outcome.reason
    assert absent.about == unknown("fig96_absent")


async def test_a_study_that_the_system_kills_says_by_what(tmp_path: Path) -> None:
    found = await Processes(folder=tmp_path, effort="full", package=PACKAGE).run("fig95_dies")
    assert found.outcome == Failed(reason=f"ended by SIGKILL ({tmp_path / 'fig95_dies.log'})")
    assert found.about.figure == "95"


async def test_a_result_of_an_earlier_run_is_not_taken_for_a_new_one(tmp_path: Path) -> None:
    write_record(record("fig96_absent"), tmp_path / "fig96_absent.json")
    found = await Processes(folder=tmp_path, effort="full", package=PACKAGE).run("fig96_absent")
    assert isinstance(found.outcome, Failed)


@pytest.mark.usefixtures("interruptible")
async def test_a_cancelled_study_is_interrupted_and_waited_for(tmp_path: Path) -> None:
    running = asyncio.create_task(Processes(folder=tmp_path, effort="full", package=PACKAGE).run("fig97_waits"))
    log = tmp_path / "fig97_waits.log"
    async with asyncio.timeout(60):
        while not (log.exists() and "begun" in log.read_text(encoding="utf-8")):  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert "interrupted: nothing is written" in log.read_text(encoding="utf-8")


def test_a_result_of_this_commit_and_effort_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    assert earlier(path, "full", "c1") == "no result yet"
    write_record(record(commit="c1"), path)
    assert isinstance(earlier(path, "full", "c1"), Record)
    assert earlier(path, "quick", "c1") == "the result there is from a full run"


@pytest.mark.parametrize(
    ("made", "now", "words"),
    [
        ("c1", "c2", "stale: made at commit c1, this is c2"),
        (None, None, "stale: made at commit unknown, this is unknown"),
    ],
)
def test_a_result_of_another_commit_is_stale(tmp_path: Path, made: str | None, now: str | None, words: str) -> None:
    write_record(record(commit=made), tmp_path / "a.json")
    assert earlier(tmp_path / "a.json", "full", now) == words


@pytest.mark.parametrize(
    ("outcome", "words"),
    [(Failed(reason="it broke"), "failed last time"), (Skipped(reason="no data"), "skipped last time")],
)
def test_what_did_not_run_last_time_runs_again(tmp_path: Path, outcome: Failed | Skipped, words: str) -> None:
    write_record(record_of(STUDY.about, "full", outcome), tmp_path / "a.json")
    assert earlier(tmp_path / "a.json", "full", "c1") == words


def test_a_file_that_is_no_result_runs_again(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{}", encoding="utf-8")
    assert "no result of this version" in str(earlier(tmp_path / "a.json", "full", "c1"))


async def test_keeping_runs_only_what_it_cannot_keep(tmp_path: Path) -> None:
    write_record(record("fig99_works"), tmp_path / "fig99_works.json")
    ran, said = list[str](), list[str]()

    async def run(name: str) -> Record:
        ran.append(name)
        return record(name)

    keeping = Keeping(folder=tmp_path, effort="full", commit="c1", otherwise=run, say=said.append)
    await keeping.run("fig99_works")
    await keeping.run("fig98_breaks")
    assert ran == ["fig98_breaks"]
    assert said == ["fig99_works: kept", "fig98_breaks runs: no result yet"]


def test_without_a_terminal_every_study_is_one_line() -> None:
    printed = io.StringIO()
    with Watch(2, Console(file=printed)) as watch:
        for each in (record(), replace(record("fig98_breaks"), outcome=Failed(reason="it broke"))):
            watch.started(each.about.name)
            watch.finished(each)
    assert printed.getvalue().split("\n") == [
        "fig99_works                  done in 0 s",
        "fig98_breaks                 failed: it broke",
        "",
    ]


def test_after_ctrl_c_it_says_what_is_finished_and_where(tmp_path: Path) -> None:
    async def run(name: str) -> Record:
        if name == "second":
            raise KeyboardInterrupt
        return record(name)

    printed = io.StringIO()
    with Watch(2, Console(file=printed, width=200)) as watch, pytest.raises(SystemExit) as ended:
        run_studies(["first", "second"], run, jobs=1, watch=watch, folder=Path("runs/report"))
    assert ended.value.code == 130
    assert "interrupted: 1 of 2 studies are finished, their results are in runs/report;" in printed.getvalue()


def test_the_report_stands_beside_the_pictures_it_shows_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "figures").mkdir()
    (tmp_path / "figures" / "fig01_gone.svg").touch()
    written = write_report([record()], tmp_path)
    assert "figures/fig99_works.svg" in written.read_text(encoding="utf-8")
    assert [path.name for path in (tmp_path / "figures").iterdir()] == ["fig99_works.svg"]


def test_a_kept_result_gives_the_picture_that_its_run_gave(tmp_path: Path) -> None:
    save(record(), tmp_path / "results")
    write_report([record()], tmp_path / "report")
    pictures = [tmp_path / place / "figures" / "fig99_works.svg" for place in ("results", "report")]
    assert pictures[0].read_bytes() == pictures[1].read_bytes()
