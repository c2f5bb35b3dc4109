"""Thresholds from a fake tuner, with restarts, operators' plans and failures in between."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from deployments.controller.description import describe
from deployments.controller.observe import Tuning
from earlyexit.network.boundary import Split
from optimizer.live.tuning import TUNERS
from optimizer.plans.plan import Plan, PolicySpec, Stage
from optimizer.plans.plan_file import plan_document
from optimizer.problems.problem import MinimizeCost
from tests.deployments.control.control_fakes import (
    EASY,
    GROWING,
    LOWER,
    POLICY,
    QUESTION,
    RAMPS,
    SAFE,
    Scene,
    ToldTuner,
    alarm_while_replicas_start,
    begun,
    halves,
    planned,
    probes,
    problem,
    thresholds_of,
    tuned,
    whole,
)
from tests.deployments.control.test_controller import settings
from tests.optimizer.live.tuning.logs import lying, mixed, question


async def test_an_alarm_is_an_epoch_of_its_own_and_no_drift_also_if_an_ingress_failed(tmp_path: Path) -> None:
    scene, tuner = await tuned(tmp_path)
    scene.fleet.broken.add("follow")
    tuner.says(SAFE, "alarm")
    await scene.ticks(1, EASY)
    assert thresholds_of(scene) == POLICY.thresholds
    scene.fleet.broken.clear()
    await scene.ticks(1, EASY)
    assert scene.fleet.log == ["follow 1"]
    assert scene.fleet.followed.plan.stages == halves(3, 1)
    assert thresholds_of(scene) == SAFE
    assert scene.said("alarm") == ["alarm!"]
    row = scene.history.plans(1)[0]
    assert (row["epoch"], row["outcome"], row["reason"]) == (1, "in force", "alarm")
    # One replica runs the second half for all inputs: 4 inputs in 20 ms.
    assert scene.fleet.followed.plan.predicted["rate_per_s"] == pytest.approx(200.0)
    assert tuner.followed == [dict.fromkeys(RAMPS, 0.5), SAFE]
    await scene.ticks(10, (0, 100))  # no input leaves, as forecast
    assert scene.said("reaction") == []
    assert scene.asked == []  # 20 inputs/s arrive, and the plan serves 200/s if no input leaves
    await scene.ticks(2, EASY)  # inputs leave although none should
    assert scene.said("reaction")[0].startswith("60.0% of 100 inputs left by ramp 1, 0.0% to")


async def test_after_an_alarm_the_controller_plans_at_once_if_the_plan_is_too_weak(tmp_path: Path) -> None:
    scene, tuner = await tuned(tmp_path, (750, 500))  # 250/s
    scene.best = whole(4)
    tuner.says(SAFE, "alarm")
    await scene.ticks(1, (750, 500))  # the second half serves 200/s if no input leaves
    assert scene.fleet.log[0] == "follow 1"
    assert scene.asked[0].survival_N == pytest.approx((1.0,) * 4)
    assert scene.fleet.followed.plan.stages == whole(4)
    assert thresholds_of(scene) == SAFE
    assert [row["reason"] for row in scene.history.plans(2)] == ["after an alarm", "alarm"]
    assert scene.said("plan")[-1].startswith("plan 2 in force (after an alarm): 4 x cpu blocks 0-3, 400/s")


async def test_tested_thresholds_are_applied_before_a_plan_for_them_is_sought(tmp_path: Path) -> None:
    scene, tuner = await tuned(tmp_path)
    tuner.says(SAFE, "alarm")
    await scene.ticks(1, EASY)
    tuner.says(LOWER, "tested")
    await scene.ticks(1, (0, 100))
    assert thresholds_of(scene) == LOWER
    assert scene.history.plans(1)[0]["reason"] == "thresholds"
    assert [asked.survival_N[2] for asked in scene.asked] == pytest.approx([0.4], abs=0.02)
    assert scene.fleet.log == ["follow 1", "follow 2"]


async def test_the_controller_plans_at_once_if_an_exit_moves_to_an_inactive_ramp(tmp_path: Path) -> None:
    scene, tuner = await tuned(tmp_path)
    tuner.says({0: 0.5, 1: 0.6, 2: SAFE[2]}, "tuned")
    await scene.ticks(1, EASY)
    assert scene.asked == []  # some inputs still leave at ramp 1, the only active one
    tuner.says({0: SAFE[0], 1: SAFE[1], 2: 0.5}, "tuned")
    await scene.ticks(1, EASY)
    assert len(scene.asked) == 1
    tuner.says(SAFE, "tuned")
    await scene.ticks(1, EASY)
    assert len(scene.asked) == 1


async def test_later_plans_and_a_restarted_controller_use_tuned_thresholds(tmp_path: Path) -> None:
    scene, tuner = await tuned(tmp_path)
    tuner.says(LOWER, "tested")
    await scene.ticks(1, EASY)
    scene.restart()
    assert scene.loop.state.thresholds == LOWER
    scene.solve_as = lambda asked: planned(asked, halves(2, 2))
    await scene.ticks(25, (10, 90))
    assert scene.fleet.followed.plan.stages == halves(2, 2)
    assert thresholds_of(scene) == LOWER
    await scene.ticks(1, EASY)
    assert tuner.followed[-1] == LOWER


async def tried(path: Path) -> tuple[Scene, ToldTuner]:
    """Returns a scene whose plan is on trial."""
    tuner = ToldTuner()
    predicted = {"rate_per_s": 400.0}
    scene = await begun(path, first=whole(4), best=halves(3, 1), make_tuner=lambda _: tuner, predicted=predicted)
    await scene.ticks(1, EASY)
    assert scene.loop.state.trial is not None
    return scene, tuner


async def test_tested_thresholds_wait_until_a_plan_on_trial_was_judged(tmp_path: Path) -> None:
    scene, tuner = await tried(tmp_path)
    tuner.says(LOWER, "tested")
    await scene.ticks(1, EASY)
    assert thresholds_of(scene) == POLICY.thresholds
    await scene.ticks(5, EASY)
    assert scene.loop.state.trial is None
    assert thresholds_of(scene) == LOWER


async def test_an_alarm_ends_the_trial_of_a_plan(tmp_path: Path) -> None:
    scene, tuner = await tried(tmp_path)
    tuner.says(SAFE, "alarm")
    await scene.ticks(1, EASY)
    assert scene.loop.state.trial is None
    assert thresholds_of(scene) == SAFE
    await scene.ticks(8, (0, 100), in_slo=False)
    assert scene.said("trial") == []


async def test_an_alarm_does_not_wait_for_replicas_that_are_starting(tmp_path: Path) -> None:
    scene, tuner = await tuned(tmp_path)
    await alarm_while_replicas_start(scene, tuner, come=True)
    # First the followed plan, then the new plan of the change.
    assert [line for line in scene.fleet.log if "scale" not in line] == ["follow 2", "prepare 3", "follow 3"]
    assert thresholds_of(scene) == SAFE
    assert [(row["epoch"], row["reason"]) for row in scene.history.plans(2)] == [(2, "alarm"), (3, "reaction")]
    assert scene.fleet.followed.plan.stages == halves(3, 2)


async def test_an_alarm_while_inputs_drain_does_not_make_the_change_wait_for_later_inputs(tmp_path: Path) -> None:
    scene, tuner = await tuned(tmp_path)
    scene.fleet.behind = {"i"}
    await scene.loop.apply(plan_document(Plan(stages=whole(3))))
    tuner.says(SAFE, "alarm")
    await scene.ticks(1, EASY)
    assert (scene.fleet.followed.epoch, thresholds_of(scene)) == (2, SAFE)
    assert scene.fleet.log[-1] == "follow 2"
    scene.fleet.behind, scene.fleet.oldest = set(), 1  # inputs since the switch, before the alarm
    await scene.ticks(1, EASY)
    assert scene.fleet.log[-1] == "scale cpu to 3"


OWN = dict.fromkeys(RAMPS, 0.9)


def own(thresholds: dict[int, float]) -> dict[str, object]:
    """Returns an operator's plan as a document."""
    return plan_document(Plan(stages=halves(3, 1), policy=PolicySpec(name="confidence", thresholds=thresholds)))


