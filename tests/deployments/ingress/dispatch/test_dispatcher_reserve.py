"""What a dispatcher has stages leave of a deadline for the stages after them."""

from __future__ import annotations

from dataclasses import replace

from earlyexit.errors import DeadlineError
from tests.deployments.ingress.dispatch.dispatcher_scene import PLAN, Scene, StageCallLog, turns

DEFERRED = replace(PLAN, dispatch="deferred")


async def to_the_end(scene: Scene, name: str, *, stage_s: float) -> None:
    """Send an input through all stages, `stage_s` each."""
    call = await scene.sent(name)
    for stage, next_block in zip(scene.stages[1:], (2, 4), strict=True):
        scene.clock.advance(stage_s)
        call.send_on(name, next_block=next_block)
        await turns()
        call = stage.calls[-1]
    scene.clock.advance(stage_s)
    call.answer(name, exit_block=5)
    await turns()


async def at(scene: Scene, name: str, *, deadline_s: float) -> StageCallLog:
    scene.submit(name, deadline_s=deadline_s)
    await turns()
    return scene.stages[0].calls[-1]


async def test_the_first_reply_of_a_stage_is_what_is_expected_of_it() -> None:
    scene = Scene()
    await to_the_end(scene, "a", stage_s=2.0)
    assert (await scene.sent("b")).call.reserve_s == 4.0


async def test_what_a_stage_drops_says_nothing_of_how_long_it_takes() -> None:
    scene = Scene()
    await to_the_end(scene, "a", stage_s=2.0)
    call = await scene.sent("b")
    call.send_on("b", next_block=2)
    await turns()
    scene.stages[1].calls[-1].lose("b", DeadlineError("late"))
    await turns()
    assert (await scene.sent("c")).call.reserve_s == 4.0


async def test_a_stage_that_would_wait_for_a_full_batch_does_not_while_a_later_ones_time_is_unknown() -> None:
    scene = Scene(plan=DEFERRED)
    await to_the_end(scene, "a", stage_s=2.0)
    assert scene.stages[0].calls[0].call.reserve_s == 10.0  # all that was left
    assert (await at(scene, "b", deadline_s=20.0)).call.reserve_s == 4.0


async def test_a_stage_that_waits_for_a_full_batch_leaves_the_slack_besides() -> None:
    scene = Scene(plan=DEFERRED, slo_s=10.0, slack=0.25)
    await to_the_end(scene, "a", stage_s=1.0)
    assert (await at(scene, "b", deadline_s=13.0)).call.reserve_s == 2.0 + 2.5
