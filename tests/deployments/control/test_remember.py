"""The controller's memory, and the state in it."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from deployments.controller.intake import Interval
from deployments.controller.remember import KEEP_S, MOST_PLANS, History, PlanRow, State, parse_state
from earlyexit.errors import DataError
from earlyexit.network.boundary import Split
from optimizer.live.trial import Blame
from optimizer.placement import PlacedPlan
from optimizer.plan import Plan, Stage
from tests.deployments.control.control_fakes import POLICY, halves, probes, problem

PLAN = Plan(stages=halves(3, 1), policy=POLICY)


def row(epoch: int, outcome: str = "in force") -> PlanRow:
    return PlanRow(epoch=epoch, at_s=1.0, outcome=outcome, reason="period", words="better", placed={"plan": {}})


def opened(tmp_path: Path, app: str = "app") -> History:
    return History.open(tmp_path / "control.db", app)


def test_a_plan_learns_later_what_it_gained(tmp_path: Path) -> None:
    history = opened(tmp_path)
    history.add_plan(row(1))
    history.add_plan(row(1))  # an application with other settings begins at 0 again
    history.add_plan(row(2, "proposed"))
    history.gained(1, {"goodput_rps": 40.0})
    history.gained(2, {"goodput_rps": 99.0})
    assert [(each.epoch, each.outcome, each.gained) for each in history.plans(9)] == [
        (2, "proposed", None),
        (1, "in force", {"goodput_rps": 40.0}),
        (1, "in force", None),
    ]
    assert [each.epoch for each in history.plans(1)] == [2]


def test_old_rows_are_forgotten(tmp_path: Path) -> None:
    history = opened(tmp_path)
    for at_s in (0.0, 100.0):
        history.add_counts(Interval(since_s=at_s - 5.0, at_s=at_s))
        history.add_event(at_s, "keep", str(at_s))
        history.add_probes(at_s, probes([at_s], [True], PLAN))
    for epoch in range(MOST_PLANS + 5):
        history.add_plan(row(epoch))
    history.forget(KEEP_S + 50.0)
    assert [each.at_s for each in history.counts(since_s=-1.0)] == [100.0]
    assert [each["words"] for each in history.events(9)] == ["100.0"]
    assert [each.times_s_N.tolist() for each in history.probes()] == [[100.0]]
    assert [each.epoch for each in history.plans(MOST_PLANS + 9)][-1] == 5


def test_what_was_committed_survives_a_killed_process(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from pathlib import Path\n"
        "from deployments.controller.remember import History\n"
        "history = History.open(Path(sys.argv[1]), 'app')\n"
        "history.put('epoch', 7)\n"
        "history.commit()\n"
        "history.put('epoch', 8)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    root = Path(__file__).parents[3]
    ended = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "control.db")], cwd=root, env=os.environ, check=False
    )
    assert ended.returncode == -9
    History.check(tmp_path / "control.db", "app")
    assert opened(tmp_path).get("epoch") == 7


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        ("UPDATE file SET value = 'shop' WHERE key = 'app'", "belongs to application 'shop', not 'app'; give each"),
        ("UPDATE file SET value = '2' WHERE key = 'schema_version'", "has schema 2, this version reads 1; move"),
        ("DROP TABLE file", "a database of something else"),
    ],
    ids=["another application's", "another version's", "something else's"],
)
def test_a_file_of_another_application_is_refused_and_left_alone(tmp_path: Path, spoil: str, words: str) -> None:
    path = tmp_path / "control.db"
    opened(tmp_path).close()
    with closing(sqlite3.connect(path)) as connection:
        connection.execute(spoil)
        connection.commit()
    before = path.read_bytes()
    for refuse in (History.open, History.check):
        with pytest.raises(DataError, match=words):
            refuse(path, "app")
    assert path.read_bytes() == before


def test_a_file_that_is_no_database_and_a_folder_that_is_not_there_are_refused(tmp_path: Path) -> None:
    (tmp_path / "control.db").write_text("not a database, but long enough to be taken for one" * 20)
    for refuse in (History.open, History.check):
        with pytest.raises(DataError, match="cannot be used as the controller's memory"):
            refuse(tmp_path / "control.db", "app")
    with pytest.raises(DataError, match="cannot be used as the controller's memory"):
        History.open(tmp_path / "nowhere" / "control.db", "app")
    with pytest.raises(DataError, match=r"there is no folder .*nowhere"):
        History.check(tmp_path / "nowhere" / "control.db", "app")


NETWORKS = (2, 4)


def alone(epoch: int) -> Plan:
    """The last network, without the first."""
    split = Split(first=2, end=4, batch=4)
    return Plan(
        stages=(Stage(device="cpu", replicas=1, splits=(split,)),), policy=POLICY, networks=NETWORKS, epoch=epoch
    )


def test_plans_and_blames_of_a_chain_come_back_with_its_networks() -> None:
    chain = replace(problem(), networks=NETWORKS, survival_of={(1,): (1.0, 1.0, 1.0, 0.5)})
    state = State(
        placed=PlacedPlan(plan=alone(3)),
        reason="period",
        at_s=1.0,
        planned_s=1.0,
        changed_s=0.0,
        rate_changed_s=0.0,
        followed=PlacedPlan(plan=alone(2)),
        blamed=(Blame(stages=alone(0).stages, problem=chain, until=9),),
    )
    back = parse_state(json.loads(json.dumps(state.document())))
    assert (back.placed, back.followed) == (state.placed, state.followed)
    assert back.placed.plan.used == (1,)
    (blame,) = back.blamed
    assert blame.stages == alone(0).stages
    assert (blame.problem.networks, blame.problem.survival_of) == (NETWORKS, chain.survival_of)