async def test_an_operators_own_thresholds_stay(tmp_path: Path) -> None:
    scene, tuner = await tuned(tmp_path)
    await scene.loop.apply(own(OWN), hold=True)
    assert scene.fleet.log == ["follow 1"]
    before = tuner.observed
    tuner.says(SAFE, "alarm")
    await scene.ticks(3, EASY)
    assert thresholds_of(scene) == OWN
    assert tuner.observed <= before + 100
    await scene.plans_again()
    await scene.ticks(2, EASY)
    assert thresholds_of(scene) == SAFE


async def test_thresholds_change_under_a_held_plan(tmp_path: Path) -> None:
    scene, tuner = await tuned(tmp_path)
    await scene.loop.apply(plan_document(Plan(stages=whole(4))), hold=True)
    tuner.says(SAFE, "alarm")
    await scene.ticks(1, (750, 500))
    assert thresholds_of(scene) == SAFE
    assert scene.fleet.followed.plan.stages == whole(4)
    assert scene.asked == []


async def test_thresholds_that_change_at_every_tick_stop_no_other_decision(tmp_path: Path) -> None:
    tuner, cheap = ToldTuner(), replace(problem(), objective=MinimizeCost(rate_per_s=20.0))
    scene = await begun(tmp_path, problem=cheap, first=whole(1), best=whole(1), make_tuner=lambda _: tuner)
    for number, inputs in enumerate([EASY] * 30 + [(180, 120)] * 2):
        tuner.says({**LOWER, 0: number / 100}, "alarm" if number % 2 else "tuned")
        await scene.ticks(1, inputs)
    assert len(scene.asked) == 3, "at the end of two periods, and for the new rate"


