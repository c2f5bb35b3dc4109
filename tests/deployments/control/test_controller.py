from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from deployments.controller import remember
from deployments.controller.description import describe
from deployments.controller.remember import KEEP_S, MOST_PLANS, History, State, parse_state
from deployments.controller.settings import check_control
from deployments.settings import EmulatedSettings, ServeSettings, initial_replicas, max_accelerators
from deployments.wire.messages import Interval
from earlyexit.errors import DataError, ModelFolderError, PlanError
from earlyexit.network.store import check_prunable, read_card
from optimizer.plans.plan import PlacedPlan, Plan, Stage
from optimizer.plans.plan_file import ModelShape, parse_plan, plan_document
from optimizer.problems.problem import Supply
from optimizer.problems.problem_file import problem_document
from tests.deployments.control.control_fakes import EASY, POLICY, Scene, begun, halves, probes, problem, whole
from tests.model_cards import chain_of, change_card, write_card

SHAPE = ModelShape(num_blocks=4, ramps=(0, 1, 2))
ENTROPY = {"name": "entropy", "thresholds": 0.3}
HALVES = plan_document(Plan(stages=halves(3, 1), policy=POLICY))


def settings(tmp_path: Path, *, asked: Mapping[str, Any] = MappingProxyType({}), **changes: Any) -> ServeSettings:
    """`asked`: further settings of the controller."""
    control = {
        "problem": problem_document(problem()),
        "policy": ENTROPY,
        "state": str(tmp_path / "control.db"),
        "accuracy_budget": 0.01,
    } | dict(asked)
    plan = plan_document(Plan(stages=whole(2)))
    return ServeSettings.model_validate({"model": "m", "plan": plan, "control": control} | changes)


async def test_the_description_has_forecasts_and_measurements(tmp_path: Path) -> None:
    scene = await begun(tmp_path, ticks=3, best=halves(3, 1), settings={"accuracy_budget": 0.01})
    scene.fleet.alive = {"cpu": 6}  # more than the 4 that the service may use
    await scene.ticks(1, EASY)
    described = describe(scene.loop, scene.history, settings(tmp_path))
    assert json.dumps(described, allow_nan=False)
    assert (described["epoch"], described["slots"], described["reason"]) == (
        1,
        ["split-cpu-0", "split-cpu-1"],
        "period",
    )
    assert described["predicted"]["rate_per_s"] == pytest.approx(500.0)
    assert described["forecast"]["survival"] == pytest.approx([1.0, 1.0, 0.4, 0.4])
    observed = described["observed"]
    # Three ticks of 5 s since the change, 100 inputs in each.
    assert (observed["seconds"], observed["rate_per_s"], observed["goodput_per_s"]) == (15.0, 20.0, 20.0)
    assert observed["exits"] == {"1": 180, "3": 120}
    assert (observed["agreement"], observed["within_budget"]) == (1.0, True)
    # The next window ends 120 s after the last one, which ended 15 s ago.
    assert described["next_replan_s"] == 105.0
    assert described["accelerators"] == {"cpu": {"alive": 4, "used": 4, "emulated": False, "latency_ratio": 1.0}}
    assert described["plan_changes"] == {"period": 1}
    assert described["hops"] == {"dtype": "same", "bytes_per_input": [1.0]}
    assert [event["kind"] for event in described["events"]] == ["plan"]
    emulated = {"cpu": EmulatedSettings(batch=[1], block_s=[[0.01]] * 4, ramp_s=[[0.0]] * 3, time_scale=20.0)}
    described = describe(scene.loop, scene.history, settings(tmp_path, emulated=emulated))
    assert described["accelerators"]["cpu"]["emulated"] is True
    assert described["accelerators"]["cpu"]["time_scale"] == 20.0


async def test_each_chain_has_its_own_hops_and_its_own_exits(tmp_path: Path) -> None:
    scene = Scene(tmp_path, first=(*halves(1, 1), *whole(2)), shares=(0.5, 0.5))
    await scene.ticks(1)
    scene.clock.advance(5.0)
    scene.inputs(60, 40)
    scene.fleet.pending = [replace(each, losses_NR=np.ones_like(each.losses_NR)) for each in scene.fleet.pending]
    await scene.loop.tick()
    described = describe(scene.loop, scene.history, settings(tmp_path))
    assert described["hops"]["bytes_per_input"] == [1.0]
    assert described["observed"]["agreement"] == pytest.approx((0.4 + 1.0) / 2), "60 % lose only in the first chain"


