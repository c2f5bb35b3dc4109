from __future__ import annotations

from dataclasses import replace

import pytest

from deployments.ops.dashboard.snapshot import Snapshot
from deployments.ops.dashboard.state import MOST_REPLICAS, blocks_state, plan_state
from optimizer.placement import initial_placement
from tests.deployments.ingress.dashboard.dashboard_scene import (
    FACTS,
    FIRST,
    REST,
    ingress,
    placed,
    ran,
    replica,
    snapshot,
)

CPU, P100 = "split-cpu-0", "split-emulated-P100-0"


def looks() -> list[Snapshot]:
    """Two seconds: 3 batches of 8 and 1 of 4 in front, 2 of 3 behind; what ran before them does not count."""
    before = [replica("r", CPU, ran(FIRST, 8, 100, 50.0)), replica("s", P100, ran(REST, 1, 10, 1.0))]
    after = [
        replica("r", CPU, ran(FIRST, 8, 102, 51.0), waiting=5),
        replica("new", CPU, ran(FIRST, 8, 1), ran(FIRST, 4, 1)),
        replica("s", P100, ran(REST, 1, 10, 1.0), ran(REST, 3, 2, 1.5)),
    ]
    return [snapshot(10.0, ingress(), replicas=before), snapshot(12.0, ingress(), replicas=after)]


def test_where_inputs_stay_batches_do_not_shrink_and_other_splits_runs_are_not_theirs() -> None:
    stays = initial_placement(placed().plan.with_after_answer("stay"))
    first = stays.plan.splits[0]
    ran_here = [
        replica("r", CPU, ran(first, 4, 10), ran(FIRST, 8, 10)),
        replica("s", P100, ran(stays.plan.splits[1], 3, 10)),
    ]
    both = [snapshot(0.0, ingress(), placed=stays), snapshot(2.0, ingress(), placed=stays, replicas=ran_here)]
    assert plan_state(FACTS, both)["after_answer"] == "stay"
    shown = blocks_state(both, [1.0, 0.5, 0.25, 0.25])
    assert [(block["fused"], block["unfused"]) for block in shown] == [(4.0, 4.0), (4.0, 4.0), (3.0, 4.0), (3.0, 4.0)]


def test_splits_have_the_mean_batch_that_ran_on_all_replicas() -> None:
    first, rest = plan_state(FACTS, looks())["stages"]
    by_inputs = {"tokens": None, "token_fill": None}
    assert first["splits"] == [
        {"first": 0, "end": 2, "batch": 8, "ramps": [0, 1], "size": 7.0, "fill": 7 / 8, "batches_per_s": 2.0}
        | {"size_tokens": 7.0, "network": "intents", **by_inputs}
    ]
    assert rest["splits"] == [
        {"first": 2, "end": 4, "batch": 4, "ramps": [], "size": 3.0, "fill": 3 / 4, "batches_per_s": 1.0}
        | {"size_tokens": 3.0, "network": "intents", **by_inputs}
    ]


def test_where_tokens_bound_batches_they_say_how_full_they_were() -> None:
    split = replace(FIRST, tokens=320)
    plan = replace(placed().plan, stages=(replace(placed().plan.stages[0], splits=(split,)), placed().plan.stages[1]))
    now = [replica("r", CPU, ran(split, 8, 1, length=20), ran(split, 2, 3, length=100))]
    both = [
        snapshot(at_s, ingress(), placed=initial_placement(plan), replicas=now if at_s else ()) for at_s in (0.0, 2.0)
    ]
    [shown] = plan_state(FACTS, both)["stages"][0]["splits"]
    assert (shown["batch"], shown["size"], shown["tokens"], shown["size_tokens"]) == (8, 3.5, 320, 190.0)
    assert (shown["fill"], shown["token_fill"]) == (3.5 / 8, 190 / 320)


