"""A controller that is ended, changes that break off, and a service that is not as it was told to be."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from earlyexit.clock import ManualClock
from optimizer.placement import PlacedPlan
from optimizer.plan import Plan
from optimizer.plan_file import plan_document
from tests.deployments.control.control_fakes import (
    EASY,
    POLICY,
    RAMPS,
    START_S,
    Scene,
    as_many_as_there_are,
    begun,
    halves,
    problem,
    whole,
)

TO_HALVES = ["scale split-cpu-0 to 3", "scale split-cpu-1 to 1", "prepare 1", "follow 1"]


@pytest.mark.parametrize(
    "predicted", [{"latency_s": "soon", "usd_per_hour": "dear"}, {"rate_per_s": 0.0}], ids=["words", "nothing"]
)
async def test_what_a_plan_says_of_itself_may_be_anything_but_its_rate(
    tmp_path: Path, predicted: dict[str, Any]
) -> None:
    scene = await begun(tmp_path, best=halves(3, 1), predicted=predicted)
    scene.start()
    await scene.ticks(1, EASY)
    await scene.ticks(1, EASY)
    assert scene.said("error") == []
    assert scene.fleet.followed.plan.stages == halves(3, 1)


async def test_a_new_controller_takes_up_the_plan_and_what_was_seen(tmp_path: Path) -> None:
    scene = await begun(tmp_path, looks=2, best=halves(3, 1))
    scene.fleet.log.clear()
    asked = len(scene.asked)
    scene.start()  # nothing was closed: it was killed
    await scene.ticks(1, EASY)
    assert len(scene.asked) == asked + 1, "it plans at once: what the plan stood on is gone"
    assert scene.fleet.log == []
    assert scene.loop.state.placed == scene.fleet.followed
    estimate = scene.loop.stream.observed(scene.loop.state, START_S, START_S + 120.0)
    assert estimate is not None
    assert estimate.num_inputs == 24 * 100


async def test_probes_that_cannot_be_read_any_more_do_not_keep_a_controller_from_its_plan(tmp_path: Path) -> None:
    scene = await begun(tmp_path, looks=1, best=halves(3, 1))
    with sqlite3.connect(tmp_path / "control.db") as connection:
        connection.execute("UPDATE probes SET columns = X'00'")
    connection.close()
    scene.start()
    assert scene.loop.state.placed.epoch == 1
    assert len(scene.said("error")) == 1


async def test_replicas_that_do_not_come_are_given_up_when_their_accelerators_are_gone(tmp_path: Path) -> None:
    scene = await begun(tmp_path, best=halves(3, 1))
    scene.fleet.stuck = {"split-cpu-1"}
    scene.fleet.loses = 1
    await scene.ticks(1, EASY)
    assert scene.said("error") == [
        "OfframpError: accelerators were lost while replicas were to start: split-cpu-1 runs 0 of 1"
    ]
    scene.fleet.stuck = set()
    scene.solve_as = as_many_as_there_are
    await scene.ticks(1, EASY)
    assert scene.fleet.followed.plan.stages == whole(3)


async def test_replicas_that_do_not_come_are_said_and_waited_for_again(tmp_path: Path) -> None:
    scene = await begun(tmp_path, best=halves(3, 1))
    scene.fleet.stuck = {"split-cpu-1"}
    await scene.ticks(1, EASY)
    assert scene.said("error") == ["OfframpError: replicas did not start within 120 s: split-cpu-1 runs 0 of 1"]
    scene.fleet.stuck = set()
    scene.fleet.replicas["split-cpu-1"] = 1
    await scene.ticks(1, EASY)
    assert scene.fleet.followed.plan.stages == halves(3, 1)


async def test_every_try_waits_for_replicas_that_an_earlier_one_asked_for(tmp_path: Path) -> None:
    scene = await begun(tmp_path, best=halves(3, 1))
    scene.fleet.stuck = {"split-cpu-1"}
    await scene.ticks(2, EASY)
    assert [line for line in scene.fleet.log if line.startswith("follow")] == []
    assert scene.said("error") == 2 * ["OfframpError: replicas did not start within 120 s: split-cpu-1 runs 0 of 1"]


async def test_a_plan_whose_replicas_never_come_is_given_up_and_not_taken_again(tmp_path: Path) -> None:
    scene = await begun(tmp_path, best=halves(3, 1))
    scene.fleet.stuck = {"split-cpu-1"}
    await scene.ticks(3, EASY)
    assert scene.said("error")[2:] == ["gives up plan 1: the change to it broke off again and again"]
    assert scene.fleet.log[-3:] == ["scale split-cpu-0 to 4", "prepare 2", "follow 2"]
    assert scene.fleet.followed.plan.stages == whole(4)
    await scene.ticks(48, EASY)
    assert len(scene.asked) > 2
    assert scene.fleet.followed.epoch == 2


async def test_replicas_that_come_after_all_are_not_given_up(tmp_path: Path) -> None:
    scene = await begun(tmp_path, best=halves(3, 1))
    scene.fleet.stuck = {"split-cpu-1"}
    await scene.ticks(2, EASY)
    scene.fleet.replicas["split-cpu-1"] = 1
    await scene.ticks(1, EASY)
    assert scene.fleet.followed.plan.stages == halves(3, 1)


async def test_a_plan_that_replicas_cannot_make_ready_for_is_given_up(tmp_path: Path) -> None:
    scene = await begun(tmp_path, best=halves(3, 1))
    scene.fleet.broken = {"prepare"}
    await scene.ticks(10, EASY)
    scene.fleet.broken = set()
    await scene.ticks(1, EASY)
    assert (scene.fleet.followed.epoch, scene.fleet.followed.plan.stages) == (2, whole(4))


async def test_what_ingresses_hand_over_while_a_plan_drains_is_on_disk_at_once(tmp_path: Path) -> None:
    scene = await begun(tmp_path, first=halves(2, 2))
    scene.fleet.behind = {"i"}
    rows = []

    def meanwhile() -> None:
        with closing(sqlite3.connect(tmp_path / "control.db")) as other:
            rows.append(other.execute("SELECT count(*) FROM probes").fetchone()[0])
        scene.inputs(*EASY)

    scene.meanwhile = meanwhile
    await scene.loop.apply(plan_document(Plan(stages=whole(4), policy=POLICY)))
    assert "scale split-cpu-1 to 0" in scene.fleet.log
    # 23 looks before.
    assert rows[:4] == [23, 24, 25, 26]


async def test_a_memory_that_cannot_be_written_does_not_end_the_loop(tmp_path: Path) -> None:
    scene = await begun(tmp_path, best=halves(3, 1))
    with closing(sqlite3.connect(tmp_path / "control.db")) as other:
        other.execute("DROP TABLE counts")
        other.execute("ALTER TABLE events RENAME TO gone")
        await scene.ticks(1, EASY)
        assert scene.fleet.followed.epoch == 0
        scene.history.commit()  # so that this connection may write
        other.execute("CREATE TABLE counts (at_s REAL NOT NULL, interval TEXT NOT NULL)")
        other.execute("ALTER TABLE gone RENAME TO events")
    await scene.ticks(1, EASY)
    assert scene.fleet.followed.epoch == 1


async def test_a_clock_that_was_set_back_does_not_keep_it_from_planning(tmp_path: Path) -> None:
    scene = await begun(tmp_path, best=whole(4))
    scene.clock = scene.fleet.clock = ManualClock(START_S - 600.0)
    scene.start()
    await scene.ticks(48, EASY)  # at once, and after each of two periods
    assert len(scene.asked) == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"policy": replace(POLICY, thresholds=dict.fromkeys(RAMPS, 0.7))}, "the exit policy is another now"),
        ({"problem": problem(ramps=(0, 2))}, "there are no ramps [1] any more"),
    ],
    ids=["thresholds", "ramps"],
)
async def test_the_plan_of_other_settings_is_not_taken_up_again(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    scene = await begun(tmp_path, looks=1, best=halves(3, 1))
    assert scene.loop.state.placed.epoch == 1
    for name, value in changes.items():
        setattr(scene, name, value)
    scene.start()
    assert scene.said("error") == [f"the plan that was in force cannot be taken up again: {words}"]
    assert scene.loop.state.placed == scene.placed
    scene.start()  # it was killed at once
    assert scene.loop.state.placed == scene.placed


async def test_a_slot_that_was_reset_is_told_its_replicas_again(tmp_path: Path) -> None:
    scene = await begun(tmp_path, (0, 0))
    scene.fleet.replicas["split-cpu-0"] = 1
    await scene.ticks(1)
    assert scene.fleet.log == ["scale split-cpu-0 to 4"]


async def test_a_plan_that_is_not_remembered_is_outnumbered(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.fleet.followed = PlacedPlan(plan=Plan(stages=whole(4), epoch=7), slots=("split-cpu-0",))
    await scene.loop.tick()
    assert scene.fleet.followed.epoch == 8
