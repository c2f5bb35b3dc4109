"""On processes of this machine that the test has started itself."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import queue
import signal
import subprocess
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from deployments.local_ray.processes import (
    MARK,
    Identity,
    NotedRun,
    RunNotes,
    boot_id,
    clear_left,
    end,
    identity_of,
    loss_words,
    notes_folder,
    processes_of,
    runs_on,
    watched,
)
from deployments.process_setup import Supervised, settle
from earlyexit.errors import HeadLostError

GONE = Identity(pid=2**22 + 1, started_s=1.0)
"""No system gives such a number."""
Child = subprocess.Popen[bytes]
Start = Callable[..., Child]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    notes_folder().mkdir(parents=True)
    return notes_folder()


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a process that sleeps, in a run, or does not end when it is asked to."""
    processes: list[Child] = []

    def sleeper(words: str = "echo; exec sleep 60", *, run: str = "") -> Child:
        process = subprocess.Popen(["sh", "-c", words], env=os.environ | {MARK: run}, stdout=subprocess.PIPE)
        processes.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield sleeper
    for each in processes:
        with each:  # closes its output, and waits
            each.kill()


STUBBORN = "trap '' TERM; echo; while :; do sleep 1; done"
PARENT = "env -u OFFRAMP_RUN sleep 60 & echo; wait"
"""Its child has no mark."""


def known(child: Child, later_s: float = 0.0) -> Identity:
    found = identity_of(psutil.Process(child.pid))
    return found.model_copy(update={"started_s": found.started_s + later_s})


def leave(folder: Path, run: str, owner: Identity = GONE, *noted: Identity) -> Path:
    file = folder / f"{run}.json"
    file.write_text(RunNotes(run=run, boot=boot_id(), owner=owner, noted=noted).model_dump_json(), encoding="utf-8")
    return file


def test_what_a_killed_run_left_is_ended_at_once(folder: Path, start: Start, caplog: pytest.LogCaptureFixture) -> None:
    marked, others, noted = start(run="left"), start(run="another"), start()
    file = leave(folder, "left", GONE, known(noted))
    clear_left()
    assert (marked.wait(5), noted.wait(5), others.poll()) == (-signal.SIGTERM, -signal.SIGTERM, None)
    assert not file.exists()
    [line] = caplog.messages
    assert f"sleep {marked.pid}" in line
    assert f"sleep {noted.pid}" in line


def test_a_run_has_what_was_noted_or_marked_and_their_children_but_not_this_process(start: Start) -> None:
    noted, marked, parent, later, other = start(), start(run="mine"), start(PARENT, run="mine"), start(), start()
    me = identity_of(psutil.Process())
    notes = RunNotes(run="mine", boot=boot_id(), owner=GONE, noted=(known(noted), known(later, -60.0), me, GONE))
    [child] = psutil.Process(parent.pid).children()
    found = {each.pid for each in processes_of(notes)}
    assert {noted.pid, marked.pid, parent.pid, child.pid} <= found
    assert found & {os.getpid(), os.getppid()} == set()
    child.kill()
    unmarked = RunNotes(run="none", boot=boot_id(), owner=GONE, noted=(known(later, -60.0),))
    assert processes_of(unmarked) == [], "its number was used again"
    assert other.poll() is None


@pytest.mark.parametrize(("later_s", "runs"), [(0.0, True), (-60.0, False)], ids=["it-runs", "its-number-is-anothers"])
def test_a_run_whose_owner_is_there_is_left_alone(folder: Path, start: Start, later_s: float, runs: bool) -> None:
    owner, marked = start(), start(run="runs")
    file = leave(folder, "runs", known(owner, later_s))
    clear_left()
    assert file.exists() == runs
    assert marked.poll() is None if runs else marked.wait(5) == -signal.SIGTERM


def test_the_clock_may_be_set_while_a_run_goes_on(monkeypatch: pytest.MonkeyPatch, start: Start) -> None:
    owner = identity_of(psutil.Process(start().pid))
    notes, boot_s, created_s = (
        RunNotes(run="set", boot=boot_id(), owner=owner),
        psutil.boot_time(),
        psutil.Process.create_time,
    )
    monkeypatch.setattr(psutil, "boot_time", lambda: boot_s + 60.0)
    monkeypatch.setattr(psutil.Process, "create_time", lambda process: created_s(process) + 60.0)
    assert runs_on(notes)
    assert not runs_on(notes.model_copy(update={"boot": "another"}))


