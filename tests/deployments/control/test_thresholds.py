"""Thresholds that follow the stream: the tuner is the test's."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployments.controller.description import describe
from earlyexit.network.split import Split
from optimizer.plan import Plan, PolicySpec, Stage
from optimizer.plan_file import plan_document
from tests.deployments.control.control_fakes import CHAIN, EASY, POLICY, RAMPS, begun, halves, planned, whole
from tests.deployments.control.told_tuner import (
    LOWER,
    SAFE,
    ToldTuner,
    alarm_while_replicas_start,
    on_trial,
    thresholds_of,
    tuned,
)


async def test_an_alarm_is_an_epoch_of_its_own_that_starts_nothing(tmp_path: Path) -> None:
    scene, tuner = await tuned(tmp_path)
    tuner.says(SAFE, "alarm")
    await scene.ticks(1, EASY)
    assert scene.fleet.log == ["decide 1"]
    assert scene.fleet.followed.plan.stages == halves(3, 1)
    assert thresholds_of(scene) == SAFE
    assert scene.said("alarm") == ["alarm!"]
    row = scene.history.plans(1)[0]
    assert (row.epoch, row.outcome, row.reason) == (1, "in force", "alarm")
    assert tuner.followed == [dict.fromkeys(RAMPS, 0.5), SAFE]
    assert scene.asked == []  # 20 inputs/s come, and the plan does 200/s when nobody leaves


async def test_what_a_plan_does_by_new_thresholds_is_predicted_from_what_was_seen(tmp_path: Path) -> None:
    scene, tuner = await tuned(tmp_path)
    tuner.says(SAFE, "alarm")
    await scene.ticks(1, EASY)
    # One replica does the second half for everybody: 4 inputs in 20 ms.
    assert scene.fleet.followed.plan.predicted["rate_per_s"] == pytest.approx(200.0)


async def test_a_change_of_thresholds_is_not_taken_for_a_drift(tmp_path: Path) -> None:
    scene, tuner = await tuned(tmp_path)
    tuner.says(SAFE, "alarm")
    await scene.ticks(1, EASY)
    await scene.ticks(10, (0, 100))  # nobody leaves, as was to be expected
    assert scene.said("reaction") == []
    assert scene.asked == []


async def test_inputs_that_leave_although_nobody_should_are_one(tmp_path: Path) -> None:
    scene, tuner = await tuned(tmp_path)
    tuner.says(SAFE, "alarm")
    await scene.ticks(1, EASY)
    await scene.ticks(2, EASY)
    assert scene.said("reaction")[0].startswith("60.0% of 100 inputs left by ramp 1, 0.0% to")


async def test_after_an_alarm_it_is_planned_at_once_if_the_plan_does_not_carry_the_load(tmp_path: Path) -> None:
    scene, tuner = await tuned(tmp_path, (750, 500))  # 250/s
    scene.best = whole(4)
    tuner.says(SAFE, "alarm")
    await scene.ticks(1, (750, 500))  # the second half does 200/s when nobody leaves
    assert scene.fleet.log[0] == "decide 1"
    assert scene.asked[0].survival_N == pytest.approx((1.0,) * 4)
    assert scene.fleet.followed.plan.stages == whole(4)
    assert thresholds_of(scene) == SAFE
    assert [row.reason for row in scene.history.plans(2)] == ["after an alarm", "alarm"]
    assert scene.said("plan")[-1].startswith("plan 2 in force (after an alarm): 4 x cpu blocks 0-3, 400/s")


async def test_tested_thresholds_follow_and_a_plan_for_them_is_looked_for(tmp_path: Path) -> None:
    scene, tuner = await tuned(tmp_path)
    tuner.says(SAFE, "alarm")
    await scene.ticks(1, EASY)
    tuner.says(LOWER, "tested")
    await scene.ticks(1, (0, 100))
    assert thresholds_of(scene) == LOWER
    assert scene.history.plans(1)[0].reason == "thresholds"
    assert [asked.survival_N[2] for asked in scene.asked] == pytest.approx([0.4], abs=0.02)
    assert scene.fleet.log == ["decide 1", "decide 2"]


async def test_an_exit_that_moves_to_a_ramp_that_is_off_is_planned_for_at_once(tmp_path: Path) -> None:
    scene, tuner = await tuned(tmp_path)
    tuner.says({0: 0.5, 1: 0.6, 2: SAFE[2]}, "tuned")
    await scene.ticks(1, EASY)
    assert scene.asked == []  # somebody still leaves at ramp 1, the only one that the plan has on
    tuner.says({0: SAFE[0], 1: SAFE[1], 2: 0.5}, "tuned")
    await scene.ticks(1, EASY)
    assert len(scene.asked) == 1
    tuner.says(SAFE, "tuned")
    await scene.ticks(1, EASY)
    assert len(scene.asked) == 1


async def test_tuned_thresholds_are_those_of_later_plans_and_outlive_the_controller(tmp_path: Path) -> None:
    scene, tuner = await tuned(tmp_path)
    tuner.says(LOWER, "tested")
    await scene.ticks(1, EASY)
    scene.history.close()
    scene.start()
    assert scene.loop.stream.thresholds(scene.loop.state) == LOWER
    scene.solve_as = lambda asked: planned(asked, halves(2, 2))
    await scene.ticks(25, (10, 90))
    assert scene.fleet.followed.plan.stages == halves(2, 2)
    assert thresholds_of(scene) == LOWER
    await scene.ticks(1, EASY)
    assert tuner.followed[-1] == LOWER


async def test_tested_thresholds_wait_until_a_plan_on_trial_was_judged(tmp_path: Path) -> None:
    tuner = ToldTuner()
    scene = await begun(
        tmp_path, first=whole(4), best=halves(3, 1), make_tuner=lambda _: tuner, predicted={"rate_per_s": 400.0}
    )
    await scene.ticks(1, EASY)
    assert on_trial(scene)
    tuner.says(LOWER, "tested")
    await scene.ticks(1, EASY)
    assert thresholds_of(scene) == POLICY.thresholds
    await scene.ticks(5, EASY)
    assert not on_trial(scene)
    assert thresholds_of(scene) == LOWER


async def test_an_alarm_ends_the_trial_of_a_plan(tmp_path: Path) -> None:
    tuner = ToldTuner()
    scene = await begun(
        tmp_path, first=whole(4), best=halves(3, 1), make_tuner=lambda _: tuner, predicted={"rate_per_s": 400.0}
    )
    await scene.ticks(1, EASY)
    tuner.says(SAFE, "alarm")
    await scene.ticks(1, EASY)
    assert not on_trial(scene)
    assert thresholds_of(scene) == SAFE
    await scene.ticks(8, (0, 100), in_slo=False)
    assert scene.said("trial") == []


async def test_an_alarm_does_not_wait_for_replicas_that_are_starting(tmp_path: Path) -> None:
    scene, tuner = await tuned(tmp_path)
    await alarm_while_replicas_start(scene, tuner, come=True)
    # The plan that is followed first, then the one that the change leads to.
    assert [line for line in scene.fleet.log if "scale" not in line] == ["decide 2", "prepare 3", "follow 3"]
    assert thresholds_of(scene) == SAFE
    assert scene.fleet.followed.plan.stages == halves(2, 2)


async def test_somebodys_own_thresholds_are_theirs(tmp_path: Path) -> None:
    scene, tuner = await tuned(tmp_path)
    own = Plan(stages=halves(3, 1), policy=PolicySpec(name="confidence", thresholds=dict.fromkeys(RAMPS, 0.9)))
    await scene.loop.apply(plan_document(own), hold=True)
    assert scene.fleet.log == ["decide 1"]
    before = tuner.observed
    tuner.says(SAFE, "alarm")
    await scene.ticks(3, EASY)
    assert thresholds_of(scene) == dict.fromkeys(RAMPS, 0.9)
    assert tuner.observed <= before + 100
    await scene.loop.replan()
    await scene.ticks(2, EASY)
    assert thresholds_of(scene) == SAFE


async def test_a_plan_that_is_held_is_held_to_its_stages_only(tmp_path: Path) -> None:
    scene, tuner = await tuned(tmp_path)
    await scene.loop.apply(plan_document(Plan(stages=whole(4))), hold=True)
    tuner.says(SAFE, "alarm")
    await scene.ticks(1, (750, 500))
    assert thresholds_of(scene) == SAFE
    assert scene.fleet.followed.plan.stages == whole(4)
    assert scene.asked == []


async def test_an_ingress_that_dies_at_that_moment_is_told_at_the_next_look(tmp_path: Path) -> None:
    scene, tuner = await tuned(tmp_path)
    scene.fleet.broken.add("decide")
    tuner.says(SAFE, "alarm")
    await scene.ticks(1, EASY)
    assert thresholds_of(scene) == POLICY.thresholds
    scene.fleet.broken.clear()
    await scene.ticks(1, EASY)
    assert thresholds_of(scene) == SAFE
    assert scene.fleet.log == ["decide 1"]


async def test_a_plan_that_is_rolled_back_to_goes_by_the_present_thresholds(tmp_path: Path) -> None:
    scene, tuner = await tuned(tmp_path)
    tuner.says(LOWER, "tested")
    await scene.ticks(1, EASY)
    before = Plan(stages=whole(4), policy=POLICY)
    assert scene.loop.service.decided(before, scene.loop.state).policy == PolicySpec(
        name="confidence", thresholds=LOWER
    )


async def test_it_says_by_which_thresholds_answers_leave(tmp_path: Path) -> None:
    from tests.deployments.control.test_controller import settings

    scene, tuner = await tuned(tmp_path)
    tuner.says(SAFE, "alarm")
    await scene.ticks(1, EASY)
    described = describe(scene.loop, scene.history, settings(tmp_path), scene.clock.now_s(), CHAIN)
    assert described["tuning"]["thresholds"] == {str(ramp): SAFE[ramp] for ramp in RAMPS}
    assert (described["tuning"]["safe"], described["tuning"]["alarms"]) == (True, 1)


async def test_the_tuner_judges_batches_of_the_plan_that_is_followed(tmp_path: Path) -> None:
    scene, tuner = await tuned(tmp_path)
    tuner.says(SAFE, "alarm")
    await scene.ticks(1, EASY)
    assert tuner.served == [4]
    for batch in (2, 9):  # 4 is the largest that was measured
        stages = (Stage(device="cpu", replicas=4, splits=(Split(first=0, end=4, batch=batch),)),)
        await scene.loop.apply(plan_document(Plan(stages=stages)), hold=True)
    assert tuner.served == [4, 2, 4]
