from __future__ import annotations

import pytest

from deployments.local_ray.processes import Identity, RunNotes, SeenProcess, described, processes_of, runs_on

ME = Identity(pid=900, started=9000)
OWNER = Identity(pid=100, started=10)


def notes(*noted: tuple[int, int], owner: Identity = OWNER) -> RunNotes:
    return RunNotes(boot="b", run="mine", owner=owner, noted=tuple(Identity(pid=pid, started=at) for pid, at in noted))


def process(pid: int, started: int, parent: int = 1, *, run: str | None = None) -> SeenProcess:
    return SeenProcess(identity=Identity(pid=pid, started=started), parent=parent, name=f"p{pid}", run=run)


def left(of: RunNotes, *running: SeenProcess, boot: str = "b") -> list[int]:
    seen = {each.identity.pid: each for each in (*running, process(ME.pid, ME.started, parent=800), process(800, 1))}
    return [each.identity.pid for each in processes_of(of, boot, seen, me=ME)]


def test_what_was_noted_is_a_runs_own_only_while_it_began_when_it_was_noted() -> None:
    assert left(notes((200, 20), (201, 20), (202, 20)), process(200, 20), process(201, 21)) == [200]


def test_what_has_its_mark_is_its_own_though_nobody_noted_it() -> None:
    assert left(notes(), process(200, 20, run="mine"), process(201, 20, run="another"), process(202, 20)) == [200]


def test_what_its_processes_have_started_is_its_own() -> None:
    tree = (process(200, 20), process(201, 30, 200), process(202, 40, 201), process(203, 20, 1))
    assert left(notes((200, 20)), *tree) == [200, 201, 202]


def test_the_child_of_a_number_that_was_used_again_is_somebody_elses() -> None:
    assert left(notes((200, 20)), process(200, 25), process(201, 30, 200)) == []


def test_nothing_is_left_of_a_time_before_the_machine_started_anew() -> None:
    assert left(notes((200, 20)), process(200, 20, run="mine"), boot="c") == []


def test_who_asks_is_spared_with_those_who_started_it_and_what_it_has_started_itself() -> None:
    running = (process(901, 9001, ME.pid), process(902, 9001, ME.pid, run="mine"))
    assert left(notes((800, 1), (ME.pid, ME.started)), *running) == [902]


@pytest.mark.parametrize(
    ("owner", "boot", "goes_on"),
    [
        pytest.param(process(100, 10), "b", True, id="it-runs"),
        pytest.param(process(100, 11), "b", False, id="its-number-is-anothers"),
        pytest.param(process(101, 10), "b", False, id="it-has-ended"),
        pytest.param(process(100, 10), "c", False, id="the-machine-has-started-anew"),
    ],
)
def test_a_run_whose_owner_is_there_is_its_owners(owner: SeenProcess, boot: str, *, goes_on: bool) -> None:
    assert runs_on(notes(), boot, {owner.identity.pid: owner}, me=ME) == goes_on


def test_a_process_that_began_anew_does_not_look_after_its_run_before() -> None:
    assert not runs_on(notes(owner=ME), "b", {ME.pid: process(ME.pid, ME.started)}, me=ME)


def test_processes_are_told_by_name_and_number() -> None:
    assert described([process(7, 1), process(9, 1)]) == "p7 7, p9 9"