async def test_the_tuner_uses_batches_of_the_followed_plan(tmp_path: Path) -> None:
    scene, tuner = await tuned(tmp_path)
    assert tuner.served == [4]
    for batch in (2, 9):  # 4 is the largest that was measured
        stages = (Stage(device="cpu", replicas=4, splits=(Split(first=0, end=4, batch=batch),)),)
        await scene.loop.apply(plan_document(Plan(stages=stages)))
    assert tuner.served == [4, 2, 4]
    tuner.says(SAFE, "alarm")
    await scene.ticks(1, EASY)
    assert (thresholds_of(scene), scene.said("error")) == (SAFE, [])


@pytest.mark.parametrize("name", TUNERS)
async def test_a_tuner_made_after_a_restart_tunes_all_ramps_from_its_first_observations_on(
    tmp_path: Path, name: str
) -> None:
    scene = await begun(tmp_path, first=halves(3, 1), best=halves(3, 1))
    scene.make_tuner = lambda shape: TUNERS[name](QUESTION)
    scene.restart()
    await scene.ticks(3, (362, 241))
    assert scene.said("error") == []
    assert set(thresholds_of(scene)) == set(RAMPS)
    state = scene.loop.tuning.state
    assert state is not None
    assert thresholds_of(scene) != SAFE
    assert state.rows > 0
    # The initial thresholds passed a test of many inputs. PAME judges every 50 batches of 4.
    assert state.next_test == {"guarantee": 3939 + 100, "apparate": None, "pame": 50 * 4}[name]
    scene.restart()
    await scene.ticks(2, EASY)
    assert scene.said("error") == []


async def test_thresholds_that_leave_a_ramp_out_are_refused(tmp_path: Path) -> None:
    scene, tuner = await tuned(tmp_path)
    tuner.says({1: 0.25}, "tested")
    await scene.ticks(1, EASY)
    assert scene.said("error") == ["the observations cannot be used: tested!: no threshold for ramps [0, 2]"]
    assert thresholds_of(scene) == POLICY.thresholds
    scene.restart()
    assert scene.loop.state.thresholds == POLICY.thresholds


async def test_answers_under_an_operators_thresholds_do_not_count_for_the_tuner(tmp_path: Path) -> None:
    scene = await begun(
        tmp_path, ticks=6, first=halves(3, 1), best=halves(3, 1), make_tuner=lambda _: TUNERS["guarantee"](QUESTION)
    )
    await scene.loop.apply(own(dict.fromkeys(RAMPS, 0.1)), hold=True)

    def all_wrong() -> None:
        seen = probes([scene.clock.now_s()] * 100, [True] * 100, scene.fleet.followed.plan)
        seen.losses_NR[:, 1] = 1.0
        scene.fleet.pending.append(seen)

    all_wrong()
    await scene.ticks(1)
    all_wrong()  # reported when the controller's thresholds are in force again
    await scene.plans_again()
    await scene.ticks(3, EASY)
    assert scene.said("alarm") == []
    assert thresholds_of(scene) == POLICY.thresholds


async def test_pending_thresholds_are_dropped_by_an_operators_plan(tmp_path: Path) -> None:
    scene, tuner = await tried(tmp_path)
    tuner.says(LOWER, "tested")
    await scene.ticks(1, EASY)  # it waits for the end of the trial
    await scene.loop.apply(own(OWN), hold=True)
    await scene.ticks(30, EASY)
    told = len(tuner.followed)
    await scene.plans_again()
    await scene.ticks(2, EASY)
    assert thresholds_of(scene) == POLICY.thresholds
    assert tuner.followed[told:] == [POLICY.thresholds]


async def test_an_operators_plan_does_not_drop_an_alarm(tmp_path: Path) -> None:
    scene, tuner = await tuned(tmp_path)
    tuner.says(SAFE, "alarm")
    scene.inputs(*EASY)
    await scene.loop.apply(own(OWN), hold=True)
    assert thresholds_of(scene) == OWN
    await scene.plans_again()
    assert thresholds_of(scene) == SAFE