PATIENT = {"policy": {"name": "patience", "patience": 2}}
TUNED = {"tuning": "guarantee"}
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], ModelShape, str]] = {
    "no thresholds": (PATIENT, {}, SHAPE, "needs thresholds; the policy 'patience' has none"),
    "a threshold is missing": (
        {"policy": {"name": "entropy", "thresholds": {"0": 0.3, "2": 0.3}}},
        {},
        SHAPE,
        r"no threshold for ramps \[1\]",
    ),
    "a misspelt policy": ({"policy": {"name": "entropy", "treshold": 0.3}}, {}, SHAPE, "control.policy"),
    "another model": ({}, {}, replace(SHAPE, num_blocks=6), "control.problem has 4 blocks .* the model has 6"),
    "other networks": (
        {},
        {},
        replace(SHAPE, networks=(2, 4)),
        r"control.problem has networks that end at \[\], the model's end at \[2, 4\]",
    ),
    "a first plan of other ramps": (
        {"problem": problem_document(problem(ramps=(0, 2)))},
        {"plan": HALVES},
        SHAPE,
        r"has ramps \[1\], control.problem has \[0, 2\]",
    ),
    "tuning without a budget": (
        TUNED | {"accuracy_budget": None},
        {},
        SHAPE,
        r"needs an accuracy.budget above 0 \(got none\)",
    ),
    "tuning with a budget of 0": (
        TUNED | {"accuracy_budget": 0.0},
        {},
        SHAPE,
        r"needs an accuracy.budget above 0 \(got 0\)",
    ),
    "tuning without probes": (TUNED, {"probe_share": 0.0}, SHAPE, "'guarantee' needs probes, and probe_share is 0"),
    "tuning of a model that generates": (
        TUNED,
        {},
        replace(SHAPE, generates=True),
        "needs a loss per input, but generated sequences have one loss",
    ),
}