def test_stages_say_where_they_run_and_what_is_missing() -> None:
    before, after = looks()
    first, rest = plan_state(FACTS, [before, after])["stages"]
    assert (first["device"], first["time_scale"], first["wanted"], first["running"]) == ("cpu", None, 2, 2)
    assert (rest["device"], rest["time_scale"], rest["wanted"], rest["running"]) == ("emulated:P100", 2.0, 1, 1)
    assert plan_state(FACTS, [before])["stages"][0]["running"] == 1
    assert first["waiting"] == 5


def test_replicas_say_how_busy_they_were_and_which_of_them_rest() -> None:
    before, after = looks()
    plan = placed().plan
    resting = type(after.placed)(plan=plan, slots=after.placed.slots, avoided={"new": CPU})
    now = snapshot(12.0, ingress(), replicas=after.replicas, placed=resting)
    replicas = plan_state(FACTS, [before, now])["stages"][0]["replicas"]
    assert [(one["name"], one["busy"], one["rests"]) for one in replicas] == [("new", 0.0, True), ("r", 0.5, False)]


def test_of_many_replicas_some_are_listed_and_all_are_counted() -> None:
    many = [replica(f"{index:03}", CPU) for index in range(MOST_REPLICAS + 5)]
    [first, _] = plan_state(FACTS, [snapshot(0.0, ingress(), replicas=many)])["stages"]
    assert (len(first["replicas"]), first["running"]) == (MOST_REPLICAS, MOST_REPLICAS + 5)


def test_what_was_promised_is_the_plans_and_why_it_is_in_force_the_controllers() -> None:
    promised = placed(3, predicted={"rate_per_s": 812.0, "latency_s": 0.04})
    described = {"epoch": 3, "reason": "period", "in_force_since_s": 7.0}
    state = plan_state(FACTS, [snapshot(9.0, ingress(), placed=promised, described=described)])
    assert state["predicted"] == {"rate_per_s": 812.0, "latency_s": 0.04, "usd_per_hour": None}
    assert (state["epoch"], state["reason"], state["since_s"]) == (3, "period", 7.0)


def test_what_the_controller_says_of_another_plan_is_not_said_of_this_one() -> None:
    described = {"epoch": 2, "reason": "period", "in_force_since_s": 7.0}
    state = plan_state(FACTS, [snapshot(9.0, ingress(), placed=placed(3), described=described)])
    assert (state["reason"], state["since_s"]) == (None, None)


def test_fused_batches_are_those_that_ran_and_unfused_ones_what_would_be_left_of_the_first() -> None:
    blocks = blocks_state(looks(), [1.0, 0.5, 0.25, 0.25])
    assert [block["fused"] for block in blocks] == [7.0, 3.5, 3.0, 3.0]
    assert [block["unfused"] for block in blocks] == [7.0, 3.5, 1.75, 1.75]
    assert [block["target"] for block in blocks] == [8, 8, 4, 4]
    assert [block["is_first"] for block in blocks] == [True, False, True, False]


@pytest.mark.parametrize("survival", [None, [0.0, 0.0, 0.0, 0.0]], ids=["unknown", "nothing came in"])
def test_without_answers_there_are_no_batches_to_show(survival: list[float] | None) -> None:
    assert {block["fused"] for block in blocks_state(looks(), survival)} == {None}


def test_a_split_that_ran_nothing_has_no_batch() -> None:
    before, _ = looks()
    assert {block["unfused"] for block in blocks_state([before], [1.0, 0.5, 0.25, 0.25])} == {None}


def test_it_says_whether_thresholds_are_safe_where_they_are_tuned() -> None:
    tuning = {"how": "guarantee", "safe": True, "alarms": 2, "thresholds": {"0": 0.5}, "evidence": 0.1}
    state = plan_state(FACTS, [snapshot(9.0, ingress(), described={"epoch": 3, "tuning": tuning})])
    assert state["tuning"] == {"how": "guarantee", "safe": True, "alarms": 2}
    state = plan_state(FACTS, [snapshot(9.0, ingress(), described={"epoch": 3, "tuning": tuning | {"how": "off"}})])
    assert state["tuning"] is None