@pytest.mark.parametrize("restarts", [False, True])
async def test_an_alarm_during_a_change_is_repeated_to_ingresses_that_missed_it(tmp_path: Path, restarts: bool) -> None:
    scene, tuner = await tuned(tmp_path)
    await alarm_while_replicas_start(scene, tuner, broken="follow")
    assert thresholds_of(scene) == POLICY.thresholds
    assert scene.history.get("standing")["thresholds"] == {str(ramp): at for ramp, at in SAFE.items()}
    scene.fleet.broken.clear()
    if restarts:
        scene.start()
    await scene.ticks(1, (10, 90))  # replicas still do not start
    assert [line for line in scene.fleet.log if "scale" not in line] == ["follow 2"]
    assert thresholds_of(scene) == SAFE
    assert scene.loop.state.placed.epoch == 3
    assert tuner.followed[-1] == SAFE
    assert scene.loop.changes["alarm"] == 1 - restarts


async def test_thresholds_are_stored_together_with_their_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scene, tuner = await tuned(tmp_path)

    def dies(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(scene.loop, "_apply_plan", dies)
    tuner.says(SAFE, "alarm")
    with pytest.raises(KeyboardInterrupt):
        await scene.ticks(1, EASY)
    scene.restart()
    assert scene.loop.view.uses_current_thresholds(scene.loop.state.placed.plan)
    assert scene.loop.state.thresholds == POLICY.thresholds


@pytest.mark.parametrize(
    "changed", [{"tuning": "off"}, {"accuracy_budget": 0.005}, {"accuracy_confidence": 0.99}], ids=repr
)
async def test_other_settings_restore_the_initial_thresholds(tmp_path: Path, changed: dict[str, object]) -> None:
    scene, tuner = await tuned(tmp_path, tuning="guarantee", accuracy_budget=0.01)
    tuner.says(LOWER, "tested")
    await scene.ticks(1, EASY)
    scene.restart()
    assert scene.loop.state.thresholds == LOWER
    scene.settings = {**scene.settings, **changed}
    scene.restart()
    assert scene.loop.state.thresholds == POLICY.thresholds
    assert scene.said("error") == [f"the last plan cannot be restored: settings have changed: {', '.join(changed)}"]
    await scene.ticks(1, EASY)
    assert thresholds_of(scene) == POLICY.thresholds
    assert scene.fleet.log[-1].startswith("follow")
    scene.restart()
    assert thresholds_of(scene) == POLICY.thresholds
    assert scene.said("restart")[-1].startswith(f"takes up plan {scene.loop.state.placed.epoch} again")


async def test_a_coming_plan_that_an_alarm_makes_too_weak_is_given_up_at_once(tmp_path: Path) -> None:
    tuner = ToldTuner()
    scene = await begun(tmp_path, (750, 500), **GROWING | {"best": halves(4, 1)}, make_tuner=lambda _: tuner)
    scene.fleet.is_stuck = True
    tries = 0

    def meanwhile() -> None:
        nonlocal tries
        tries += 1
        if tries == 40:
            tuner.says(SAFE, "alarm")
            scene.best = whole(5)
        if tries == 80:
            scene.fleet.replicas["cpu"] = 5
            scene.fleet.is_stuck = False
        if tries % 20 == 0:
            scene.inputs(*((750, 500) if tries <= 40 else (0, 1250)))

    scene.meanwhile = meanwhile
    await scene.ticks(1, (750, 500))
    assert (scene.fleet.followed.plan.stages, thresholds_of(scene)) == (whole(5), SAFE)
    assert scene.history.plans(1)[0]["reason"] == "after an alarm"
    assert describe(scene.loop, scene.history, settings(tmp_path))["tuning"]["alarms"] == 1


BOLD = {0: 0.8, 1: 0.8}


def test_new_thresholds_inherit_the_urgency_of_a_pending_alarm() -> None:
    tuning = Tuning(lambda _: TUNERS["guarantee"](question()), problem())
    tuning.follow(BOLD, 0.0, whole(1)[0])
    tuning.observe([mixed(100, BOLD)])
    tuning.observe([lying(10, BOLD, first_s=100.0)])
    alarm = tuning.alarm
    assert alarm is not None
    tuning.observe([mixed(60, BOLD, first_s=110.0)])
    assert tuning.alarm is not None
    assert tuning.alarm.thresholds != alarm.thresholds
    assert tuning.alarm.words.startswith(f"{alarm.words}; tested on the last ")
