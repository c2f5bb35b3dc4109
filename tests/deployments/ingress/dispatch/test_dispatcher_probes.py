"""A dispatcher's probes: seen to the end, whoever was answered on the way, and no caller any the wiser."""

from __future__ import annotations

import numpy as np
import pytest

from deployments.ingress.core.ingress_core import HANG_S
from earlyexit.errors import DeadlineError
from earlyexit.split import Split
from optimizer.placement import PlacedPlan
from optimizer.plan import Plan, PolicySpec, Stage
from profiles.stream import Observations, StreamShape
from tests.deployments.ingress.dispatch.dispatcher_scene import SLOTS, Scene, turns

SHAPE = StreamShape(score="entropy", num_blocks=6, ramps=(1, 3))
STAGES = (
    Stage(device="cpu", replicas=1, splits=(Split(first=0, end=2, batch=4, ramps=(1,)),)),
    Stage(device="cpu", replicas=1, splits=(Split(first=2, end=4, batch=4, ramps=(3,)),)),
    Stage(device="cpu", replicas=1, splits=(Split(first=4, end=6, batch=4),)),
)
PLAN = Plan(stages=STAGES, policy=PolicySpec(name="entropy", thresholds=0.5), epoch=7)


def probing(*, probe_share: float = 1.0, plan: Plan = PLAN) -> Scene:
    return Scene(plan=plan, shape=SHAPE, probe_share=probe_share)


def observed(scene: Scene, wall_s: float = 0.0) -> Observations:
    probes = scene.report(wall_s).probes
    assert probes is not None
    return probes


async def test_an_answered_probe_goes_on_to_the_end_and_its_caller_has_the_early_answer() -> None:
    scene = probing()
    scene.clock.advance(2.0)
    first = await scene.sent("ab")
    first.see("a", 1, score=0.1, label=0)
    first.see("b", 1, score=0.9, label=2)
    first.answer_early("a", exit_block=1)
    first.send_on("ab", next_block=2)
    first.end()
    await turns()
    assert (scene.answered, scene.core.num_unanswered) == ("a", 1)
    scene.clock.advance(3.0)
    second = scene.stages[1].calls[0]
    assert (second.names, second.call.probe, second.call.remaining_s) == ("ab", True, (8.0, 8.0))
    second.see("a", 3, score=0.2, label=0)
    second.see("b", 3, score=0.8, label=1)
    second.send_on("ab", next_block=4)
    second.end()
    await turns()
    third = scene.stages[2].calls[0]
    third.see("a", 5, score=float("nan"), label=1)
    third.see("b", 5, score=float("nan"), label=0)
    third.answer("ab", exit_block=5)  # a is a duplicate
    third.end()
    await turns()
    assert (scene.answered, scene.metrics.exits, scene.report(0.0).epoch) == ("ab", [1, 5], 7)
    assert scene.core.agreement == 0.5  # a left with 0, the full model says 1


async def test_what_is_handed_over_says_everything_of_a_probe_at_wall_clock_times() -> None:
    scene = probing()
    scene.clock.advance(2.0)
    call = await scene.sent("a")
    scene.clock.advance(1.0)
    call.see("a", 1, score=0.25, label=0)
    call.answer_early("a", exit_block=1)
    call.see("a", 3, score=0.5, label=2)
    call.see("a", 5, score=float("nan"), label=1)
    call.answer("a", exit_block=5)
    await turns()
    seen = observed(scene, wall_s=1003.0)
    assert (seen.times_s_N.tolist(), seen.probe_N.tolist(), seen.exits_N.tolist()) == ([1002.0], [True], [1])
    assert (seen.scores_NR.tolist(), seen.losses_NR.tolist()) == ([[0.25, 0.5]], [[1, 1]])
    assert seen.active_NR.tolist() == [[True, True]]
    assert scene.report(1003.0).probes is None  # handed over once


async def test_a_failed_call_gives_answered_probes_up_and_sends_the_others_again() -> None:
    scene = probing()
    first = await scene.sent("ab")
    first.answer_early("a", exit_block=1)
    first.send_on("ab", next_block=2)
    first.end()
    await turns()
    scene.stages[1].calls[0].fail()
    await turns()
    assert scene.stages[0].names == ["ab", "b"]
    assert (scene.metrics.retries, scene.answered) == ([(SLOTS[1], 1)], "a")
    again = scene.stages[0].calls[1]
    for block in (1, 3, 5):
        again.see("b", block)
    again.answer("b", exit_block=5)
    await turns()
    assert len(observed(scene)) == 1


async def test_a_lost_answered_probe_is_no_drop() -> None:
    scene = probing()
    call = await scene.sent("ab")
    call.answer_early("a", exit_block=1)
    call.lose("a", DeadlineError("no time left"))
    call.lose("b", DeadlineError("no time left"))
    call.end()
    await turns()
    assert (scene.answered, scene.errors) == ("a", [("b", "deadline")])
    assert (scene.metrics.drops, len(scene.stages[0].calls)) == ([("deadline", 1)], 1)


async def test_the_share_says_how_many_first_calls_are_probes() -> None:
    scene = probing(probe_share=0.25)
    for _ in range(200):
        (await scene.sent("a")).answer("a")
        scene.stages[0].calls[-1].end()
        await turns()
    assert 30 <= sum(call.call.probe for call in scene.stages[0].calls) <= 70  # 50 expected, deviation 6


@pytest.mark.parametrize("name", ["confidence", "patience"])
async def test_a_policy_that_does_not_see_in_the_shapes_unit_is_not_probed(name: str) -> None:
    policy = (
        PolicySpec(name="patience", patience=2) if name == "patience" else PolicySpec(name="confidence", thresholds=0.5)
    )
    scene = probing(plan=Plan(stages=STAGES, policy=policy))
    assert not (await scene.sent("a")).call.probe


async def test_a_probe_that_a_changed_plan_let_out_counts_for_that_plan() -> None:
    only_last = Plan(
        stages=(Stage(device="cpu", replicas=1, splits=(Split(first=0, end=6, batch=4, ramps=(3,)),)),),
        policy=PLAN.policy,
        epoch=8,
    )
    scene = probing(
        plan=Plan(
            stages=(*STAGES[:1], Stage(device="cpu", replicas=1, splits=(Split(first=2, end=4, batch=4),)), STAGES[2]),
            policy=PLAN.policy,
            epoch=7,
        )
    )
    call = await scene.sent("a")
    scene.dispatcher.follow(PlacedPlan(plan=only_last, slots=SLOTS[:1]))
    call.see("a", 1)
    call.see("a", 3)
    call.answer_early("a", exit_block=3)
    call.see("a", 5)
    await turns()
    assert np.array_equal(observed(scene).active_NR, [[False, True]])


async def test_survivors_of_probes_that_nobody_will_see_the_end_of_are_not_sent_on() -> None:
    scene = probing()
    call = await scene.sent("a")
    call.answer_early("a", exit_block=1)
    await turns()
    scene.clock.advance(10.0 + HANG_S + 0.1)
    await scene.sent("b")  # a departure forgets what is past
    call.send_on("a", next_block=2)
    await turns()
    assert (scene.answered, scene.stages[1].calls) == ("a", [])
