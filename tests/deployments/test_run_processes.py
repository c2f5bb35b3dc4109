"""On processes of this machine that the test has started itself: shells that sleep."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from deployments.local_ray.processes import (
    MARK,
    Identity,
    RunNotes,
    SeenProcess,
    boot_id,
    clear_left,
    end,
    identity_of,
    look,
    noted_run,
    notes_folder,
)

GONE = Identity(pid=2**22 + 1, started=1)
"""No system gives such a number."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    notes_folder().mkdir(parents=True)
    return notes_folder()


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for each in processes:
        with each:  # closes what it says, and waits
            each.kill()


def sleeper(
    started: list[subprocess.Popen[bytes]], *, run: str = "", stubborn: bool = False
) -> subprocess.Popen[bytes]:
    words = "trap '' TERM; echo; while :; do sleep 1; done" if stubborn else "echo; exec sleep 60"
    process = subprocess.Popen(["sh", "-c", words], env=os.environ | {MARK: run}, stdout=subprocess.PIPE)
    started.append(process)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def leave(folder: Path, run: str, owner: Identity = GONE, *noted: Identity) -> Path:
    file = folder / f"{run}.json"
    file.write_text(RunNotes(boot=boot_id(), run=run, owner=owner, noted=noted).model_dump_json(), encoding="utf-8")
    return file


def test_what_a_killed_run_left_is_ended_and_forgotten(
    folder: Path, started: list[subprocess.Popen[bytes]], caplog: pytest.LogCaptureFixture
) -> None:
    marked, others, noted = sleeper(started, run="left"), sleeper(started, run="another"), sleeper(started)
    file = leave(folder, "left", GONE, identity_of(noted.pid))
    clear_left()
    assert (marked.wait(5), noted.wait(5), others.poll()) == (-signal.SIGTERM, -signal.SIGTERM, None)
    assert not file.exists()
    [line] = caplog.messages
    assert f"sleep {marked.pid}" in line
    assert f"sleep {noted.pid}" in line


def test_a_run_whose_owner_is_there_is_left_alone(folder: Path, started: list[subprocess.Popen[bytes]]) -> None:
    owner, marked = sleeper(started), sleeper(started, run="runs")
    file = leave(folder, "runs", identity_of(owner.pid))
    clear_left()
    assert (marked.poll(), file.exists()) == (None, True)


def test_a_file_of_somebody_else_is_left_alone(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = folder / "strange.json"
    file.write_text("{}", encoding="utf-8")
    clear_left()
    assert file.exists()
    assert "holds no notes of a run" in caplog.text


@pytest.mark.parametrize("grace_s", [0.05, 0.0])
def test_who_does_not_end_when_asked_is_ended(started: list[subprocess.Popen[bytes]], grace_s: float) -> None:
    stubborn = sleeper(started, stubborn=True)
    end([look()[stubborn.pid]], grace_s=grace_s)
    assert stubborn.wait(5) == -signal.SIGKILL


def test_a_number_that_is_a_later_processes_is_not_ended(started: list[subprocess.Popen[bytes]]) -> None:
    later = sleeper(started)
    before = identity_of(later.pid).model_copy(update={"started": 1})
    end([SeenProcess(identity=before, parent=1, name="sleep"), SeenProcess(identity=GONE, parent=1, name="gone")])
    assert later.poll() is None


def test_a_run_notes_and_ends_what_it_started_and_no_other(
    folder: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    run = noted_run()
    with run.starting():
        inside = sleeper(started, run=os.environ[MARK])
    outside = sleeper(started)
    [file] = folder.glob("*.json")
    assert MARK not in os.environ
    assert RunNotes.model_validate_json(file.read_bytes()).noted == (identity_of(inside.pid),)
    run.end()
    assert (inside.wait(5), outside.poll()) == (-signal.SIGTERM, None)
    assert list(folder.iterdir()) == []


def test_who_cannot_note_anything_is_told_so_once_and_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    run = noted_run()
    with run.starting():
        assert MARK in os.environ
    run.end()
    [line] = caplog.messages
    assert line.startswith("if this process is killed, the next start will not know what it left:")