def test_a_file_of_another_program_is_left_alone(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = folder / "strange.json"
    file.write_text("{}", encoding="utf-8")
    clear_left()
    assert file.exists()
    assert "is not this release's" in caplog.text


@pytest.mark.parametrize("grace_s", [0.05, 0.0])
def test_a_process_that_does_not_end_when_asked_is_killed(start: Start, grace_s: float) -> None:
    stubborn = start(STUBBORN)
    end([psutil.Process(stubborn.pid)], grace_s=grace_s)
    assert stubborn.wait(5) == -signal.SIGKILL
    end([])


def test_a_run_notes_and_ends_what_it_started_and_no_other(folder: Path, start: Start) -> None:
    run = NotedRun()
    with run.starting():
        inside = start(run=os.environ[MARK])
    outside = start()
    [file] = folder.glob("*.json")
    assert MARK not in os.environ
    [noted] = RunNotes.model_validate_json(file.read_bytes()).noted
    assert noted == known(inside)
    run.end()
    assert (inside.wait(5), outside.poll()) == (-signal.SIGTERM, None)
    assert list(folder.iterdir()) == []


def test_a_run_that_cannot_be_noted_is_told_so_once_and_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    run = NotedRun()
    with run.starting():
        assert MARK in os.environ
    run.end()
    [line] = caplog.messages
    assert line.startswith("if this process is killed, the next start will not know what it left:")


# Ray's head


@pytest.mark.parametrize(
    ("found", "words"),
    [
        pytest.param({"gcs_server": (7, -9), "raylet": (8, None)}, "gcs_server 7 was killed by SIGKILL", id="killed"),
        pytest.param({"raylet": (8, 1)}, "raylet 8 ended with status 1", id="ended"),
        pytest.param({"gcs_server": (7, -40)}, "gcs_server 7 was killed by signal 40", id="a-nameless-signal"),
        pytest.param(
            {"gcs_server": (7, -9), "raylet": (8, 0)},
            "gcs_server 7 was killed by SIGKILL, raylet 8 ended with status 0",
            id="both",
        ),
    ],
)
def test_a_loss_is_told_by_what_ended_and_how(found: dict[str, tuple[int, int | None]], words: str) -> None:
    assert loss_words(found) == f"Ray's head is gone ({words}); what was left of the service is ended"


def test_the_end_of_one_of_several_processes_is_the_loss_also_where_it_was_waited_for() -> None:
    losses: queue.Queue[HeadLostError] = queue.Queue()
    with (
        subprocess.Popen(["sleep", "60"]) as stays,
        subprocess.Popen(["sh", "-c", "read line; exit 3"], stdin=subprocess.PIPE) as ends,
    ):
        assert ends.stdin is not None
        with watched({"raylet": stays, "gcs_server": ends}, losses.put):
            assert losses.empty()
            ends.stdin.close()
            loss = losses.get(timeout=10)
        stays.kill()
    assert f"gcs_server {ends.pid} ended with status 3)" in str(loss)
    assert losses.empty()
    with watched({"gcs_server": ends}, losses.put):
        assert "ended with status 3" in str(losses.get(timeout=10))


async def fail() -> None:
    raise LookupError("no plan")


async def test_a_background_task_that_ends_by_an_error_fails_the_health_check(caplog: pytest.LogCaptureFixture) -> None:
    background, goes_on = Supervised(), asyncio.Event()
    background.start("wait", goes_on.wait())
    background.start("start", asyncio.sleep(0))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    background.check()
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "start"]
    with caplog.at_level(logging.ERROR):
        background.start("learn the plan", fail())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    with pytest.raises(RuntimeError, match=r"the background task 'learn the plan' has ended: LookupError\('no plan'\)"):
        background.check()
    assert [record.getMessage() for record in caplog.records] == ["the background task 'learn the plan' has ended"]
    goes_on.set()


class Ring:
    def __init__(self) -> None:
        self.me = self


def test_what_is_there_is_looked_at_no_more_what_comes_later_is_and_what_cannot_be_reached_is_not_kept() -> None:
    early: list[object] = []
    lost = weakref.ref(Ring())
    settle()
    try:
        late: list[object] = [early]
        looked_at = {id(each) for each in gc.get_objects()}
        assert (id(early) in looked_at, id(late) in looked_at, lost()) == (False, True, None)
    finally:
        gc.unfreeze()