@pytest.mark.parametrize(("asked", "changes", "shape", "words"), REFUSED.values(), ids=REFUSED)
def test_settings_that_a_controller_cannot_use_are_refused(
    tmp_path: Path, asked: dict[str, Any], changes: dict[str, Any], shape: ModelShape, words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        check_control(settings(tmp_path, asked=asked, **changes), shape)


def test_an_application_starts_with_the_plans_replicas_and_one_of_each_unused_type(tmp_path: Path) -> None:
    plain = settings(tmp_path, control=None, plan=HALVES)
    assert (initial_replicas(plain), max_accelerators(plain)) == ({"cpu": 4}, {"cpu": 4})
    asked = problem()
    wider = replace(
        asked,
        devices=dict(asked.devices)
        | {"V100": Supply(count=3, usd_per_hour=1.0), "T4": Supply(count=0, usd_per_hour=1.0)},
        latency=dict(asked.latency) | dict.fromkeys(("V100", "T4"), asked.latency["cpu"]),
    )
    controlled = settings(tmp_path, asked={"problem": problem_document(wider)})
    assert initial_replicas(controlled) == {"cpu": 2, "V100": 1}
    assert max_accelerators(controlled) == {"cpu": 4, "V100": 3}


@pytest.mark.parametrize(
    ("stages", "words"),
    [
        (whole(5), "the plan needs 5 cpu, there are 4"),
        ([replace(each, device="V100") for each in whole(1)], "on V100, which the controller's problem does not have"),
    ],
    ids=["more than accelerators", "of a type that the problem lacks"],
)
def test_a_first_plan_that_does_not_fit_is_refused(tmp_path: Path, stages: Sequence[Stage], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        initial_replicas(settings(tmp_path, plan=plan_document(Plan(stages=tuple(stages)))))


def test_a_process_refuses_another_model_than_the_one_that_its_service_runs(tmp_path: Path) -> None:
    folder = write_card(tmp_path / "model", num_blocks=4)
    started = settings(tmp_path, model=str(folder), card=read_card(folder).model_dump(mode="json"))
    assert started.read_card() == started.card
    change_card(folder, provenance={"created_at": "later"})
    with pytest.raises(ModelFolderError, match="has changed since the service started"):
        started.read_card()


def test_an_operators_plan_cannot_prune_words_of_images(tmp_path: Path) -> None:
    splits = [{"first": 0, "end": 2, "batch": 4}, {"first": 2, "end": 4, "batch": 4}]
    document = {"networks": [2, 4], "stages": [{"splits": splits}]}
    images = chain_of(tmp_path, codec={"name": "image", "height": 8, "width": 8})
    shape = ModelShape.of(read_card(images))
    check_prunable(images, parse_plan(document, shape).prune)
    with pytest.raises(PlanError, match="small: words are pruned of texts, and its inputs are encoded by 'image'"):
        check_prunable(images, parse_plan(document | {"prune": {1: 0.7}}, shape).prune)


PLAN = Plan(stages=halves(3, 1), policy=POLICY)


def add_plan(history: History, epoch: int, outcome: str = "in force") -> None:
    history.add_plan(1.0, PlacedPlan(plan=replace(PLAN, epoch=epoch)), outcome, "period", "better")


def opened(tmp_path: Path, app: str = "app") -> History:
    return History.open(tmp_path / "control.db", app)


def test_the_measurements_of_a_plan_are_stored_when_it_is_replaced(tmp_path: Path) -> None:
    history = opened(tmp_path)
    add_plan(history, 1)
    add_plan(history, 1)  # with other settings, epochs begin at 0 again
    add_plan(history, 2, "proposed")
    history.gained(1, {"goodput_rps": 40.0})
    history.gained(2, {"goodput_rps": 99.0})
    assert [(each["epoch"], each["outcome"], each["gained"]) for each in history.plans(9)] == [
        (2, "proposed", None),
        (1, "in force", {"goodput_rps": 40.0}),
        (1, "in force", None),
    ]
    assert [each["epoch"] for each in history.plans(1)] == [2]


def test_old_rows_are_forgotten(tmp_path: Path) -> None:
    history = opened(tmp_path)
    for at_s in (100.0, 0.0):  # the clock was set back
        history.add_counts(Interval(since_s=at_s - 5.0, at_s=at_s))
        history.add_event(at_s, "keep", str(at_s))
        history.add_probes(at_s, probes([at_s], [True], PLAN))
    for epoch in range(MOST_PLANS + 5):
        add_plan(history, epoch)
    assert [each["words"] for each in history.events(9)] == ["0.0", "100.0"]
    history.forget(KEEP_S + 50.0)
    assert [each.at_s for each in history.counts()] == [100.0]
    assert [each["words"] for each in history.events(9)] == ["100.0"]
    assert [each.times_s_N.tolist() for each in history.probes()] == [[100.0]]
    assert [each["epoch"] for each in history.plans(MOST_PLANS + 9)][-1] == 5


def test_history_survives_a_killed_process(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from deployments.controller.remember import History\n"
        "history = History.open(Path(sys.argv[1]), 'app')\n"
        "history.put(epoch=7)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "control.db")]
    assert subprocess.run(command, cwd=Path(__file__).parents[3], check=False).returncode == -9
    History.check(tmp_path / "control.db", "app")
    assert opened(tmp_path).get("epoch") == 7


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ("UPDATE file SET value = 'shop' WHERE key = 'app'", "belongs to application 'shop', not 'app'; each needs"),
        ("UPDATE file SET value = '2' WHERE key = 'schema_version'", "has schema 2, this version reads 1; move"),
        ("DROP TABLE file", "is another database"),
        ("PRAGMA writable_schema = 1; UPDATE sqlite_master SET rootpage = 2 WHERE name = 'counts'", "is damaged; move"),
    ],
    ids=["another application's", "another version's", "something else's", "damaged"],
)
def test_a_state_file_of_another_application_is_not_changed(tmp_path: Path, spoil: str, words: str) -> None:
    path = tmp_path / "control.db"
    opened(tmp_path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.executescript(spoil)
        connection.commit()
    before = path.read_bytes()
    for refuse in (History.open, History.check, lambda *_: check_control(settings(tmp_path, app="app"), SHAPE)):
        with pytest.raises(DataError, match=words):
            refuse(path, "app")
    assert path.read_bytes() == before


def test_a_state_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    (tmp_path / "control.db").write_text("not a database, but long enough to be taken for one" * 20)
    for refuse in (History.open, History.check):
        with pytest.raises(DataError, match="cannot be used for the controller's history"):
            refuse(tmp_path / "control.db", "app")
    with pytest.raises(DataError, match=r"cannot be used for the controller's history: there is no folder .*nowhere"):
        History.check(tmp_path / "nowhere" / "control.db", "app")


def test_a_file_whose_creation_failed_is_created_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as full:
        full.setattr(remember, "TABLES", f"{remember.TABLES} SELECT full;")
        with pytest.raises(DataError, match="no such column: full"):
            opened(tmp_path)
    opened(tmp_path).close()


NETWORKS = (2, 4)


def alone(epoch: int) -> Plan:
    """Returns a plan of the last network alone."""
    return Plan(stages=halves(3, 1)[1:], policy=POLICY, networks=NETWORKS, epoch=epoch)


def test_plans_of_a_cascade_are_read_back_with_their_networks() -> None:
    first = State.first(PlacedPlan(plan=alone(3)), {0: 0.5}, 1.0)
    state = replace(first, followed=PlacedPlan(plan=alone(2)), blamed={alone(0).stages: 9})
    back = parse_state(json.loads(json.dumps(state.document())))
    assert (back.placed, back.followed) == (state.placed, state.followed)
    assert (back.placed.plan.used, back.blamed) == ((1,), {})
